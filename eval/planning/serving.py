"""What a plan says for other engines: draft lengths under their rules, and by batch size."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypedDict

from draftsmith.core.io import JsonObject
from draftsmith.decode.tree import chain
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.eval.planning.planner import Expected


@dataclass(frozen=True)
class Rule:
    """How an engine accepts drafted tokens above temperature 0; at 0 all accept what the target
    would have chosen. verifier: ours that does the same. options: by which the engine follows it.
    """

    verifier: str
    rule: str
    options: dict[str, str] = field(default_factory=dict)


_GREEDY_DRAFT = Rule("naive", "the draft takes its most probable token, the target samples")
_SAMPLED_DRAFT = Rule("speculative", "the draft samples, accepted with min(1, p/q)")
# The rules of each engine, its default first (sources and documentation, November 2026; vLLM 0.32,
# config/speculative.py). The others need the draft's probabilities.
ENGINE_RULES = {
    "vllm": (
        _GREEDY_DRAFT,
        replace(_SAMPLED_DRAFT, options={"draft_sample_method": "probabilistic"}),
        Rule(
            "block",
            "the draft samples, all its tokens are verified together",
            {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        ),
    ),
    "sglang": (_GREEDY_DRAFT,),
    "llama.cpp": (_GREEDY_DRAFT,),
    "transformers": (_SAMPLED_DRAFT,),
}


class BestLength(TypedDict):
    """The best draft length at this machine's costs; 0 if no length is faster than the target
    alone.
    """

    draft_tokens: int
    tau: float
    speedup: float


class BatchRow(BestLength):
    """It at a batch size."""

    batch_size: int


def rules_of(engine: str, kind: str) -> Sequence[Rule]:
    """Return the rules that an engine can follow with a draft of this kind, its default first.
    vLLM takes the likeliest tokens of Medusa heads whatever its settings say.
    """
    rules = ENGINE_RULES[engine]
    return rules[:1] if kind == "medusa" else rules


def _best(expected: Expected, verifier: str, lengths: Sequence[int]) -> BestLength:
    found = []
    for length in lengths:
        rate, tau = expected.rate(chain(length), verifier)
        speedup = rate * expected.costs.alone
        found.append(BestLength(draft_tokens=length, tau=tau, speedup=speedup))
    return max(found, key=lambda best: best["speedup"])


def engine_rows(kind: str, expected: Expected, lengths: Sequence[int]) -> list[JsonObject]:
    """Return a row for each engine that loads a draft of this kind: the fastest rule with its best
    length, and all rules as `settings`, the engine's default first.
    """
    rows: list[JsonObject] = []
    for engine in ENGINE_RULES:
        if kind not in SERVING[engine]:
            continue
        found = []
        for rule in rules_of(engine, kind):
            if rule.verifier == "block" and expected.planner.target.device.type == "cpu":
                continue  # there vLLM drafts greedily with it
            found.append({**asdict(rule), **_best(expected, rule.verifier, lengths)})
        # Of equal ones the first: at temperature 0 all are.
        fastest = max(found, key=lambda row: round(row["speedup"], 6))
        rows.append({"engine": engine, **fastest, "settings": found})
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
        best = _best(there, verifier, lengths)
        if best["speedup"] <= 1:
            best = BestLength(draft_tokens=0, tau=1.0, speedup=1.0)
        rows.append(BatchRow(batch_size=size, **best))
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
