"""Trees that the draft's confidence shapes: expand and rerank (EAGLE-2, arXiv 2406.16858, section
4; with a beam as wide as the budget and an early end OPT-Tree, arXiv 2406.17276).

Legend: B rows, N drafted nodes, e nodes expanded in a level, k children of each, C candidates so
far, T pending tokens and expanded nodes so far, V vocabulary.

Children are the most probable tokens. The context determines them, so pruning them is lossless. The
confidence of a token is its probability in the distribution that is sampled from; at temperature 0,
its probability at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.core.sampling import Sampling, probs
from draftsmith.decode.kernel_sampling import largest
from draftsmith.decode.propose.network import Frontier, Network
from draftsmith.decode.propose.protocol import Outcome, Proposal, Session
from draftsmith.decode.runner import Block
from draftsmith.decode.tree import DynamicTree
from draftsmith.decode.tree_batch import grow_batch


@dataclass(eq=False)
class DynamicTreeSession(Session):
    """A network growing a tree for each row of one `generate` call."""

    network: Network
    tree: DynamicTree
    sampling: Sampling
    device: torch.device

    def propose(self, u_BN: Tensor | None) -> Proposal:
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        shape = self.tree
        tokens_Bk, values_Bk = self._children(self.network.open())
        rows = len(tokens_Bk)
        device = tokens_Bk.device
        rows_B1 = torch.arange(rows, device=device).unsqueeze(1)
        # By level: the candidates, their log-values, and the candidates above them (-1: the root).
        tokens = [tokens_Bk]
        values = [values_Bk]
        parents = [torch.full_like(tokens_Bk, -1)]
        expanded = [torch.full((rows, 1), -1, device=device)]  # candidates that were expanded
        width = self.network.width
        offsets = list(range(width))
        sees_BeT = torch.ones(rows, 1, width, dtype=torch.bool, device=device)
        growing_B1 = torch.ones(rows, 1, dtype=torch.bool, device=device)
        reached_B = self._expected(values)
        first = 0  # of the newest candidates
        forwarded = 0  # nodes before those that the newest candidates hang under
        for depth in range(1, shape.depth):
            newest_Bc = values[-1]
            candidates = newest_Bc.shape[1]
            count = min(shape.beam, candidates)
            best_Be = newest_Bc.topk(count, dim=1).indices
            # In order of the candidates, so that siblings stay side by side and parents in order.
            best_Be = best_Be.sort(dim=1).values
            # Each of the nodes expanded last has equally many candidates, side by side.
            place_Be = best_Be // (candidates // expanded[-1].shape[1])
            itself = torch.eye(count, dtype=torch.bool, device=device).expand(rows, -1, -1)
            sees_BeT = torch.cat([sees_BeT[rows_B1, place_Be], itself], dim=2)
            offsets += [width - 1 + depth] * count
            block = Block(torch.tensor([offsets], device=device), sees_BeT, static=False)
            inputs_Be = tokens[-1].gather(1, best_Be)
            logits_BeV = self.network.extend(Frontier(inputs_Be, place_Be + forwarded, block))
            tokens_Bek, new_Bek = self._children(logits_BeV.unsqueeze(2))
            above_Be1 = newest_Bc.gather(1, best_Be).unsqueeze(2)
            forwarded += expanded[-1].shape[1]
            expanded.append(best_Be + first)
            first += candidates
            tokens.append(tokens_Bek.flatten(1))
            values.append((new_Bek + above_Be1).flatten(1))
            parents.append(expanded[-1].repeat_interleave(tokens_Bek.shape[2], dim=1))
            if shape.gain:
                # A row whose tree has ended gets no deeper nodes while its batch mates go on.
                values[-1] = values[-1].masked_fill(~growing_B1, -torch.inf)
                before_B = reached_B
                reached_B = self._expected(values)
                gains_B = reached_B - before_B >= shape.gain
                growing_B1 = growing_B1 & gains_B.unsqueeze(1)
                if not bool(growing_B1.any()):
                    break
        self._expanded = torch.cat(expanded, dim=1)[:, 1:]
        return self._rerank(
            tokens_BC=torch.cat(tokens, dim=1),
            values_BC=torch.cat(values, dim=1),
            parents_BC=torch.cat(parents, dim=1),
            depth=len(values),
        )

    def commit(self, outcome: Outcome) -> None:
        kept_BN = self._kept_BN.tolist()
        expanded = []
        for row, forwarded in enumerate(self._expanded.tolist()):
            number_of = {candidate: number for number, candidate in enumerate(forwarded)}
            kept = kept_BN[row]
            expanded.append([number_of.get(kept[node - 1]) for node in outcome.paths[row]])
        self.network.commit(expanded, outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)

    def _children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `beam` best tokens below each node and their log-confidences.

        logits: `[B, ..., 1, V]`.
        """
        logits = logits.squeeze(-2)
        finite = logits.amax().isfinite()
        self._finite = self._finite & finite.to(self.device)
        if self.sampling.greedy:
            log_q = logits.float().log_softmax(-1)
        else:
            log_q = probs(logits, self.sampling).log()
        values, tokens = largest(log_q, min(self.tree.beam, log_q.shape[-1]))
        return tokens, values

    def _expected(self, values: list[Tensor]) -> Tensor:
        """Expected accepted tokens `[B]` if the best nodes so far were the tree; used with `gain`
        only.
        """
        if not self.tree.gain:
            return values[0]
        values_BC = torch.cat(values, dim=1)
        best_BN = values_BC.topk(min(self.tree.nodes, values_BC.shape[1]), dim=1).values
        return best_BN.exp().sum(1)

    def _rerank(
        self, tokens_BC: Tensor, values_BC: Tensor, parents_BC: Tensor, depth: int
    ) -> Proposal:
        rows, total = values_BC.shape
        count = min(self.tree.nodes, total)
        ranked_BC = values_BC.sort(dim=1, descending=True, stable=True).indices
        best_BN = ranked_BC[:, :count]
        kept_BN = best_BN.sort(dim=1).values
        numbers_BN = torch.arange(1, count + 1, device=kept_BN.device).expand(rows, -1)
        number_BC = torch.zeros(rows, total + 1, dtype=torch.long, device=kept_BN.device)
        number_BC.scatter_(1, kept_BN + 1, numbers_BN)
        above_BN = parents_BC.gather(1, kept_BN) + 1
        parents_BN = number_BC.gather(1, above_BN) - 1
        exists_BN = values_BC.gather(1, kept_BN) > -torch.inf
        drafted_BN = tokens_BC.gather(1, kept_BN).masked_fill(~exists_BN, -1)
        self._kept_BN = kept_BN
        device = self.device
        tree = grow_batch(parents_BN.to(device), exists_BN.to(device), depth, self.tree.beam)
        tokens_BM = pad(drafted_BN, (1, 0), value=-1)
        return Proposal(tree, tokens_BM.to(device), None, "deterministic", finite=self._finite)
