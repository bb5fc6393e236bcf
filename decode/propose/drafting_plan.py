"""All indices and masks of drafting one static tree level by level.

Legend: N drafted nodes, M = N + 1 with the root, E expanded nodes (those with children), e those of one level, K
children of one node, c children in a level, T positions of a block.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.runner import Block
from decode.tree import Tree
from decode.tree_batch import TreeBatch


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
    parent_e: Tensor  # of these children: their parents among the expanded nodes of this depth
    parents_1e: Tensor  # and among all expanded nodes


@dataclass(frozen=True, eq=False)
class DraftingPlan:
    """All indices and masks of drafting one tree. They are the same at every step, so the proposer keeps them."""

    tree: Tree
    device: torch.device
    levels: tuple[Level, ...]
    number_of: tuple[int | None, ...]  # M index -> number among the expanded nodes after the root; None for leaves
    chosen: tuple[int, ...]  # expanded nodes as M indices, the root first
    batches: tuple[TreeBatch, ...]  # the tree cut to each depth, on the target's device
    blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict)

    @staticmethod
    def build(tree: Tree, device: torch.device, target_device: torch.device) -> "DraftingPlan":
        """Indices on the draft's device; the trees of the proposals on the target's."""
        depth_of = (0, *tree.depths)
        levels: list[Level] = []
        numbers: list[int | None] = [None] * len(depth_of)
        chosen = [0]
        for depth in range(tree.depth):
            parents = [m for m, below in enumerate(tree.children) if below and depth_of[m] == depth]
            kids = [m for m, d in enumerate(depth_of) if d == depth + 1]
            counts = tuple(len(tree.children[m]) for m in parents)
            uniform = [
                [tree.children[m][min(k, n - 1)] - 1 for k in range(max(counts))]
                for m, n in zip(parents, counts, strict=True)
            ]
            expanded = [i for i, m in enumerate(kids) if tree.children[m]]
            above = [chosen.index(tree.parents[kids[i] - 1] + 1) for i in expanded]
            levels.append(
                Level(
                    draws=max(counts),
                    counts_e=counts,
                    uniform_eK=torch.tensor(uniform, device=device),
                    parent_c=torch.tensor([parents.index(tree.parents[m - 1] + 1) for m in kids], device=device),
                    rank_c=torch.tensor([tree.ranks[m - 1] for m in kids], device=device),
                    expanded_c=None if len(expanded) == len(kids) else torch.tensor(expanded, device=device),
                    count=len(expanded),
                    parent_e=torch.tensor(
                        [parents.index(tree.parents[kids[i] - 1] + 1) for i in expanded],
                        dtype=torch.long,
                        device=device,
                    ),
                    parents_1e=torch.tensor([above], dtype=torch.long, device=device),
                )
            )
            chosen += [kids[i] for i in expanded]
        for order, m in enumerate(chosen[1:]):
            numbers[m] = order
        cuts = [
            Tree(tuple(p for p, d in zip(tree.parents, tree.depths, strict=True) if d <= end))
            for end in range(tree.depth + 1)
        ]
        return DraftingPlan(
            tree,
            device,
            tuple(levels),
            tuple(numbers),
            tuple(chosen),
            tuple(TreeBatch.build(cut, target_device) for cut in cuts),
        )

    def block(self, depth: int, width: int) -> Block:
        """The forward of the expanded nodes of this depth (from 1) behind `width` pending tokens."""
        if width not in self.blocks:
            self.blocks[width] = self._blocks(width)
        return self.blocks[width][depth - 1]

    def _blocks(self, width: int) -> tuple[Block, ...]:
        depth_of = (0, *self.tree.depths)
        offsets = list(range(width - 1)) + [width - 1 + depth_of[m] for m in self.chosen]
        total = len(offsets)
        sees_TT = torch.zeros(total, total, dtype=torch.bool)
        sees_TT[:, :width] = True
        nodes = torch.tensor(self.chosen[1:], dtype=torch.long)
        sees_TT[width:, width:] = self.batches[-1].sees_RMM[0].cpu()[nodes][:, nodes]
        blocks, end = [], width
        for level in self.levels[:-1]:
            begin, end = end, end + level.count
            offsets_1T = torch.tensor([offsets[:end]], device=self.device)
            # Of its own strides: a step that is compiled holds for one shape and the strides that go with it.
            sees_1qT = sees_TT[None, begin:end, :end].clone(memory_format=torch.contiguous_format)
            blocks.append(Block(offsets_1T, sees_1qT.to(self.device), static=True))
        return tuple(blocks)
