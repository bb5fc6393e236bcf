"""Token trees as data: which drafted token hangs under which, in breadth-first order.

Legend: N drafted nodes, M = N + 1 nodes with the root, D depth, K most children of one node, R = 1
when all rows of a batch share the tree, else the number of rows. The root is the last emitted
token; it is not a drafted node. Arrays with an M axis give the root index 0 and drafted node n
index n + 1, so that 0 can also mean "no such child".
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_NODES = 1024
MAX_CANDIDATES = 1 << 20


@dataclass(frozen=True)
class Tree:
    """A static tree of drafted tokens: `parents[n]` is the node above node n, -1 for the root;
    breadth-first order.

    `stop` is the confidence stop: nothing is drafted below a node whose tokens, from the root down, have a joint
    probability under the draft lower than this. What is drafted next thus depends on drawn tokens only, which keeps
    every verifier valid. Raises ValueError when a parent does not come before its child or when depths or sibling
    groups are interleaved.
    """

    parents: tuple[int, ...]
    stop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop < 1:
            raise ValueError(f"tree: stop={self.stop} is not in [0, 1); it is a probability, 0 never stops")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("tree: a parent must be listed before its children; -1 is the root, e.g. (-1, -1, 0)")
        if any(a > b for a, b in zip(self.parents, self.parents[1:], strict=False)):
            raise ValueError("tree: nodes must be in breadth-first order, siblings side by side, e.g. (-1, -1, 0, 1)")

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Place of every node among its siblings, from 0: the order in which siblings are drawn and
        tried.
        """
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @cached_property
    def ancestors(self) -> Tensor:
        """`[N, N]` bool on the CPU: entry (i, j) is true when node j is node i or lies on its path
        to the root.
        """
        mask_NN = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask_NN[node] |= mask_NN[parent]
        return mask_NN

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every one of the M nodes, in rank order, all in M indexing: `children[0]` are
        the root's.
        """
        found: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node + 1)
        return tuple(tuple(nodes) for nodes in found)

    @property
    def size(self) -> int:
        """Number of drafted nodes N."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Length D of the longest path; 0 for the empty tree."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """True when no node has more than one child."""
        return self.size == self.depth

    def on(self, device: torch.device) -> "TreeBatch":
        """The tree as device arrays shared by all rows (R = 1)."""
        return TreeBatch.build(self, device)


@dataclass(frozen=True)
class Growth:
    """A tree that the draft's confidence shapes anew at every step and in every row; its children are the most
    probable tokens (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276).

    The value of a node is the product of the confidences on its path. At each of `depth` levels the `beam` nodes of
    highest value are given `beam` children each; the best `nodes` of all candidates are kept, the shallower of equals
    first, so that what is kept hangs together. Levels end early when the best `nodes` would gain less than `gain` in
    expected accepted tokens (OPT-Tree's threshold; 0 never does).
    """

    depth: int
    beam: int
    nodes: int
    gain: float = 0.0

    def __post_init__(self) -> None:
        if min(self.depth, self.beam, self.nodes) < 1:
            raise ValueError("tree: depth, beam and nodes must each be at least 1, such as depth=6,beam=10,nodes=60")
        if self.nodes > MAX_NODES:
            raise ValueError(f"tree: more than {MAX_NODES} nodes; use a smaller number, for example nodes=60")
        for key, value in (("depth", self.depth), ("beam", self.beam)):
            if value > self.nodes:
                raise ValueError(
                    f"tree: {key}={value} is more than nodes={self.nodes} can fill; use {key}={self.nodes}"
                )
        if self.candidates > MAX_CANDIDATES:
            raise ValueError(
                f"tree: depth={self.depth} and a beam of {self.beam} weigh {self.candidates} candidates a step, more "
                f"than {MAX_CANDIDATES}; use fewer levels or a smaller beam (in opt the beam is nodes), for example 50"
            )
        if self.nodes > self.candidates:
            raise ValueError(
                f"tree: nodes={self.nodes} but depth={self.depth} and beam={self.beam} reach only {self.candidates}; "
                f"use nodes={self.candidates}, or more depth or beam"
            )
        if not 0 <= self.gain < 1:
            raise ValueError(
                f"tree: gain={self.gain} is not in [0, 1); a level adds less than one token, 0 never stops"
            )

    @property
    def candidates(self) -> int:
        """How many nodes are weighed: `beam` under the root, then `beam * beam` a level."""
        return self.beam + (self.depth - 1) * self.beam**2

    @property
    def size(self) -> int:
        """Number of drafted nodes."""
        return self.nodes

    @property
    def is_chain(self) -> bool:
        """True when no node has more than one child."""
        return self.beam == 1


Shape = Tree | Growth


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The trees of one step as arrays: what the engine and the verifiers read. Each row may have
    its own (R = B).

    `parents_RN` and `depths_RN` are as in `Tree`. `children_RMK` holds M indices in rank order, 0
    where there is none. `slots_RM` is the row of `Proposal.q_BEV` with the law that the children of
    a node were drawn from (0 for a leaf). `sees_RMM` is the ancestor mask with the root.
    `widths[d]` bounds the children of a node at depth d, so that `len(widths)` is the depth D.
    """

    parents_RN: Tensor
    depths_RN: Tensor
    children_RMK: Tensor
    slots_RM: Tensor
    sees_RMM: Tensor
    widths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Length of the longest path that any row may have."""
        return len(self.widths)

    @property
    def rows(self) -> int:
        """R: 1 when every row has this tree."""
        return self.parents_RN.shape[0]

    @staticmethod
    def build(tree: Tree, device: torch.device) -> "TreeBatch":
        """Arrays of one static tree."""
        size = tree.size
        most = max((len(nodes) for nodes in tree.children), default=0)
        children_MK = torch.zeros(size + 1, max(most, 1), dtype=torch.long)
        slots_M = torch.zeros(size + 1, dtype=torch.long)
        slot = 0
        for node, below in enumerate(tree.children):
            if below:
                children_MK[node, : len(below)] = torch.tensor(below)
                slots_M[node] = slot
                slot += 1
        sees_MM = torch.zeros(size + 1, size + 1, dtype=torch.bool)
        sees_MM[:, 0] = True
        sees_MM[1:, 1:] = tree.ancestors
        depth_of = (0, *tree.depths)
        widths = tuple(
            max(len(below) for node, below in enumerate(tree.children) if depth_of[node] == depth)
            for depth in range(tree.depth)
        )
        return TreeBatch(
            parents_RN=torch.tensor([tree.parents], dtype=torch.long, device=device),
            depths_RN=torch.tensor([tree.depths], dtype=torch.long, device=device),
            children_RMK=children_MK.unsqueeze(0).to(device),
            slots_RM=slots_M.unsqueeze(0).to(device),
            sees_RMM=sees_MM.unsqueeze(0).to(device),
            widths=widths,
        )


def grow_batch(parents_BN: Tensor, exists_BN: Tensor, depth: int, most: int) -> TreeBatch:
    """Arrays of one tree a row, built on the device of `parents_BN` without asking it anything.

    `parents_BN` is as in `Tree.parents`, nodes in breadth-first order; a node where `exists_BN` is false belongs to
    no parent. `depth` and `most` bound the depth and the children of one node. Slots number the nodes with children
    in order.
    """
    rows, size = parents_BN.shape
    device = parents_BN.device
    above_BN = torch.where(exists_BN, parents_BN + 1, 0)
    same_BNN = (above_BN.unsqueeze(2) == above_BN.unsqueeze(1)) & exists_BN.unsqueeze(1)
    ranks_BN = same_BNN.tril(-1).sum(2)
    children_BMK = torch.zeros(rows, size + 1, most + 1, dtype=torch.long, device=device)
    # Nodes that do not exist all write to the spare last column, which is then cut.
    place_BN = above_BN * (most + 1) + torch.where(exists_BN, ranks_BN, most)
    numbers_BN = torch.arange(1, size + 1, device=device).expand(rows, -1)
    children_BMK.view(rows, -1).scatter_(1, place_BN, numbers_BN)
    children_BMK = children_BMK[:, :, :most].contiguous()
    sees_BMM = torch.eye(size + 1, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    above_BM = torch.nn.functional.pad(above_BN, (1, 0))
    index_BMM = above_BM.unsqueeze(2).expand(-1, -1, size + 1)
    for _ in range(depth):
        sees_BMM = sees_BMM | sees_BMM.gather(1, index_BMM)
    inner_BM = (children_BMK > 0).any(2)
    slots_BM = (inner_BM.cumsum(1) - 1).clamp_(min=0) * inner_BM
    return TreeBatch(
        parents_RN=above_BN - 1,
        depths_RN=sees_BMM[:, 1:, 1:].sum(2),
        children_RMK=children_BMK,
        slots_RM=slots_BM,
        sees_RMM=sees_BMM,
        widths=(most,) * depth,
    )
