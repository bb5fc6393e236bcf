"""How many tokens a step on a tree is expected to emit.

A node is the ranks on its path. Its value is how often decoding reaches it: the mean over positions
of the product of the chances that the text's tokens were accepted at these ranks and depths, one
after another (`eval.formulas`). A step emits 1 + the sum of its nodes' values.

Sequoia's program (arXiv 2402.12374) takes the value of a node to be a product of one number per
rank; here runs that occur together count together. Values are means over all positions, not over
those that decoding visits: they choose, and `eval.predict` says what to expect.

Legend: P prompts, L positions, K ranks, D depths of a head (1 for a language model).
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from draftsmith.decode import Tree
from draftsmith.decode.tree import tree_of_paths
from draftsmith.decode.tree_spec import kary
from draftsmith.eval.predict import Floats

Ranks = tuple[int, ...]
# MCSD's space: branching numbers of one level, and the most leaves (arXiv 2401.06706).
BRANCHING = (1, 2, 4, 8, 16, 32)
MOST_LEAVES = 32


class JointRuns:
    """Values of nodes, computed once each. `chances_DKPL` is 0 beyond the end of a text."""

    def __init__(self, chances_DKPL: Floats, lengths_P: NDArray[np.int64]) -> None:
        self._chances = chances_DKPL
        self._positions = float(lengths_P.sum())
        inside_PL = np.arange(chances_DKPL.shape[3]) < lengths_P[:, None]
        self._runs: dict[Ranks, Floats] = {(): inside_PL.astype(float)}
        self._values: dict[Ranks, float] = {}

    def value(self, path: Ranks) -> float:
        """How often a step accepts this node."""
        if path not in self._values:
            total = self._run(path).sum()
            self._values[path] = float(total) / self._positions
        return self._values[path]

    def _run(self, path: Ranks) -> Floats:
        if path not in self._runs:
            *above, rank = path
            level = len(above)
            depth = min(level, len(self._chances) - 1)
            here_PL = self._chances[depth, rank]
            later_PL = np.pad(here_PL[:, level:], ((0, 0), (0, level)))
            self._runs[path] = self._run(tuple(above)) * later_PL[:, : here_PL.shape[1]]
        return self._runs[path]

    def length(self, tree: Tree) -> float:
        """Expected tokens of a step, the target's own included."""
        paths: list[Ranks] = []
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            above = paths[parent] if parent >= 0 else ()
            paths.append((*above, rank))
        return 1.0 + sum(map(self.value, paths))

    def grow(self, nodes: int, depth: int) -> list[Tree]:
        """Return the best tree of 1, 2, ... `nodes` nodes within `depth` levels: each adds the most
        valuable node.

        Greedy is optimal if values fall with rank and depth, as they do up to noise.
        """
        waiting: list[tuple[float, Ranks]] = [(-self.value((0,)), (0,))]
        chosen: list[Ranks] = []
        trees = []
        while waiting and len(chosen) < nodes:
            value, path = heapq.heappop(waiting)
            if value >= 0:
                break
            chosen.append(path)
            trees.append(tree_of_paths(chosen))
            *above, rank = path
            if rank + 1 < self._chances.shape[1]:
                sibling = (*above, rank + 1)
                heapq.heappush(waiting, (-self.value(sibling), sibling))
            if len(path) < depth:
                child = (*path, 0)
                heapq.heappush(waiting, (-self.value(child), child))
        return trees


def kary_space(nodes: int, depth: int, ranks: int) -> dict[str, Tree]:
    """MCSD's trees by spec: each level has one of `BRANCHING` children, and the tree at most
    `MOST_LEAVES` leaves.
    """
    trees: dict[str, Tree] = {}

    def extend(counts: Ranks, leaves: int, size: int) -> None:
        for count in BRANCHING:
            if count <= ranks and leaves * count <= MOST_LEAVES and size + leaves * count <= nodes:
                levels = (*counts, count)
                if max(levels) > 1:
                    trees["kary:" + ",".join(map(str, levels))] = kary(levels)
                if len(levels) < depth:
                    extend(levels, leaves * count, size + leaves * count)

    extend((), 1, 0)
    return trees
