"""How to serve a planned pair elsewhere: the draft length that is best under each engine's own rule, and its flags.

Engines differ in the rule by which a drafted token is accepted, and so in the best length for one pair. What is
compared is the joint acceptance under that rule over this machine's costs of a step; on another machine the length
should be planned again. Rules: of the engines' sources and documentation, November 2026.
"""

from collections.abc import Callable, Sequence
from typing import Any

from draftsmith_core.engine_commands import SERVING

# Engine: the rule above temperature 0, as a verifier here, and in words.
# At temperature 0 all of them accept what the target would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
_RULES = {
    "vllm": _GREEDY_DRAFT,
    "sglang": _GREEDY_DRAFT,
    "llama.cpp": _GREEDY_DRAFT,
    "transformers": ("speculative", "the draft samples, accepted with min(1, p/q)"),
}


def engine_flags(
    kind: str, rate: Callable[[str, int], tuple[float, float]], alone: float, longest: int
) -> list[dict[str, Any]]:
    """By engine that loads such a draft: the best length, and tau and speedup there. `rate(verifier, n)` gives tau and
    tokens per second of a chain of n, `alone` the tokens per second without a draft, as predicted here.
    """
    found: list[dict[str, Any]] = []
    for engine, (verifier, rule) in _RULES.items():
        if kind not in SERVING[engine]:
            continue
        rates = [(rate(verifier, n), n) for n in range(1, longest + 1)]
        (tau, speed), best = max(rates, key=lambda each: each[0][1])
        found.append({"engine": engine, "rule": rule, "draft_tokens": best, "tau": tau, "speedup": speed / alone})
    return found


def with_commands(engines: Sequence[dict[str, Any]], kind: str, target: str, draft: str) -> list[dict[str, Any]]:
    """The same with the command that serves the pair, and those that first write what it reads (`exports`)."""
    rows = []
    for row in engines:
        exports, command = SERVING[row["engine"]][kind].commands(kind, target, draft, row["draft_tokens"])
        rows.append({**row, "exports": exports, "command": command})
    return rows
