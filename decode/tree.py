"""Token trees as data, without torch: which drafted token hangs under which, in breadth-first
order.

Legend: N drafted nodes, M = N + 1 nodes with the root, D depth. The root is the last emitted token.
With M indexing the root is 0 and drafted node n is n + 1, so that 0 can also mean "no such child".
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

MAX_NODES = 1024
CHAIN = 4  # tokens drafted per step when no tree is named

# How the children of one node were chosen. A verifier is correct only for the drawings it names:
#   without_replacement  drawn from q one after another, each removed from q before the next
#   with_replacement     drawn from q independently; siblings may repeat a token
#   top_and_one          the k - 1 most probable tokens, and one drawn from q on the others
#   deterministic        a function of the context alone, such as the k most probable tokens
# Never prune after drawing at random: pruning depends on what was drawn, and biases every rule but
# `exact`.
Drawing = Literal["without_replacement", "with_replacement", "top_and_one", "deterministic"]


@dataclass(frozen=True)
class Tree:
    """A static tree of drafted tokens: `parents[n]` is the node above node n, -1 for the root;
    breadth-first order.

    stop: nothing is drafted below a node whose path has a lower joint probability under the draft,
    or whose children the draft predicts to be accepted less often (`Network.confidence`). What is
    drafted next depends on drawn tokens only, which keeps every verifier valid.
    """

    grows: ClassVar[bool] = False  # whether the draft's confidence gives it its shape

    parents: tuple[int, ...]
    stop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.stop < 1:
            raise ValueError(f"tree: stop={self.stop} is not a probability in [0, 1)")
        if self.size > MAX_NODES:
            raise ValueError(f"tree: more than {MAX_NODES} nodes; draft fewer")
        before = -1
        for node, parent in enumerate(self.parents):
            if not before <= parent < node:
                raise ValueError(
                    "tree: nodes must be in breadth-first order, with -1 for the root, such as "
                    "(-1, -1, 0, 1)"
                )
            before = parent

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every node among its siblings, from 0: the order in which siblings are drawn and
        tried.
        """
        return tuple(node - self.parents.index(parent) for node, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every one of the M nodes, in rank order, all in M indexing: `children[0]` are
        the root's.
        """
        children: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node + 1)
        return tuple(map(tuple, children))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """`widths[d]`: the most children that any node at depth d has, for d from 0 (the root) to D
        - 1.
        """
        most = [0] * self.depth
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            most[depth - 1] = max(most[depth - 1], rank + 1)
        return tuple(most)

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


def chain(length: int) -> Tree:
    """The tree of `length` nodes, one below the other."""
    return Tree(tuple(range(-1, length - 1)))


def tree_of_paths(paths: Collection[tuple[int, ...]]) -> Tree:
    """Return the tree of nodes given by their paths of ranks from the root. Every path's beginnings
    must be among them.
    """
    # Sorted within a depth: siblings are neighbours, by rank, in the order of their parents.
    ordered = sorted(paths, key=lambda path: (len(path), path))
    numbers = {path: node for node, path in enumerate(ordered)}
    return Tree(tuple(numbers.get(path[:-1], -1) for path in ordered))


@dataclass(frozen=True)
class DynamicTree:
    """A tree that the draft's confidence shapes anew at every step and in every row; its children
    are the most probable tokens (EAGLE-2, arXiv 2406.16858; OPT-Tree, arXiv 2406.17276).

    The value of a node is the product of the confidences on its path. At each of `depth` levels the
    `beam` nodes of highest value get `beam` children each; the best `nodes` of all candidates are
    kept, the shallower of equals first. Levels end early when the best `nodes` would gain less than
    `gain` expected accepted tokens (0 never does).
    """

    grows: ClassVar[bool] = True

    depth: int
    beam: int
    nodes: int
    gain: float = 0.0

    def __post_init__(self) -> None:
        # Nodes that are compared: `beam` under the root, then `beam * beam` per level.
        candidates = self.beam + (self.depth - 1) * self.beam**2
        most = min(candidates, MAX_NODES)
        if not (1 <= self.depth <= self.nodes and 1 <= self.beam <= self.nodes <= most):
            raise ValueError(
                f"tree: depth={self.depth} and beam={self.beam} must be 1 to nodes={self.nodes}, "
                f"and nodes at most {MAX_NODES} and the {candidates} candidates that they reach"
            )
        if not 0 <= self.gain < 1:
            raise ValueError(f"tree: gain={self.gain} is not in [0, 1)")

    @property
    def size(self) -> int:
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return self.beam == 1


TreeShape = Tree | DynamicTree
