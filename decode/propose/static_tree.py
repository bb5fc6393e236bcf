"""Drafting a static tree level by level: one forward of the network per level, children drawn as
the verifier needs.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E expanded nodes (those with children), e
those of one level, d drafts (distributions per node), K children of one node, c children in a
level, V vocabulary of the target, R = 1 when rows share a tree, else B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.core.sampling import (
    Sampling,
    draw_top_and_one,
    draw_with_replacement,
    probs,
)
from draftsmith.decode.kernel_sampling import draw, draw_without_replacement, largest
from draftsmith.decode.propose.network import Frontier, Network
from draftsmith.decode.propose.protocol import Outcome, Proposal, Session
from draftsmith.decode.runner import Block
from draftsmith.decode.tree import Drawing, Tree
from draftsmith.decode.tree_batch import TreeBatch, grow_batch


@dataclass(frozen=True, eq=False)
class Level:
    """Static indices that turn the expanded nodes of one depth into the nodes of the next."""

    draws: int  # K, the most children of one node here
    counts_e: tuple[int, ...]  # children of every expanded node
    uniform_eK: Tensor  # node whose uniform decides draw k of expanded node e
    parent_c: Tensor  # for each child c: its parent among the expanded nodes of this depth
    rank_c: Tensor  # and its rank among its siblings
    expanded_c: Tensor | None  # which children have children themselves; None when all have
    count: int  # number of children that have children themselves
    parents_1e: Tensor  # and of each of them: its parent's number among all expanded nodes

    def of_expanded(self, values_Bc: Tensor) -> Tensor:
        """Return the values of the children that have children themselves."""
        return values_Bc if self.expanded_c is None else values_Bc[:, self.expanded_c]


@dataclass(frozen=True, eq=False)
class DraftingPlan:
    """All indices and masks of drafting one tree. They are the same at every step, so `build`
    caches them.
    """

    tree: Tree
    device: torch.device
    levels: tuple[Level, ...]
    # tree index of each expanded node except the root -> the order in which it is forwarded, from 0
    number_of: dict[int, int]
    batches: tuple[TreeBatch, ...]  # the tree cut to each depth, on the target's device
    blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=32)
    def build(tree: Tree, device: torch.device, target_device: torch.device) -> "DraftingPlan":
        """Put the indices on the draft's device, and the trees of proposals on the target's."""

        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        levels = []
        batches = [TreeBatch.build(Tree(()), target_device)]
        nodes = [0]  # the expanded nodes of one depth
        forwarded = [0]  # and of all depths so far
        last = 0
        for draws in tree.widths:
            counts = []
            kids = []
            parents = []
            uniforms = []
            for index, node in enumerate(nodes):
                below = list(tree.children[node])
                counts.append(len(below))
                kids += below
                parents += [index] * len(below)
                # Short rows are padded; their extra draws are dropped.
                uniforms.append(below + below[-1:] * (draws - len(below)))
            expanded = [index for index, kid in enumerate(kids) if tree.children[kid]]
            above = [forwarded.index(nodes[parents[index]]) for index in expanded]
            levels.append(
                Level(
                    draws=draws,
                    counts_e=tuple(counts),
                    uniform_eK=tensor(uniforms) - 1,
                    parent_c=tensor(parents),
                    rank_c=tensor([tree.ranks[kid - 1] for kid in kids]),
                    expanded_c=None if len(expanded) == len(kids) else tensor(expanded),
                    count=len(expanded),
                    parents_1e=tensor([above]),
                )
            )
            nodes = [kids[index] for index in expanded]
            forwarded += nodes
            last += len(kids)
            batches.append(TreeBatch.build(Tree(tree.parents[:last]), target_device))
        number_of = {node: number for number, node in enumerate(forwarded[1:])}
        return DraftingPlan(tree, device, tuple(levels), number_of, tuple(batches))

    def block(self, depth: int, width: int) -> Block:
        """The forward of the expanded nodes of this depth (from 1) behind `width` pending
        tokens.
        """
        if width not in self.blocks:
            self.blocks[width] = self._blocks(width)
        return self.blocks[width][depth - 1]

    def _blocks(self, width: int) -> tuple[Block, ...]:
        depths = [self.tree.depths[node - 1] for node in self.number_of]
        offsets = [*range(width), *(width - 1 + depth for depth in depths)]
        nodes = torch.tensor(list(self.number_of), dtype=torch.long)
        tree_MM = self.batches[-1].sees_RMM[0].cpu()
        sees_TT = torch.ones(len(offsets), len(offsets), dtype=torch.bool)
        sees_TT[width:, width:] = tree_MM[nodes][:, nodes]
        blocks = []
        end = width
        for level in self.levels[:-1]:
            begin = end
            end += level.count
            offsets_1T = torch.tensor([offsets[:end]], device=self.device)
            # Contiguous: a compiled step holds for one shape and its strides.
            sees_1qT = sees_TT[None, begin:end, :end].clone(memory_format=torch.contiguous_format)
            blocks.append(Block(offsets_1T, sees_1qT.to(self.device), static=True))
        return tuple(blocks)


class Expanded(NamedTuple):
    """The nodes of one level that have children."""

    # Their tokens, -1 for those that get no children in a row.
    live_Be: Tensor
    # Probability of the paths to them, None if the tree has no stop.
    confidence_Be: Tensor | None
    # Their tokens to forward.
    inputs_Be: Tensor


class Grown(NamedTuple):
    """The children drawn in one level."""

    tokens_Bc: Tensor
    finite_B: Tensor
    # The distributions that they were drawn from, None if deterministic.
    q_BeV: Tensor | None
    # Those that have children; None in the last level.
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
        self.network = network
        self.plan = plan
        self.drawing = drawing
        self.sampling = sampling
        self.watched = 0
        self._best: list[Tensor] = []
        self._origin: Tensor | None = None
        plain = drawing == "deterministic" and network.drafts == 1
        self._on_host = plain and plan.device.type == "cpu" and not recorded

    def propose(self, u_BN: Tensor | None) -> Proposal:
        self._best = []
        if self._on_host and self.plan.tree.is_chain:
            return self._most_probable_chain()
        return self.of_tensors(u_BN)

    def best_at(self, row: int, depth: int, node: int) -> list[int]:
        """Return the `watched` tokens that were most probable below a node of the last proposal;
        `watched` is set by who asks.
        """
        before = sum(level.count for level in self.plan.levels[: depth - 1]) if depth else 0
        at = self.plan.number_of[node] - before if depth else 0
        best: list[int] = self._best[depth][row, at].tolist()
        return best

    def of_tensors(self, u_BN: Tensor | None) -> Proposal:
        """`propose` on tensors, so that its forwards can be recorded."""
        self._forwarded = 0
        drafted = []
        above: Expanded | None = None
        frontier: Frontier | None = None
        for depth, level in enumerate(self.plan.levels):
            grown = self._level(depth, frontier, above, u_BN)
            drafted.append(grown)
            above = grown.expanded
            if above is None:
                break
            if self.plan.tree.stop and not bool((above.live_Be >= 0).any()):
                break
            self._forwarded += level.count
            block = self.plan.block(depth + 1, self.network.width)
            frontier = Frontier(above.inputs_Be, level.parents_1e, block)
        tokens = [grown.tokens_Bc for grown in drafted]
        tokens_BM = pad(torch.cat(tokens, dim=1), (1, 0), value=-1)
        parts_q = [grown.q_BeV for grown in drafted if grown.q_BeV is not None]
        finite_B = torch.stack([grown.finite_B for grown in drafted]).all(0)
        return self._proposal(tokens_BM, parts_q, len(drafted), finite_B)

    def _most_probable_chain(self) -> Proposal:
        # On a CPU, reading a tensor does not wait, and lists take less than half the time of small
        # tensors.
        network = self.network
        stop = self.plan.tree.stop
        self._forwarded = 0
        drafted: list[list[int]] = []
        highest: list[float] = []
        logits_B1V = network.open()
        confidence_B = [1.0] * len(logits_B1V)
        for depth, level in enumerate(self.plan.levels):
            count = min(max(self.watched, 1), logits_B1V.shape[2])
            best = largest(logits_B1V[:, 0], count)
            first_B1 = best.indices[:, :1]
            self._best.append(best.indices.unsqueeze(1))
            highest += best.values[:, 0].tolist()
            drafted.append([])
            for (token,), confidence in zip(first_B1.tolist(), confidence_B, strict=True):
                drafted[-1].append(token if confidence >= stop else -1)
            if depth + 1 == len(self.plan.levels):
                break
            if stop:
                sure_B1 = network.confidence(first_B1)
                if sure_B1 is None:
                    believed_B1V = logits_B1V.float().softmax(-1)
                    sure_B1 = believed_B1V.amax(-1)
                for row, (sure,) in enumerate(sure_B1.tolist()):
                    confidence_B[row] *= sure
                if max(confidence_B) < stop:
                    break
            # While another row goes on, stopped rows are forwarded too: if their last token is
            # accepted, it is already in the cache.
            self._forwarded += 1
            block = self.plan.block(depth + 1, network.width)
            logits_B1V = network.extend(Frontier(first_B1, level.parents_1e, block))
        roots = [-1] * len(confidence_B)
        tokens_MB = torch.tensor([roots, *drafted])
        finite = torch.tensor(isfinite(sum(highest)))
        return self._proposal(tokens_MB.T.contiguous(), [], len(drafted), finite)

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
        return grown

    def _grow(
        self, depth: int, logits_BeV: Tensor, above: Expanded | None, u_BN: Tensor | None
    ) -> Grown:
        levels = self.plan.levels
        level = levels[depth]
        stop = self.plan.tree.stop
        drafts = self.network.drafts
        finite_B = logits_BeV.amax((1, 2)).isfinite()
        if u_BN is None:
            q_BeV = None
            draws_BeK = most_probable(logits_BeV, max(level.draws, self.watched), drafts)
            if self.watched:
                self._best.append(draws_BeK)
        else:
            q_BeV = probs(logits_BeV, self.sampling)
            u_BeK = u_BN.to(q_BeV.device)[:, level.uniform_eK]
            draws_BeK = draw_children(self.drawing, q_BeV, u_BeK, level.counts_e, drafts)
        chain = level.parent_c.numel() == 1
        tokens_Bc = draws_BeK[:, 0, :1] if chain else draws_BeK[:, level.parent_c, level.rank_c]
        if above is not None and (stop or any(earlier.draws > 1 for earlier in levels[:depth])):
            # A node that does not exist or was not expanded has no children. Nodes can be missing
            # because of a stop or because q has fewer tokens than the node has children, so a chain
            # without a stop skips this.
            missing_Bc = above.live_Be[:, level.parent_c] < 0
            tokens_Bc = tokens_Bc.masked_fill(missing_Bc, -1)
        if depth + 1 == len(levels):
            return Grown(tokens_Bc, finite_B, q_BeV, None)
        tokens_Be = live_Be = level.of_expanded(tokens_Bc)
        confidence_Be = None
        if stop:
            confidence_Bc = self.network.confidence(tokens_Bc)
            if confidence_Bc is None:
                believed_BeV = q_BeV
                if believed_BeV is None:
                    believed_BeV = logits_BeV.float().softmax(-1)
                # The child of rank k was drawn from distribution k % drafts.
                slot_c = level.parent_c * drafts + level.rank_c % drafts
                rows_B1 = torch.arange(len(tokens_Bc), device=tokens_Bc.device).unsqueeze(1)
                confidence_Bc = believed_BeV[rows_B1, slot_c, tokens_Bc.clamp(min=0)]
            if above is not None and above.confidence_Be is not None:
                confidence_Bc = confidence_Bc * above.confidence_Be[:, level.parent_c]
            confidence_Be = level.of_expanded(confidence_Bc)
            live_Be = tokens_Be.masked_fill(confidence_Be < stop, -1)
        # While another row goes on, the node at which a row stops is forwarded too: if it is
        # accepted, it is already in the cache.
        expanded = Expanded(live_Be, confidence_Be, tokens_Be.clamp(min=0))
        return Grown(tokens_Bc, finite_B, q_BeV, expanded)

    def commit(self, outcome: Outcome) -> None:
        origins = None if self._origin is None else self._origin.tolist()
        number_of = self.plan.number_of
        forwarded = self._forwarded
        expanded: list[list[int | None]] = []
        for row, path in enumerate(outcome.paths):
            if origins is not None:
                path = [origins[row][node] for node in path]
            numbers = [number_of.get(node, forwarded) for node in path]
            expanded.append([None if at >= forwarded else at for at in numbers])
        self.network.commit(expanded, outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)

    def _proposal(
        self, tokens_BM: Tensor, parts_q: list[Tensor], depth: int, finite: Tensor
    ) -> Proposal:
        batch = self.plan.batches[depth]
        device = batch.parents_RN.device
        self._origin = None
        tokens_BM = tokens_BM.to(device)
        if self.plan.tree.stop and not self.plan.tree.is_chain:
            self._origin = _present(tokens_BM)
            batch = _compact(batch, self._origin, tokens_BM)
            tokens_BM = tokens_BM.gather(1, self._origin)
        return Proposal(
            tree=batch,
            tokens_BM=tokens_BM,
            q_BEV=torch.cat(parts_q, dim=1).to(device) if parts_q else None,
            drawing=self.drawing,
            drafts=self.network.drafts,
            finite=finite.to(device),
        )


def _present(tokens_BM: Tensor) -> Tensor:
    """Return, per row, the indices of the root and of the nodes that exist; shorter rows are filled
    with absent ones.
    """
    drafted_BN = tokens_BM[:, 1:]
    exists_BN = (drafted_BN >= 0).int()
    order_BN = torch.sort(exists_BN, dim=1, descending=True, stable=True).indices
    most = int(exists_BN.sum(1).max())
    return pad(order_BN[:, :most] + 1, (1, 0))


def _compact(batch: TreeBatch, origin_BM: Tensor, tokens_BM: Tensor) -> TreeBatch:
    """Return a tree per row of the nodes `origin_BM` of the whole tree and its tokens."""
    rows, total = origin_BM.shape
    numbers_BM = torch.arange(total, device=origin_BM.device).expand(rows, -1)
    index_BM = torch.zeros_like(tokens_BM).scatter_(1, origin_BM, numbers_BM)
    order_BN = origin_BM[:, 1:]
    parents_BN = batch.parents_RN.expand(rows, -1)
    above_BN = parents_BN.gather(1, order_BN - 1) + 1
    grown = grow_batch(
        parents_BN=index_BM.gather(1, above_BN) - 1,
        exists_BN=tokens_BM.gather(1, order_BN) >= 0,
        depth=batch.depth,
        most=batch.children_RMK.shape[2],
    )
    groups_BM = batch.groups_RM.expand(rows, -1).gather(1, origin_BM)
    return replace(grown, groups_RM=groups_BM, widths=batch.widths)


def draw_children(
    drawing: Drawing, q_BeV: Tensor, u_BeK: Tensor, counts_e: Sequence[int], drafts: int
) -> Tensor:
    """Children `[B, e, K]` of expanded nodes from q (`drafts` distributions per node), -1 where
    there is none.
    """
    most = u_BeK.shape[2]
    if drafts > 1:
        assert drawing == "with_replacement"
        drawn = [draw(q_BeV[:, k % drafts :: drafts], u_BeK[:, :, k]) for k in range(most)]
        return torch.stack(drawn, dim=2)
    if drawing == "top_and_one":
        if len(set(counts_e)) == 1:
            return draw_top_and_one(q_BeV, u_BeK[..., -1], most)
        # The drawn child is the last one, so nodes with fewer children are drawn by themselves.
        drawn = []
        for e, count in enumerate(counts_e):
            tokens_BK = draw_top_and_one(q_BeV[:, e], u_BeK[:, e, count - 1], count)
            drawn.append(pad(tokens_BK, (0, most - count), value=-1))
        return torch.stack(drawn, dim=1)
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
        return largest(logits, 1).indices
    if drafts > 1:
        left = logits.unflatten(-2, (-1, drafts)).clone()
        picks = []
        for k in range(count):
            values, tokens = largest(left[..., k % drafts, :], 1)
            picks.append(tokens.masked_fill(values == -torch.inf, -1))
            taken = tokens.unsqueeze(-1).expand_as(left[..., :1])
            left.scatter_(-1, taken, -torch.inf)
        return torch.cat(picks, dim=-1)
    values, tokens = largest(logits, min(count, logits.shape[-1]))
    tokens = tokens.masked_fill(values == -torch.inf, -1)
    missing = count - tokens.shape[-1]
    return pad(tokens, (0, missing), value=-1) if missing else tokens
