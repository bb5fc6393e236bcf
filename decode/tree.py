"""Token trees as data: which drafted token hangs under which, in breadth-first order.

Legend: N drafted nodes, M = N + 1 nodes with the root, D depth, K most children of one node, R = 1
when all rows of a batch share the tree, else the number of rows. The root is the last emitted
token; it is not a drafted node. Arrays with an M axis give the root index 0 and drafted node n
index n + 1, so that 0 can also mean "no such child".
"""

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_NODES = 1024


@dataclass(frozen=True)
class Tree:
    """A static tree of drafted tokens: `parents[n]` is the node above node n, -1 for the root;
    breadth-first order.

    Raises ValueError when a parent does not come before its child or when depths or sibling groups
    are interleaved.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
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


def kary(branching: tuple[int, ...]) -> Tree:
    """The tree in which every node at depth d has `branching[d]` children; `kary((1, 1))` is a
    chain of two.
    """
    parents: list[int] = []
    level = [-1]
    for count in branching:
        first = len(parents)
        parents += [parent for parent in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def parse_tree(spec: str) -> Tree:
    """A tree from `chain:n` or `kary:k1,k2,...`; ValueError in one line for anything else or for a
    tree too large.
    """
    kind, _, numbers = spec.partition(":")
    if kind not in ("chain", "kary"):
        raise ValueError(f"tree '{spec}': unknown kind '{kind}'; write chain:4 or kary:4,2,2")
    pattern = r"\d+" if kind == "chain" else r"\d+(,\d+)*"
    example = "chain:4" if kind == "chain" else "kary:4,2,2"
    if not re.fullmatch(pattern, numbers, flags=re.ASCII):
        raise ValueError(f"tree '{spec}': '{numbers}' is not what follows '{kind}:'; write for example {example}")
    counts = tuple(int(number) for number in numbers.split(","))
    if min(counts) < 1:
        raise ValueError(f"tree '{spec}': every number must be at least 1; write for example {example}")
    # Counted before it is built, so that `chain:1000000000` or `kary:9,9,9,9,9,9` costs nothing.
    nodes, level = (counts[0], 0) if kind == "chain" else (0, 1)
    for count in counts if kind == "kary" else ():
        level *= count
        nodes += level
        if nodes > MAX_NODES:
            break
    if nodes > MAX_NODES:
        raise ValueError(f"tree '{spec}': more than {MAX_NODES} nodes; use smaller numbers, for example {example}")
    return kary((1,) * counts[0] if kind == "chain" else counts)
