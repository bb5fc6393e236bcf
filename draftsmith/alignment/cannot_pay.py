"""Drafts that cannot pay by the alpha of their training: only their acceptance is evaluated."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.forecast import StepTimes
from draftsmith.core.ranks import say
from draftsmith.core.record import read_record
from draftsmith.decode import Tree, parse_tree

# Prompts of a set that are enough to confirm it.
_FEW = 8


def most_tokens(alpha: float, trees: Sequence[str]) -> float:
    """Return the tokens per target call that a draft of this alpha has at most: on an endless
    chain, or on one of the trees if every sibling were accepted as often as the first.
    """
    most = 1 / max(1e-9, 1 - alpha)
    for spec in trees:
        shape = parse_tree(spec)
        if not isinstance(shape, Tree):
            return math.inf
        nodes = Counter(shape.depths)
        most = max(most, 1 + sum(min(1.0, nodes[depth] * alpha**depth) for depth in nodes))
    return most


def short_evaluation(config: AlignConfig, times: StepTimes | None) -> AlignConfig | None:
    """Return options that measure acceptance alone, and say why; None if a draft may pay, or if
    that is not known.
    """
    if times is None or times.pays_from is None:
        return None
    for name in config.trained():
        # A draft that was trained without a teacher has none.
        alpha = read_record(Path(config.out) / name).get("heldout_alpha", 1.0)
        most = most_tokens(alpha, config.eval.tree)
        if most >= times.pays_from:
            return None
        say(
            f"{name}: held-out alpha {alpha:.3f} gives at most {most:.3f} tokens per target call, "
            f"and the cheapest tree needs {times.pays_from:.2f} here"
        )
    short = replace(
        config.eval,
        tree=["none"],
        speed_prompts=0,
        max_prompts=min(_FEW, config.eval.max_prompts),
        pays_from=round(times.pays_from, 2),
    )
    return replace(config, eval=short)
