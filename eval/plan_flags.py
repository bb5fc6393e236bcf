"""How to serve a planned pair elsewhere: the draft length that is best under each engine's own rule, and its flags.

Engines differ in the rule by which a drafted token is accepted, and so in the best length for one pair. What is
compared is the joint acceptance under that rule over this machine's costs of a step; on another machine the length
should be planned again. Rules and flags: of the engines' sources and documentation, November 2026.
"""

from collections.abc import Callable, Sequence
from typing import Any

# Engine: (rule above temperature 0, as a verifier here; what the rule is in words; how the length is given).
# At temperature 0 all of them accept what the target would have chosen.
_GREEDY_DRAFT = ("naive", "the draft takes its most probable token, the target samples")
_SPECULATIVE = ("speculative", "the draft samples, accepted with min(1, p/q)")
ENGINES: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
    "vllm": (
        _GREEDY_DRAFT,
        {
            "draft": 'vllm serve {target} --speculative-config \'{{"method": "draft_model", "model": "{draft}", '
            '"num_speculative_tokens": {n}}}\'',
            "eagle": 'vllm serve {target} --speculative-config \'{{"method": "eagle", "model": "{draft}", '
            '"num_speculative_tokens": {n}}}\'',
            "eagle3": 'vllm serve {target} --speculative-config \'{{"method": "eagle3", "model": "{draft}", '
            '"num_speculative_tokens": {n}}}\'',
        },
    ),
    "sglang": (
        _GREEDY_DRAFT,
        {
            kind: "python -m sglang.launch_server --model-path {target} --speculative-algorithm "
            + algorithm
            + " --speculative-draft-model-path {draft} --speculative-num-steps {n} --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens {n_and_root}"
            for kind, algorithm in (("draft", "STANDALONE"), ("eagle", "EAGLE"), ("eagle3", "EAGLE3"))
        },
    ),
    "llama.cpp": (
        _GREEDY_DRAFT,
        {"draft": "llama-server -m {target}.gguf -md {draft}.gguf --spec-type draft-simple --spec-draft-n-max {n}"},
    ),
    "transformers": (
        _SPECULATIVE,
        {
            "draft": "draft.generation_config.update(num_assistant_tokens={n}, "
            'num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0); '
            "target.generate(..., assistant_model=draft)"
        },
    ),
}


def engine_flags(
    kind: str, rate: Callable[[str, int], tuple[float, float]], alone: float, longest: int
) -> list[dict[str, Any]]:
    """By engine that loads such a draft: the best length, tau there, and the command. `rate(verifier, n)` gives tau and
    tokens per second of a chain of n, `alone` the tokens per second without a draft, as predicted here.
    """
    found: list[dict[str, Any]] = []
    for engine, ((verifier, rule), commands) in ENGINES.items():
        if kind not in commands:
            continue
        rates = [(rate(verifier, n), n) for n in range(1, longest + 1)]
        (tau, speed), best = max(rates, key=lambda each: each[0][1])
        found.append(
            {
                "engine": engine,
                "rule": rule,
                "draft_tokens": best,
                "tau": tau,
                "speedup": speed / alone,
                "command": commands[kind],
            }
        )
    return found


def name_models(engines: Sequence[dict[str, Any]], target: str, draft: str) -> list[dict[str, Any]]:
    """The same with the names of the models in the commands."""
    named = []
    for row in engines:
        n = row["draft_tokens"]
        command = row["command"].format(target=target, draft=draft, n=n, n_and_root=n + 1)
        named.append({**row, "command": command})
    return named
