"""Drafting a static tree level by level: one forward of the network per level, children drawn as
the verifier needs.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E expanded nodes (those with children), e
those of one level, d drafts (distributions per node), K children of one node, c children in a
level, V vocabulary of the target, R = 1 when rows share a tree, else B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.propose.network import Frontier, Network
from decode.propose.protocol import Outcome, Proposal, Session
from decode.runner import Block
from decode.tree import Drawing, Tree
from decode.tree_batch import TreeBatch, grow_batch
from draftsmith_core.sampling import (
    Sampling,
    draw,
    draw_top_and_one,
    draw_with_replacement,
    draw_without_replacement,
    probs,
)


@dataclass(frozen=True, eq=False)
class Level:
    """Static indices that turn the expanded nodes of one depth into the nodes of the next."""

    draws: int  # K, the most children of one node here
    counts_e: tuple[int, ...]  # children of every expanded node
    uniform_eK: Tensor  # node whose uniform decides draw k of expanded node e
    parent_c: Tensor  # for each child c: its parent among the expanded nodes of this depth
    rank_c: Tensor  # and its place among its siblings
    expanded_c: Tensor | None  # which children have children themselves; None when all have
    count: int  # number of these children
    parents_1e: Tensor  # of these children: their parents among all expanded nodes


@dataclass(frozen=True, eq=False)
class DraftingPlan:
    """All indices and masks of drafting one tree. They are the same at every step, so the proposer
    caches them.
    """

    tree: Tree
    device: torch.device
    levels: tuple[Level, ...]
    number_of: dict[
        int, int
    ]  # M indices of the expanded nodes after the root -> their numbers, from 0
    batches: tuple[TreeBatch, ...]  # the tree cut to each depth, on the target's device
    blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict)

    @staticmethod
    def build(tree: Tree, device: torch.device, target_device: torch.device) -> "DraftingPlan":
        """Put the indices on the draft's device, and the trees of proposals on the target's."""

        def tensor(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        depth_of, levels, chosen = (0, *tree.depths), list[Level](), [0]
        for depth in range(tree.depth):
            parents = [m for m, below in enumerate(tree.children) if below and depth_of[m] == depth]
            kids = [m for m, d in enumerate(depth_of) if d == depth + 1]
            counts = tuple(len(tree.children[m]) for m in parents)
            parent_c = [parents.index(tree.parents[m - 1] + 1) for m in kids]
            expanded = [i for i, m in enumerate(kids) if tree.children[m]]
            levels.append(
                Level(
                    draws=max(counts),
                    counts_e=counts,
                    uniform_eK=tensor(
                        [
                            [
                                tree.children[m][min(k, len(tree.children[m]) - 1)] - 1
                                for k in range(max(counts))
                            ]
                            for m in parents
                        ]
                    ),
                    parent_c=tensor(parent_c),
                    rank_c=tensor([tree.ranks[m - 1] for m in kids]),
                    expanded_c=None if len(expanded) == len(kids) else tensor(expanded),
                    count=len(expanded),
                    parents_1e=tensor(
                        [[chosen.index(tree.parents[kids[i] - 1] + 1) for i in expanded]]
                    ),
                )
            )
            chosen += [kids[i] for i in expanded]
        cuts = [
            Tree(tuple(p for p, d in zip(tree.parents, tree.depths, strict=True) if d <= end))
            for end in range(tree.depth + 1)
        ]
        batches = tuple(TreeBatch.build(cut, target_device) for cut in cuts)
        return DraftingPlan(
            tree, device, tuple(levels), {m: n for n, m in enumerate(chosen[1:])}, batches
        )

    def block(self, depth: int, width: int) -> Block:
        """The forward of the expanded nodes of this depth (from 1) behind `width` pending
        tokens.
        """
        if width not in self.blocks:
            self.blocks[width] = self._blocks(width)
        return self.blocks[width][depth - 1]

    def _blocks(self, width: int) -> tuple[Block, ...]:
        depth_of = (0, *self.tree.depths)
        offsets = list(range(width)) + [width - 1 + depth_of[m] for m in self.number_of]
        total = len(offsets)
        sees_TT = torch.zeros(total, total, dtype=torch.bool)
        sees_TT[:, :width] = True
        nodes = torch.tensor(list(self.number_of), dtype=torch.long)
        sees_TT[width:, width:] = self.batches[-1].sees_RMM[0].cpu()[nodes][:, nodes]
        blocks, end = [], width
        for level in self.levels[:-1]:
            begin, end = end, end + level.count
            offsets_1T = torch.tensor([offsets[:end]], device=self.device)
            # Contiguous: a compiled step holds for one shape and its strides.
            sees_1qT = sees_TT[None, begin:end, :end].clone(memory_format=torch.contiguous_format)
            blocks.append(Block(offsets_1T, sees_1qT.to(self.device), static=True))
        return tuple(blocks)


class Expanded(NamedTuple):
    """Nodes of one level that have children: their tokens (-1 for those that a row lacks), the
    probability of their paths if the tree has a stop, and the tokens to forward.
    """

    live_Be: Tensor
    confidence_Be: Tensor | None
    inputs_Be: Tensor


class Grown(NamedTuple):
    """The children drawn in one level, and those that have children; None at the deepest level."""

    tokens_Bc: Tensor
    q_BeV: Tensor | None
    finite_B: Tensor
    expanded: Expanded | None


class StaticTreeSession(Session):
    """A network drafting one static tree for the rows of one `generate` call."""

    def __init__(
        self,
        network: Network,
        plan: DraftingPlan,
        drawing: Drawing,
        sampling: Sampling,
        recorded: bool = False,
    ) -> None:
        """recorded: each forward, with the drawing after it, is one function of tensors of fixed
        shapes.
        """
        self.network, self.plan, self.drawing, self.sampling = network, plan, drawing, sampling
        self._origin: Tensor | None = None
        plain = drawing == "deterministic" and plan.tree.is_chain and network.drafts == 1
        self._on_host = plain and plan.device.type == "cpu" and not recorded

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return self._most_probable_chain() if self._on_host else self.of_tensors(u_BN)

    def of_tensors(self, u_BN: Tensor | None) -> Proposal:
        """`propose` on tensors, so that its forwards can be recorded."""
        network, plan, stop = self.network, self.plan, self.plan.tree.stop
        self._forwarded = 0
        drafted: list[Tensor] = []
        parts_q: list[Tensor] = []
        finite: Tensor | None = None
        above: Expanded | None = None
        frontier: Frontier | None = None
        for depth, level in enumerate(plan.levels):
            grown = self._level(depth, frontier, above, u_BN)
            finite = grown.finite_B if finite is None else finite & grown.finite_B
            if grown.q_BeV is not None:
                parts_q.append(grown.q_BeV)
            drafted.append(grown.tokens_Bc)
            above = grown.expanded
            if above is None or (stop and not bool((above.live_Be >= 0).any())):
                break
            self._forwarded += level.count
            block = plan.block(depth + 1, network.width)
            frontier = Frontier(above.inputs_Be, level.parents_1e, block)
        assert finite is not None
        root_B1 = torch.full((drafted[0].shape[0], 1), -1, device=drafted[0].device)
        return self._proposal(torch.cat([root_B1, *drafted], dim=1), parts_q, len(drafted), finite)

    def _most_probable_chain(self) -> Proposal:
        # On a CPU, reading a tensor does not wait, and lists take less than half the time of small
        # tensors.
        network, plan, stop = self.network, self.plan, self.plan.tree.stop
        self._forwarded = 0
        drafted: list[list[int]] = []
        finite = True
        logits_B1V = network.open()
        rows = len(logits_B1V)
        alive_B, confidence_B = [True] * rows, [1.0] * rows
        for depth, level in enumerate(plan.levels):
            best = logits_B1V.max(-1)
            finite = finite and all(isfinite(value) for (value,) in best.values.tolist())
            tokens_B1 = best.indices
            drafted.append(
                [
                    token if alive else -1
                    for (token,), alive in zip(tokens_B1.tolist(), alive_B, strict=True)
                ]
            )
            if depth + 1 == len(plan.levels):
                break
            if stop:
                sure_B1 = network.confidence(tokens_B1)
                beliefs_B1 = (
                    logits_B1V.float().softmax(-1).amax(-1) if sure_B1 is None else sure_B1
                ).tolist()
                confidence_B = [
                    before * now for before, (now,) in zip(confidence_B, beliefs_B1, strict=True)
                ]
                alive_B = [
                    alive and sure >= stop
                    for alive, sure in zip(alive_B, confidence_B, strict=True)
                ]
                if not any(alive_B):
                    break
            # The token at which a row stops is forwarded too: it may be accepted, and is then in
            # the cache.
            self._forwarded += 1
            block = plan.block(depth + 1, network.width)
            logits_B1V = network.extend(Frontier(tokens_B1, level.parents_1e, block))
        tokens_BM = torch.tensor([[-1] * rows, *drafted]).T.contiguous()
        return self._proposal(tokens_BM, [], len(drafted), torch.tensor(finite))

    def _level(
        self, depth: int, frontier: Frontier | None, above: Expanded | None, u_BN: Tensor | None
    ) -> Grown:
        forward = self.network.forward(frontier)
        run = forward.run

        # A recorded function must not close over tensors, because every step has others.
        def step(
            inputs: tuple[object, ...], above: Expanded | None, u_BN: Tensor | None
        ) -> tuple[Grown, Tensor | None]:
            logits_BeV, state = run(*inputs)
            return self._grow(depth, logits_BeV, above, u_BN), state

        name = ("level", depth, self.plan, self.drawing, self.sampling, forward.name)
        grown, state = forward.call(name, step, forward.inputs, above, u_BN)
        forward.learn(state)
        drafted: Grown = grown
        return drafted

    def _grow(
        self,
        depth: int,
        logits_BeV: Tensor,
        above: Expanded | None,
        u_BN: Tensor | None,
    ) -> Grown:
        plan, level, stop = self.plan, self.plan.levels[depth], self.plan.tree.stop
        finite_B = logits_BeV.amax((1, 2)).isfinite()
        if self.drawing == "deterministic":
            draws_BeK, q_BeV = most_probable(logits_BeV, level.draws, self.network.drafts), None
        else:
            assert u_BN is not None
            q_BeV = probs(logits_BeV, self.sampling)
            u_BeK = u_BN.to(q_BeV.device)[:, level.uniform_eK]
            draws_BeK = draw_children(
                self.drawing, q_BeV, u_BeK, level.counts_e, self.network.drafts
            )
        chain = level.parent_c.numel() == 1
        tokens_Bc = draws_BeK[:, 0] if chain else draws_BeK[:, level.parent_c, level.rank_c]
        if above is not None and (
            stop or any(earlier.draws > 1 for earlier in plan.levels[:depth])
        ):
            # A node that does not exist or was not expanded has no children. Nodes can be missing
            # because of a stop or because q has fewer tokens than the node has children, so a chain
            # without a stop skips this.
            tokens_Bc = tokens_Bc.masked_fill(above.live_Be[:, level.parent_c] < 0, -1)
        if depth + 1 == len(plan.levels):
            return Grown(tokens_Bc, q_BeV, finite_B, None)
        live_Bc, confidence_Be = tokens_Bc, None
        if stop:
            confidence_Bc = self.network.confidence(tokens_Bc)
            if confidence_Bc is None:
                believed_BeV = q_BeV if q_BeV is not None else logits_BeV.float().softmax(-1)
                source_c = level.parent_c * self.network.drafts + level.rank_c % self.network.drafts
                rows_B1 = torch.arange(len(tokens_Bc), device=believed_BeV.device).unsqueeze(1)
                confidence_Bc = believed_BeV[rows_B1, source_c, tokens_Bc.clamp(min=0)]
            if above is not None and above.confidence_Be is not None:
                confidence_Bc = confidence_Bc * above.confidence_Be[:, level.parent_c]
            live_Bc = tokens_Bc.masked_fill(confidence_Bc < stop, -1)
            confidence_Be = (
                confidence_Bc if level.expanded_c is None else confidence_Bc[:, level.expanded_c]
            )
        live_Be = live_Bc if level.expanded_c is None else live_Bc[:, level.expanded_c]
        # A node at which a row stops is forwarded too: it may be accepted, and is then in the
        # cache.
        inputs_Be = (
            tokens_Bc if level.expanded_c is None else tokens_Bc[:, level.expanded_c]
        ).clamp(min=0)
        expanded = Expanded(live_Be, confidence_Be, inputs_Be)
        return Grown(tokens_Bc, q_BeV, finite_B, expanded)

    def commit(self, outcome: Outcome) -> None:
        origin = None if self._origin is None else self._origin.tolist()
        expanded = [
            [self._number(m if origin is None else origin[row][m]) for m in path]
            for row, path in enumerate(outcome.paths)
        ]
        self.network.commit(expanded, outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)

    def _number(self, node: int) -> int | None:
        number = self.plan.number_of.get(node)
        return number if number is not None and number < self._forwarded else None

    def _proposal(
        self, tokens_BM: Tensor, parts_q: list[Tensor], depth: int, finite: Tensor
    ) -> Proposal:
        batch = self.plan.batches[depth]
        device = batch.parents_RN.device
        self._origin = None
        tokens_BM = tokens_BM.to(device)
        if self.plan.tree.stop and not self.plan.tree.is_chain:
            batch, tokens_BM, self._origin = _compact(batch, tokens_BM)
        return Proposal(
            tree=batch,
            tokens_BM=tokens_BM,
            q_BEV=torch.cat(parts_q, dim=1).to(device) if parts_q else None,
            drawing=self.drawing,
            drafts=self.network.drafts,
            finite=finite.to(device),
        )


def _compact(batch: TreeBatch, tokens_BM: Tensor) -> tuple[TreeBatch, Tensor, Tensor]:
    """Keep only the nodes that exist in each row: the per-row tree, its tokens, and the index each
    node had before.
    """
    rows = tokens_BM.shape[0]
    exists_BN = tokens_BM[:, 1:] >= 0
    most = int(exists_BN.sum(1).max())
    order_BN = torch.sort(exists_BN.int(), dim=1, descending=True, stable=True).indices[:, :most]
    origin_BM = torch.nn.functional.pad(order_BN + 1, (1, 0))
    index_BM = torch.zeros_like(tokens_BM).scatter_(
        1, origin_BM, torch.arange(most + 1, device=tokens_BM.device).expand(rows, -1)
    )
    above_BN = batch.parents_RN.expand(rows, -1).gather(1, order_BN) + 1
    parents_BN = index_BM.gather(1, above_BN) - 1
    grown = grow_batch(
        parents_BN, exists_BN.gather(1, order_BN), batch.depth, batch.children_RMK.shape[2]
    )
    groups_BM = batch.groups_RM.expand(rows, -1).gather(1, origin_BM)
    return (
        replace(grown, groups_RM=groups_BM, widths=batch.widths),
        tokens_BM.gather(1, origin_BM),
        origin_BM,
    )


def draw_children(
    drawing: Drawing, q_BeV: Tensor, u_BeK: Tensor, counts_e: Sequence[int], drafts: int
) -> Tensor:
    """Children `[B, e, K]` of expanded nodes from q (`drafts` distributions per node), -1 where
    there is none.
    """
    most = u_BeK.shape[2]
    if drafts > 1:
        assert drawing == "with_replacement"
        return torch.stack(
            [draw(q_BeV[:, k % drafts :: drafts], u_BeK[:, :, k]) for k in range(most)], dim=2
        )
    if drawing == "top_and_one":
        if len(set(counts_e)) == 1:
            return draw_top_and_one(q_BeV, u_BeK[..., -1], most)
        # The drawn child is the last one, so nodes with fewer children are drawn by themselves.
        drawn = [
            draw_top_and_one(q_BeV[:, e], u_BeK[:, e, n - 1], n) for e, n in enumerate(counts_e)
        ]
        padded = [
            torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=-1)
            for tokens in drawn
        ]
        return torch.stack(padded, dim=1)
    if most == 1:
        return draw(q_BeV, u_BeK[..., 0]).unsqueeze(-1)
    if drawing == "with_replacement":
        return draw_with_replacement(q_BeV, u_BeK)
    return draw_without_replacement(q_BeV, u_BeK)


def most_probable(logits: Tensor, count: int, drafts: int = 1) -> Tensor:
    """The `count` most probable tokens of logits `[..., e, V]`, best first, padded with -1.

    Several drafts (`[..., e * d, V]`) take turns; each adds its best token that no draft before it
    gave.
    """
    if count == 1 and drafts == 1:
        return logits.max(-1, keepdim=True).indices  # faster than argmax on a CPU
    if drafts > 1:
        left = logits.unflatten(-2, (-1, drafts)).clone()
        picks = []
        for k in range(count):
            best = left[..., k % drafts, :].max(-1, keepdim=True)
            picks.append(best.indices.masked_fill(best.values == -torch.inf, -1))
            left.scatter_(-1, best.indices.unsqueeze(-1).expand(*left.shape[:-1], 1), -torch.inf)
        return torch.cat(picks, dim=-1)
    best_values, best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    best = best.masked_fill(best_values == -torch.inf, -1)
    return torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-1)
