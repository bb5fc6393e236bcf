"""What `align` chooses by the time that its steps take: with a budget all that is open, without one
an evaluation that takes no longer than the training.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter

from draftsmith.alignment.choices import complete, filled
from draftsmith.alignment.config import AlignConfig, seconds_of
from draftsmith.alignment.facts import Facts
from draftsmith.alignment.forecast import duration
from draftsmith.core.errors import InputError

# Seconds of each stage, with these options.
StageTimes = Callable[[AlignConfig], Mapping[str, float]]
# What is shortened, and the least of each that makes sense.
_LEAST = {
    "distill.max_prompts": 2,
    "distill.num_samples": 1,
    "train.steps": 10,
    "eval.max_prompts": 8,
    "eval.speed_prompts": 4,
}
_SMALLER = 0.9
# Of a budget that is advised: steps are timed anew, and may take longer.
_MARGIN = 1.2
# From here on every choice is the least.
_SMALLEST = 1e-3
# An evaluation that is shorter than this is not cut without a budget.
_SHORT_S = 300
# Share of a budget that the evaluation takes at most.
_MEASURED = 1 / 3


def within(
    config: AlignConfig,
    facts: Facts,
    times: StageTimes,
    budget_s: float = math.inf,
    spent_s: float = 0.0,
) -> tuple[AlignConfig, list[str]]:
    """Return complete options whose stages fit into what is left of a budget, and a line for each
    choice.

    config: what is given; only what is open is chosen. spent_s: until now. Raise InputError if no
    choice is that short.
    """
    limit_s = budget_s - spent_s
    usual, lines = complete(config, facts)
    whole = usual
    work = measured = 1.0
    while all_open := [key for key in _LEAST if attrgetter(key)(config) is None]:
        seconds = times(whole)
        longest = min(max(_SHORT_S, seconds["train"]), _MEASURED * limit_s)
        if seconds["evaluate"] > longest and measured > _SMALLEST:
            measured *= _SMALLER
        elif sum(seconds.values()) <= limit_s:
            break
        elif work > _SMALLEST:
            work *= _SMALLER
        else:
            needed_s = _MARGIN * (spent_s + sum(seconds.values()))
            raise InputError(
                f"time_budget: {config.time_budget} is too short here; the shortest run of these "
                f"options fits into {math.ceil(needed_s / 60)}m"
            )
        shares = _shares(config, usual, work, measured)
        chosen: dict[str, object] = {key: shares[key] for key in shares if key in all_open}
        if measured < 1 and config.time_budget is not None and config.eval.tree is None:
            # One way to decode on more prompts decides more than two on fewer.
            chosen["eval.tree"] = usual.eval.tree[:1]
        whole, lines = _with(config, chosen, facts)
    return whole, lines


def _shares(
    config: AlignConfig, usual: AlignConfig, work: float, measured: float
) -> dict[str, int]:
    """Return a share of the usual answers and steps, and another of the evaluation."""
    chosen: dict[str, int] = {}
    if work < 1:
        answers = work * usual.distill.max_prompts * usual.distill.num_samples
        # Answers to other prompts teach more than others to the same.
        prompts = config.distill.max_prompts or min(usual.distill.max_prompts, round(answers))
        chosen["distill.max_prompts"] = prompts
        chosen["distill.num_samples"] = round(answers / max(1, prompts))
        chosen["train.steps"] = round(work * usual.train.steps)
    if measured < 1:
        chosen["eval.max_prompts"] = round(measured * usual.eval.max_prompts)
        chosen["eval.speed_prompts"] = round(measured * usual.eval.speed_prompts)
    return {
        key: max(value, min(_LEAST[key], attrgetter(key)(usual))) for key, value in chosen.items()
    }


def _with(
    config: AlignConfig, chosen: Mapping[str, object], facts: Facts
) -> tuple[AlignConfig, list[str]]:
    why = f"time_budget {config.time_budget}"
    if config.time_budget is None:
        why = "no longer than the training"
    notes = []
    for key, value in chosen.items():
        config = filled(config, key, value)
        notes.append(f"{key} {value}   ({why}; steps were timed)")
    whole, lines = complete(config, facts)
    return whole, notes + lines


def bought(
    config: AlignConfig, facts: Facts, times: StageTimes, whole: AlignConfig, spent_s: float = 0.0
) -> str:
    """Say what a budget is spent on, and what twice the time would buy. config: what was given."""
    assert config.time_budget is not None
    limit_s = seconds_of(config.time_budget)
    takes_s = spent_s + sum(times(whole).values())
    line = f"time_budget {config.time_budget}: {_in_words(whole)}, {duration(takes_s)} at most"
    if takes_s > limit_s:
        return f"{line}: more than that, because the options that it would choose are given"
    twice, _ = within(config, facts, times, 2 * limit_s, spent_s)
    more = "no more" if twice == whole else _in_words(twice)
    return f"{line}; twice the time would buy {more}"


def _in_words(config: AlignConfig) -> str:
    prompts = config.distill.max_prompts
    return (
        f"{prompts * config.distill.num_samples} answers to {prompts} prompts, "
        f"{config.train.steps} steps, {config.eval.max_prompts} prompts measured"
    )
