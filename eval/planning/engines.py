"""The best draft length on each engine that loads such a draft."""

from collections.abc import Sequence
from typing import TypedDict

from draftsmith.decode.tree_spec import kary
from draftsmith.drafts.engine_commands import SERVING
from draftsmith.eval.planning.planner import Expected

# Each engine's acceptance rule above temperature 0: our verifier, and a description (engines'
# sources and documentation, November 2026). At temperature 0 all engines accept what the target
# would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
ENGINE_RULES = {
    "vllm": _GREEDY_DRAFT,
    "sglang": _GREEDY_DRAFT,
    "llama.cpp": _GREEDY_DRAFT,
    "transformers": ("speculative", "the draft samples, accepted with min(1, p/q)"),
}


class EngineRow(TypedDict):
    """The best draft length of an engine under its own rule at this machine's costs."""

    engine: str
    rule: str
    draft_tokens: int
    tau: float
    speedup: float


def engine_rows(kind: str, expected: Expected, lengths: Sequence[int]) -> list[EngineRow]:
    """Return a row for each engine that loads a draft of this kind."""
    rows: list[EngineRow] = []
    for engine, (verifier, rule) in ENGINE_RULES.items():
        if kind not in SERVING[engine]:
            continue
        row = EngineRow(engine=engine, rule=rule, draft_tokens=0, tau=0.0, speedup=-1.0)
        for length in lengths:
            rate, tau = expected.rate(kary((1,) * length), verifier)
            speedup = rate * expected.costs.alone
            if speedup > row["speedup"]:
                row |= {"draft_tokens": length, "tau": tau, "speedup": speedup}
        rows.append(row)
    return rows
