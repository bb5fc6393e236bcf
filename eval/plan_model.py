"""What a step costs on this machine: seconds by rows that the target verifies and by nodes that a draft expands.

Steps are timed whole, in the engine, on real contexts, at the batch size asked for: forwards, masks, drawing, verifying
and bookkeeping. With F(n) for a step that verifies n rows and expands the root alone, and d(w) for one more forward of
the draft that expands w nodes, a step on a tree takes F(1 + nodes) + the sum of d over its levels but the first. F is
read off trees of one level, d off trees that have one level more. Both are medians, made monotone: more rows are
never taken to be cheaper.

Expected tokens per step of any static tree from joint runs, quickly: what `eval.plan` chooses among.

A node is the ranks on its path; its value is how often decoding is at it, the mean over positions of the product of the
chances that the text's tokens were accepted at these ranks, at these depths, one after another (`eval.acceptance`). So
a step emits 1 + the sum of the values of its tree's nodes. Sequoia's programme (`decode.sequoia`) takes the value of a
node to be a product of one number per rank; here runs that come together count together. Values are means over all
positions and not over those that decoding visits: they choose, and `eval.predict` then says what to expect.

Legend: P prompts, L positions, K ranks, D depths of a head (1 for a language model).
"""

import heapq
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from decode import Tree
from decode.tree import tree_of_paths
from decode.tree_spec import kary

# Nodes of the trees of one level, and widths of a level that is expanded.
ROWS, WIDTHS = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)
CHAIN = 6
ROUNDS = 3


@dataclass(frozen=True)
class Costs:
    """Seconds of a step. alone: the target without a draft. verify_s: by rows, the root among them (F). draft_s: by
    nodes expanded in one forward (d).
    """

    alone: float
    verify_s: dict[int, float]
    draft_s: dict[int, float]

    def step(self, tree: Tree) -> float:
        """Seconds of a step on a static tree, by straight lines between what was measured."""
        expanded = [0] * (tree.depth + 1)
        for node, below in enumerate(tree.children):
            if below and node:
                expanded[tree.depths[node - 1]] += 1
        return _between(self.verify_s, tree.size + 1) + sum(
            _between(self.draft_s, width) for width in expanded if width
        )


def _between(curve: dict[int, float], at: int) -> float:
    sizes = sorted(curve)
    if at > sizes[-1] and len(sizes) > 1:
        low, high = sizes[-2:]
        return curve[high] + (at - high) * (curve[high] - curve[low]) / (high - low)
    return float(np.interp(at, sizes, [curve[size] for size in sizes]))


def shapes(deepest: int | None) -> dict[str, Tree]:
    """The trees whose steps are timed; `deepest`: levels that the draft can draft at most."""
    found = {f"rows:{n}": Tree((-1,) * n) for n in ROWS}
    if deepest is None or deepest > 1:
        found |= {f"width:{w}": kary((w, 1)) for w in WIDTHS[1:]}
        levels = min(CHAIN, deepest or CHAIN)
        found[f"chain:{levels}"] = kary((1,) * levels)
    return found


def fit(seconds: Mapping[str, Sequence[float]], alone: Sequence[float]) -> Costs:
    """From seconds per step of `shapes`, by name, round by round."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    verify = {1 + n: median[f"rows:{n}"] for n in ROWS}
    verify = _monotone(verify)
    draft: dict[int, float] = {}
    for name, value in median.items():
        kind, _, number = name.partition(":")
        n = int(number)
        if kind == "width":
            draft[n] = max(0.0, value - _between(verify, 1 + 2 * n))
        elif kind == "chain" and n > 1:
            draft[1] = max(0.0, (value - _between(verify, 1 + n)) / (n - 1))
    return Costs(statistics.median(alone), verify, _monotone(draft) or {1: 0.0})


def _monotone(curve: dict[int, float]) -> dict[int, float]:
    sizes = sorted(curve)
    return dict(zip(sizes, np.maximum.accumulate([curve[size] for size in sizes]).tolist(), strict=True))


def measure_costs(
    time_step: Callable[[Tree | None], float], deepest: int | None
) -> tuple[Costs, dict[str, list[float]]]:
    """Time every shape and the target alone, interleaved; `time_step(tree)` gives seconds per step of one short run."""
    trees: dict[str, Tree | None] = {"alone": None, **shapes(deepest)}
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for tree in trees.values():
        time_step(tree)  # warm-up: plans, packed weights and masks are made once
    for round_ in range(ROUNDS):
        names = list(trees)
        for name in names[round_:] + names[:round_]:
            seconds[name].append(time_step(trees[name]))
    return fit({name: values for name, values in seconds.items() if name != "alone"}, seconds["alone"]), seconds


Floats = NDArray[np.float64]
Path = tuple[int, ...]
# MCSD's space: branching numbers of one level, and the most leaves (arXiv 2401.06706).
BRANCHING, MOST_LEAVES = (1, 2, 4, 8, 16, 32), 32


class JointRuns:
    """Values of nodes, kept as they are asked for. `chances_DKPL` is 0 beyond the end of a text."""

    def __init__(self, chances_DKPL: Floats, lengths_P: NDArray[np.int64]) -> None:
        self._chances = chances_DKPL
        self._positions = float(lengths_P.sum())
        self._runs: dict[Path, Floats] = {(): (np.arange(chances_DKPL.shape[3]) < lengths_P[:, None]).astype(float)}
        self._values: dict[Path, float] = {}

    @cached_property
    def ranks(self) -> int:
        """K: candidates of one node that are known."""
        return int(self._chances.shape[1])

    def value(self, path: Path) -> float:
        """How often a step accepts this node."""
        if path not in self._values:
            self._values[path] = float(self._run(path).sum()) / self._positions
        return self._values[path]

    def _run(self, path: Path) -> Floats:
        if path not in self._runs:
            above, level = self._run(path[:-1]), len(path) - 1
            here = self._chances[min(level, len(self._chances) - 1), path[-1]]
            later = np.zeros_like(here)
            if level < here.shape[1]:
                later[:, : here.shape[1] - level] = here[:, level:]
            self._runs[path] = above * later
        return self._runs[path]

    def length(self, tree: Tree) -> float:
        """Expected tokens of a step, the target's own included."""
        paths: list[Path] = []
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        return 1.0 + sum(map(self.value, paths))

    def grow(self, nodes: int, depth: int) -> list[Tree]:
        """The best tree of 1, 2, ... `nodes` nodes within `depth` levels: each adds the most valuable node that may be
        added next. Greedy is optimal where values fall with rank and depth, as they do but for noise.
        """
        waiting: list[tuple[float, Path]] = [(-self.value((0,)), (0,))]
        chosen: list[Path] = []
        trees = []
        while waiting and len(chosen) < nodes:
            value, path = heapq.heappop(waiting)
            if value >= 0:
                break
            chosen.append(path)
            trees.append(tree_of_paths(chosen))
            if path[-1] + 1 < self.ranks:
                after = (*path[:-1], path[-1] + 1)
                heapq.heappush(waiting, (-self.value(after), after))
            if len(path) < depth:
                heapq.heappush(waiting, (-self.value((*path, 0)), (*path, 0)))
        return trees


def kary_space(nodes: int, depth: int, ranks: int) -> dict[str, Tree]:
    """MCSD's trees by spec: every level has one of `BRANCHING` children, at most `MOST_LEAVES` leaves in all."""
    found: dict[str, Tree] = {}

    def extend(counts: Path, leaves: int, size: int) -> None:
        for count in BRANCHING:
            if count <= ranks and leaves * count <= MOST_LEAVES and size + leaves * count <= nodes:
                levels = (*counts, count)
                if max(levels) > 1:
                    found["kary:" + ",".join(map(str, levels))] = kary(levels)
                if len(levels) < depth:
                    extend(levels, leaves * count, size + leaves * count)

    extend((), 1, 0)
    return found
