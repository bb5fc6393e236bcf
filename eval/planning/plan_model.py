"""What a step on a tree costs on this machine, and how many tokens it is expected to emit: what
plans choose by.

**Costs.** Steps are timed whole, in the engine, on real contexts, at the given batch size:
forwards, masks, drawing, verifying and bookkeeping. With F(n) for a step that verifies n rows and
expands only the root, and d(w) for one more forward of the draft that expands w nodes, a step takes
F(1 + nodes) + the sum of d over its levels but the first. F is read off trees of one level, d off
trees that have one level more.

**Expected tokens.** A node is the ranks on its path. Its value is how often decoding reaches it:
the mean over positions of the product of the chances that the text's tokens were accepted at these
ranks and depths, one after another (`eval.acceptance`). A step emits 1 + the sum of its nodes'
values. Sequoia's program (`decode.sequoia`) takes the value of a node to be a product of one number
per rank; here runs that occur together count together. Values are means over all positions, not
over those that decoding visits: they choose, and `eval.predict` says what to expect.

Legend: P prompts, L positions, K ranks, D depths of a head (1 for a language model).
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from decode import Tree
from decode.tree import tree_of_paths
from decode.tree_spec import kary

Floats = NDArray[np.float64]
Path = tuple[int, ...]
# Nodes of the trees of one level, and widths of a level that is expanded.
ROWS, WIDTHS = (1, 2, 4, 8, 16, 32, 64), (4, 16)
CHAIN, ROUNDS = 6, 3
# MCSD's space: branching numbers of one level, and the most leaves (arXiv 2401.06706).
BRANCHING, MOST_LEAVES = (1, 2, 4, 8, 16, 32), 32


@dataclass(frozen=True)
class Costs:
    """Seconds of a step. verify_s: by rows, the root included (F), 1 for the target without a
    draft. draft_s: by nodes expanded in one forward (d).
    """

    verify_s: dict[int, float]
    draft_s: dict[int, float]

    @property
    def alone(self) -> float:
        return self.verify_s[1]

    def step(self, tree: Tree) -> float:
        """Seconds of a step on a static tree, interpolated linearly between what was measured."""
        expanded = [0] * (tree.depth + 1)
        for node, below in enumerate(tree.children):
            if below and node:
                expanded[tree.depths[node - 1]] += 1
        drafting = sum(_interpolate(self.draft_s, width) for width in expanded if width)
        return _interpolate(self.verify_s, tree.size + 1) + drafting


def _interpolate(curve: dict[int, float], at: int) -> float:
    sizes = sorted(curve)
    if at > sizes[-1] and len(sizes) > 1:
        low, high = sizes[-2:]
        return curve[high] + (at - high) * (curve[high] - curve[low]) / (high - low)
    return float(np.interp(at, sizes, [curve[size] for size in sizes]))


def shapes(deepest: int | None) -> dict[str, Tree | None]:
    """Trees to time by name, None for the target alone; `deepest`: most levels that the draft can
    draft.
    """
    trees: dict[str, Tree | None] = {"alone": None, **{f"rows:{n}": Tree((-1,) * n) for n in ROWS}}
    if deepest is None or deepest > 1:
        levels = min(CHAIN, deepest or CHAIN)
        trees |= {f"width:{w}": kary((w, 1)) for w in WIDTHS} | {
            f"chain:{levels}": kary((1,) * levels)
        }
    return trees


def fit(seconds: Mapping[str, Sequence[float]]) -> Costs:
    """Costs from seconds per step of `shapes`, by name, round by round. Others on the machine only
    add time, so the fastest round counts, and no step is taken to be faster than one with fewer
    rows.
    """
    least = {name: min(values) for name, values in seconds.items()}
    verify = isotonic({1: least["alone"]} | {1 + n: least[f"rows:{n}"] for n in ROWS})
    draft: dict[int, float] = {}
    for name, value in least.items():
        kind, _, number = name.partition(":")
        if kind == "width":
            draft[int(number)] = max(0.0, value - _interpolate(verify, 1 + 2 * int(number)))
        elif kind == "chain":
            draft[1] = max(0.0, (value - _interpolate(verify, 1 + int(number))) / (int(number) - 1))
    return Costs(verify, isotonic(draft) or {1: 0.0})


def isotonic(curve: Mapping[int, float]) -> dict[int, float]:
    """The curve that never falls and is closest in least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for size in sorted(curve):
        blocks.append([curve[size]])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return dict(zip(sorted(curve), [fmean(block) for block in blocks for _ in block], strict=True))


def time_shapes(
    time_step: Callable[[Tree | None], float], deepest: int | None, go_on: Callable[[], bool]
) -> dict[str, list[float]]:
    """Seconds per step of every shape, round by round, interleaved; no further round starts unless
    `go_on()`.

    `time_step(tree)` gives seconds per step of one short run.
    """
    trees = shapes(deepest)
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for tree in trees.values():
        time_step(tree)  # warm-up: plans, packed weights and masks are made once
    for turn in range(ROUNDS):
        if turn and not go_on():
            break
        names = list(trees)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(time_step(trees[name]))
    return seconds


class JointRuns:
    """Values of nodes, computed once each. `chances_DKPL` is 0 beyond the end of a text."""

    def __init__(self, chances_DKPL: Floats, lengths_P: NDArray[np.int64]) -> None:
        self._chances = chances_DKPL
        self._positions = float(lengths_P.sum())
        self._runs: dict[Path, Floats] = {
            (): (np.arange(chances_DKPL.shape[3]) < lengths_P[:, None]).astype(float)
        }
        self._values: dict[Path, float] = {}

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
        """Return the best tree of 1, 2, ... `nodes` nodes within `depth` levels: each adds the most
        valuable node.

        Greedy is optimal if values fall with rank and depth, as they do up to noise.
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
            if path[-1] + 1 < self._chances.shape[1]:
                after = (*path[:-1], path[-1] + 1)
                heapq.heappush(waiting, (-self.value(after), after))
            if len(path) < depth:
                heapq.heappush(waiting, (-self.value((*path, 0)), (*path, 0)))
        return trees


def kary_space(nodes: int, depth: int, ranks: int) -> dict[str, Tree]:
    """MCSD's trees by spec: each level has one of `BRANCHING` children, and the tree at most
    `MOST_LEAVES` leaves.
    """
    trees: dict[str, Tree] = {}

    def extend(counts: Path, leaves: int, size: int) -> None:
        for count in BRANCHING:
            if count <= ranks and leaves * count <= MOST_LEAVES and size + leaves * count <= nodes:
                levels = (*counts, count)
                if max(levels) > 1:
                    trees["kary:" + ",".join(map(str, levels))] = kary(levels)
                if len(levels) < depth:
                    extend(levels, leaves * count, size + leaves * count)

    extend((), 1, 0)
    return trees
