"""What a step costs on this machine: seconds by rows that the target verifies and by nodes that a draft expands.

Steps are timed whole, in the engine, on real contexts, at the batch size asked for: forwards, masks, drawing, verifying
and bookkeeping. With F(n) for a step that verifies n rows and expands the root alone, and d(w) for one more forward of
the draft that expands w nodes, a step on a tree takes F(1 + nodes) + the sum of d over its levels but the first. F is
read off trees of one level, d off trees that have one level more. Both are medians, made monotone: more rows are
never taken to be cheaper.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode import Tree
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
