"""What a plan says for other engines: draft lengths under their rules, and by batch size."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from draftsmith.decode.tree_spec import kary
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.eval.planning.planner import Expected

# Each engine's acceptance rule above temperature 0: our verifier, and a description (engines'
# sources and documentation, November 2026). At temperature 0 all engines accept what the target
# would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
_SAMPLED_DRAFT = ("speculative", "the draft samples, accepted with min(1, p/q)")
ENGINE_RULES = {
    "vllm": _GREEDY_DRAFT,
    "sglang": _GREEDY_DRAFT,
    "llama.cpp": _GREEDY_DRAFT,
    "transformers": _SAMPLED_DRAFT,
}
# Settings by which vLLM (0.32, config/speculative.py) follows another rule, for drafts whose
# probabilities it keeps.
VLLM_SETTINGS = (
    ({"draft_sample_method": "probabilistic"}, _SAMPLED_DRAFT),
    (
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        ("block", "the draft samples, all its tokens are verified together"),
    ),
)
_KEEPS_PROBABILITIES = ("draft", "eagle", "eagle3", "mtp", "dflash", "dspark", "jetspec")


class SettingRow(TypedDict):
    """The best draft length under one rule at this machine's costs. options: by which the engine
    follows it.
    """

    options: dict[str, str]
    rule: str
    verifier: str
    draft_tokens: int
    tau: float
    speedup: float


class BatchRow(TypedDict):
    """The best draft length at a batch size; 0 where no length is faster than the target alone."""

    batch_size: int
    draft_tokens: int
    tau: float
    speedup: float


def _best(expected: Expected, verifier: str, lengths: Sequence[int]) -> tuple[int, float, float]:
    """Return the fastest length, its tokens per step and its speedup."""
    found = (0, 0.0, -1.0)
    for length in lengths:
        rate, tau = expected.rate(kary((1,) * length), verifier)
        speedup = rate * expected.costs.alone
        if speedup > found[2]:
            found = length, tau, speedup
    return found


def engine_rows(kind: str, expected: Expected, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each engine that loads a draft of this kind: the fastest `SettingRow`, and
    all of them as `settings`, the engine's default first.
    """
    rows: list[dict[str, Any]] = []
    for engine, usual in ENGINE_RULES.items():
        if kind not in SERVING[engine]:
            continue
        settings: list[tuple[dict[str, str], tuple[str, str]]] = [({}, usual)]
        if engine == "vllm" and kind in _KEEPS_PROBABILITIES:
            settings += VLLM_SETTINGS
        found = []
        for options, (verifier, rule) in settings:
            length, tau, speedup = _best(expected, verifier, lengths)
            found.append(
                SettingRow(
                    options=options,
                    rule=rule,
                    verifier=verifier,
                    draft_tokens=length,
                    tau=tau,
                    speedup=speedup,
                )
            )
        # Of equal ones the first: at temperature 0 all are.
        best = max(found, key=lambda row: round(row["speedup"], 6))
        rows.append({"engine": engine, **best, "settings": found})
    return rows


def batch_rows(
    expected: Expected, sizes: Sequence[int], lengths: Sequence[int], verifier: str
) -> list[BatchRow]:
    """Time chains at each batch size, and return the best length there."""
    rows = []
    for size in sorted(set(sizes)):
        planner = replace(expected.planner, batch_size=size)
        rounds = planner.time_steps(expected.texts, trees_fit=False)
        there = Expected(planner, expected.texts, expected.traces, rounds)
        length, tau, speedup = _best(there, verifier, lengths)
        if speedup <= 1:
            length, tau, speedup = 0, 1.0, 1.0
        rows.append(BatchRow(batch_size=size, draft_tokens=length, tau=tau, speedup=speedup))
    return rows


def none_pays_from(rows: Sequence[BatchRow]) -> int | None:
    """The batch size from which on no length pays."""
    first = None
    for row in reversed(rows):
        if row["draft_tokens"]:
            break
        first = row["batch_size"]
    return first


def vllm_schedule(rows: Sequence[BatchRow]) -> list[list[int]]:
    """Return vLLM's `num_speculative_tokens_per_batch_size`: [from, to, tokens]. A batch size that
    was not timed gets the length of the next larger one that was.
    """
    schedule: list[list[int]] = []
    begin = 1
    for row in rows:
        size, tokens = row["batch_size"], row["draft_tokens"]
        if schedule and schedule[-1][2] == tokens:
            schedule[-1][1] = size
        else:
            schedule.append([begin, size, tokens])
        begin = size + 1
    return schedule
