"""Trees that the draft's confidence shapes: expand and rerank (EAGLE-2, arXiv 2406.16858, section
4; with a beam as wide as the budget and an early end OPT-Tree, arXiv 2406.17276).

Legend: B rows, N drafted nodes, e nodes expanded in a level, k children of each, C candidates so
far, T expanded nodes so far, W pending tokens, V vocabulary.

Children are the most probable tokens. The context determines them, so pruning them is lossless. The
confidence of a token is its probability in the distribution that is sampled from; at temperature 0,
its probability at temperature 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.propose.network import Frontier, Network
from decode.propose.protocol import Outcome, Proposal, Session
from decode.runner import Block
from decode.tree import DynamicTree
from decode.tree_batch import grow_batch
from draftsmith_core.sampling import Sampling, probs


class DynamicTreeSession(Session):
    """A network growing a tree for each row of one `generate` call."""

    def __init__(
        self, network: Network, tree: DynamicTree, sampling: Sampling, device: torch.device
    ) -> None:
        self.network, self.tree, self.sampling, self.device = network, tree, sampling, device

    def propose(self, u_BN: Tensor | None) -> Proposal:
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        shape = self.tree
        tokens_Bk, values_Bk = self._children(self.network.open())
        rows, device = tokens_Bk.shape[0], tokens_Bk.device
        tokens, values = [tokens_Bk], [values_Bk]
        parents = [torch.full_like(tokens_Bk, -1)]
        expanded = [
            torch.full((rows, 1), -1, device=device)
        ]  # candidates that were expanded; the root is -1
        sees_BeT = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
        growing_B1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        first, reached = 0, self._expected(values)
        for _ in range(1, shape.depth):
            # In order of the candidates, so that siblings stay side by side and parents in order.
            best_Be = (
                values[-1]
                .topk(min(shape.beam, values[-1].shape[1]), dim=1)
                .indices.sort(dim=1)
                .values
            )
            inputs_Be, above_Be = tokens[-1].gather(1, best_Be), parents[-1].gather(1, best_Be)
            # Only nodes of the level before can be parents: here their index in that level, below
            # among all.
            place_Be = (expanded[-1].unsqueeze(1) == above_Be.unsqueeze(2)).int().argmax(2)
            count = inputs_Be.shape[1]
            itself = torch.eye(count, dtype=torch.bool, device=device).expand(rows, -1, -1)
            above_BeT = sees_BeT.gather(1, place_Be.unsqueeze(2).expand(-1, -1, sees_BeT.shape[2]))
            sees_BeT = torch.cat([above_BeT, itself], dim=2)
            offset = sum(level.shape[1] for level in expanded[:-1])
            frontier = Frontier(
                inputs_Be.clamp(min=0), place_Be + offset, self._block(sees_BeT, expanded)
            )
            tokens_Bek, new_Bek = self._children(self.network.extend(frontier).unsqueeze(2))
            values.append((new_Bek + values[-1].gather(1, best_Be).unsqueeze(2)).flatten(1))
            tokens.append(tokens_Bek.flatten(1))
            expanded.append(best_Be + first)
            parents.append(expanded[-1].repeat_interleave(tokens_Bek.shape[2], dim=1))
            first += values[-2].shape[1]
            if shape.gain:
                # A row whose tree has ended gets no deeper nodes while its batch mates go on.
                values[-1] = values[-1].masked_fill(~growing_B1, -torch.inf)
                before, reached = reached, self._expected(values)
                growing_B1 = growing_B1 & (reached - before >= shape.gain).unsqueeze(1)
                if not bool(growing_B1.any()):
                    break
        self._expanded = torch.cat([expanded[0][:, :0], *expanded[1:]], dim=1)
        return self._rerank(
            torch.cat(tokens, 1), torch.cat(values, 1), torch.cat(parents, 1), len(values)
        )

    def commit(self, outcome: Outcome) -> None:
        expanded = []
        for path, kept, forwarded in zip(
            outcome.paths, self._kept_BN.tolist(), self._expanded.tolist(), strict=True
        ):
            number_of = {candidate: number for number, candidate in enumerate(forwarded)}
            expanded.append([number_of.get(kept[m - 1]) for m in path])
        self.network.commit(expanded, outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)

    def _children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        # The `beam` best tokens below each node and their log-confidences, from logits [B, ..., 1,
        # V].
        logits = logits.squeeze(-2)
        self._finite = self._finite & logits.amax().isfinite().to(self.device)
        if self.sampling.greedy:
            log_q = logits.float().log_softmax(-1)
        else:
            log_q = probs(logits, self.sampling).log()
        best = log_q.topk(min(self.tree.beam, log_q.shape[-1]), dim=-1)
        return best.indices, best.values

    def _expected(self, values: list[Tensor]) -> Tensor:
        # Expected accepted tokens if the best nodes so far were the tree, [B].
        if not self.tree.gain:
            return values[0].new_zeros(())
        everything = torch.cat(values, dim=1)
        return everything.topk(min(self.tree.nodes, everything.shape[1]), dim=1).values.exp().sum(1)

    def _block(self, sees_BeT: Tensor, expanded: Sequence[Tensor]) -> Block:
        rows, count, _ = sees_BeT.shape
        width, device = self.network.width, sees_BeT.device
        pending = torch.ones(rows, count, width, dtype=torch.bool, device=device)
        offsets = list(range(width))
        for depth, level in enumerate(expanded[1:], 1):
            offsets += [width - 1 + depth] * level.shape[1]
        offsets += [width - 1 + len(expanded)] * count
        return Block(
            torch.tensor([offsets], device=device),
            torch.cat([pending, sees_BeT], dim=2),
            static=False,
        )

    def _rerank(
        self, tokens_BC: Tensor, values_BC: Tensor, parents_BC: Tensor, depth: int
    ) -> Proposal:
        rows, total = values_BC.shape
        count = min(self.tree.nodes, total)
        ranked_BC = values_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BN = ranked_BC[:, :count].sort(dim=1).values
        numbers_BN = torch.arange(1, count + 1, device=kept_BN.device).expand(rows, -1)
        number_BC = torch.zeros(rows, total + 1, dtype=torch.long, device=kept_BN.device)
        number_BC.scatter_(1, kept_BN + 1, numbers_BN)
        parents_BN = number_BC.gather(1, parents_BC.gather(1, kept_BN) + 1) - 1
        exists_BN = values_BC.gather(1, kept_BN) > -torch.inf
        drafted_BN = tokens_BC.gather(1, kept_BN).masked_fill(~exists_BN, -1)
        self._kept_BN = kept_BN
        tokens_BM = torch.nn.functional.pad(drafted_BN, (1, 0), value=-1).to(self.device)
        tree = grow_batch(
            parents_BN.to(self.device), exists_BN.to(self.device), depth, self.tree.beam
        )
        return Proposal(tree, tokens_BM, None, "deterministic", finite=self._finite)
