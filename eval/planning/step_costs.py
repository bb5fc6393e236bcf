"""What a step on a tree costs on this machine.

Steps are timed whole, in the engine, on real contexts, at the given batch size: forwards, masks,
drawing, verifying and bookkeeping. F(n) is a step that verifies n rows and expands only the root.
d(w) is one more forward of the draft, which expands w nodes. A step takes F(1 + nodes) + the sum of
d over its levels but the first. Trees of one level give F; trees that have one level more give d.

Of a pair that takes chains only, chains are timed whole, with what going back to the last accepted
token costs: F(n) is then a step on a chain of n - 1 tokens, its drafting included, and d is 0.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.decode import Tree
from draftsmith.decode.tree import chain
from draftsmith.decode.tree_spec import kary

# Nodes of the trees of one level.
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Widths of a level that is expanded.
WIDTHS = (4, 16)
# Levels of the chain that is timed.
CHAIN = 6
# Levels of the chains that are timed for a pair that takes no trees.
CHAINS = (1, 2, 4, 8, 16)
ROUNDS = 3
# Seconds by size.
Curve = dict[int, float]
# Seconds of a step by the name of its shape, round by round.
Rounds = dict[str, list[float]]


@dataclass(frozen=True)
class Costs:
    """Seconds of a step. verify_s: by rows, the root included (F), 1 for the target without a
    draft. draft_s: by nodes expanded in one forward (d).
    """

    verify_s: Curve
    draft_s: Curve

    @property
    def alone(self) -> float:
        return self.verify_s[1]

    def step(self, tree: Tree) -> float:
        """Seconds of a step on a static tree, interpolated linearly between what was measured."""
        expanded = [0] * (tree.depth + 1)
        for node, below in enumerate(tree.children):
            if below and node:
                level = tree.depths[node - 1]
                expanded[level] += 1
        drafting = sum(_interpolate(self.draft_s, width) for width in expanded if width)
        return _interpolate(self.verify_s, tree.size + 1) + drafting


def _interpolate(curve: Curve, at: int) -> float:
    sizes = sorted(curve)
    if at > sizes[-1] and len(sizes) > 1:
        low, high = sizes[-2:]
        slope = (curve[high] - curve[low]) / (high - low)
        return curve[high] + (at - high) * slope
    return float(np.interp(at, sizes, [curve[size] for size in sizes]))


def shapes(deepest: int | None, *, trees_fit: bool = True) -> dict[str, Tree | None]:
    """Trees to time by name, None for the target alone; `deepest`: most levels that the draft can
    draft. trees_fit: whether the pair takes trees other than chains.
    """
    trees: dict[str, Tree | None] = {"alone": None}
    if not trees_fit:
        lengths = {min(length, deepest or length) for length in CHAINS}
        return trees | {f"whole:{length}": chain(length) for length in sorted(lengths)}
    trees |= {f"rows:{n}": Tree((-1,) * n) for n in ROWS}
    if deepest is None or deepest > 1:
        levels = min(CHAIN, deepest or CHAIN)
        trees |= {f"width:{w}": kary((w, 1)) for w in WIDTHS}
        trees[f"chain:{levels}"] = chain(levels)
    return trees


def fit(seconds: Mapping[str, Sequence[float]]) -> Costs:
    """Costs from seconds per step of `shapes`, by name, round by round. Others on the machine only
    add time, so the fastest round counts, and no step is taken to be faster than one with fewer
    rows.
    """
    least: dict[str, Curve] = defaultdict(dict)
    for name, values in seconds.items():
        kind, _, size = name.partition(":")
        least[kind][int(size or 0)] = min(values)
    by_rows = {1 + size: value for size, value in (least["rows"] | least["whole"]).items()}
    verify = isotonic({1: least["alone"][0], **by_rows})
    draft: Curve = {}
    for width, value in least["width"].items():
        draft[width] = max(0.0, value - _interpolate(verify, 1 + 2 * width))
    for levels, value in least["chain"].items():
        draft[1] = max(0.0, (value - _interpolate(verify, 1 + levels)) / (levels - 1))
    return Costs(verify, isotonic(draft or {1: 0.0}))


def isotonic(curve: Mapping[int, float]) -> Curve:
    """The curve that never falls and is closest in least squares."""
    from scipy.optimize import isotonic_regression  # takes half a second

    sizes = sorted(curve)
    fitted = isotonic_regression([curve[size] for size in sizes])
    return dict(zip(sizes, fitted.x.tolist(), strict=True))


def time_shapes(
    time_step: Callable[[Tree | None], float],
    deepest: int | None,
    go_on: Callable[[], bool],
    *,
    trees_fit: bool = True,
) -> Rounds:
    """Seconds per step of every shape, round by round, interleaved; no further round starts unless
    `go_on()`.

    `time_step(tree)` gives seconds per step of one short run. trees_fit: as for `shapes`.
    """
    trees = shapes(deepest, trees_fit=trees_fit)
    seconds: Rounds = {name: [] for name in trees}
    for tree in trees.values():
        time_step(tree)  # warm-up: plans, packed weights and masks are made once
    for turn in range(ROUNDS):
        if turn and not go_on():
            break
        names = list(trees)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(time_step(trees[name]))
    return seconds
