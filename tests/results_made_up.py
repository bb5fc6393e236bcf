"""Results of evaluations that never ran, for tests of what is made of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.core.prompts import Prompt
from draftsmith.eval.diagnosis.root_step import RootMeasurement, RootStep
from draftsmith.eval.method import Method
from draftsmith.eval.pooled_runs import with_pooled_runs
from draftsmith.eval.results import Results
from draftsmith.eval.rows import Measured, Setting, assemble
from draftsmith.eval.schema import ModelRow, ResultsDocument, SuiteKind, Training
from draftsmith.eval.seeds import draft_of
from draftsmith.eval.suites import Suite


def model_row(name: str) -> ModelRow:
    return ModelRow(
        name=name,
        kind="draft",
        fingerprint="0123456789abcdef",
        model_type="llama",
        parameters=1000,
        memory_bytes=4_120_000,
        vocabulary=17,
        context=64,
        dtype="float32",
        quantize="none",
        device="cpu",
        training=Training(objective="ce", response_tokens=9000, epochs=2.0, steps=40, best_step=30)
        if name != "target"
        else None,
    )


def made_up(
    gains: dict[str, dict[SuiteKind, float]],
    suites: dict[str, SuiteKind],
    *,
    prompts: int = 24,
    same: int | None = None,
    gap: float | None = None,
    offered: bool = True,
    trees: Sequence[str] = ("chain:2",),
    verifiers: Sequence[str] = ("speculative",),
    timed: bool = True,
    copies: int = 1,
) -> ResultsDocument:
    """Results of drafts whose acceptance is a level of 0.5 plus their gain; the first draft is the
    base. copies: how often each prompt stands in its set, with equal measurements.
    """
    rng = np.random.default_rng(0)
    methods = [Method.of(tree, verifier) for tree in trees for verifier in verifiers]
    sets = [
        Suite(
            name,
            kind,
            f"{name}.jsonl",
            tuple(Prompt(f"p{i}", name, (3, i // copies)) for i in range(prompts)),
            (),
            prompts,
        )
        for name, kind in suites.items()
    ]
    measured = Measured({}, {}, {}, {})
    for suite in sets:
        level = rng.uniform(0.45, 0.55, size=prompts // copies).repeat(copies)
        for temperature in (0.0, 1.0):
            at = (suite.name, temperature)
            measured.baselines[at] = {
                "output_ids": [[5] * 20] * prompts,
                "finish_reason": ["length"] * prompts,
            }
            emitted = {"emitted": [20] * prompts, "prefill_s": [0.1] * prompts}
            alone = {
                "target_calls": [20] * prompts,
                "decode_s": [2.0] * prompts,
            }
            runs: list[Any] = [{"draft": None, "tree": None, "verifier": None, **alone, **emitted}]
            for draft, gain in gains.items():
                noise = rng.normal(0, 0.01, size=prompts // copies).repeat(copies)
                rate = level + gain[suite.kind] + noise
                roots = {
                    step.name: RootMeasurement(
                        bound=list(rate * 8), reached=list(rate * 7), count=[8] * prompts
                    )
                    for method in methods
                    if temperature and (step := RootStep.of(method)) is not None
                }
                measured.alphas[(*at, draft)] = {
                    "sum": list(rate * 20),
                    "greedy": list(rate * 19),
                    "match": list(rate * 12),
                    "missing": [0.0] * prompts,
                    "count": [20] * prompts,
                    "roots": roots,
                    "predicted": {},
                    "diagnosis": None,
                }
                calls = [max(7, round(20 / (1 + r + r * r))) for r in rate]
                first = [min(20 - c, c) if offered else 0 for c in calls]
                for method in methods:
                    measured.decodings[(*at, draft, method)] = {
                        "target_calls": calls,
                        "emitted": [20] * prompts,
                        "proposed": [2 * c for c in calls],
                        "accepted": [20 - c for c in calls],
                        "depth_sum": [2 * c for c in calls],
                        "accepted_by_depth": [[f, 0] for f in first],
                        "reached_by_depth": [
                            [c, f] if offered else [0, 0] for c, f in zip(calls, first, strict=True)
                        ],
                        "identical": (
                            {
                                "same": prompts if same is None else same,
                                "of": prompts,
                                "largest_gap": gap,
                            }
                            if temperature == 0
                            else None
                        ),
                    }
                    cell = {"draft": draft, "tree": method.tree, "verifier": method.verifier}
                    timed_calls = {"target_calls": calls, "decode_s": [0.15 * c for c in calls]}
                    runs.append({**cell, **timed_calls, **emitted})
            if timed:
                ids = [prompt.id for prompt in suite.prompts]
                measured.speeds[at] = {
                    "prompt_ids": ids,
                    "runs": runs,
                    "load": [0.5, 0.6],
                }
    setting = Setting(
        suites=sets,
        base=draft_of(next(iter(gains))),
        temperatures=[0.0, 1.0],
        methods=dict.fromkeys(gains, methods),
        bootstrap=300,
        seed=0,
    )
    return assemble(
        *with_pooled_runs(setting, measured),
        config={
            "seed": 0,
            "bootstrap": 300,
            "max_new_tokens": 20,
            "batch_size": 8,
            "top_k": 0,
            "top_p": 1.0,
        },
        models={"target": model_row("t"), **{draft: model_row(draft) for draft in gains}},
        provenance={"command": "draftsmith eval", "versions": {"python": "3"}, "git_commit": None},
        clock={
            "started": "then",
            "finished": "now",
            "cells_measured": 1,
            "cells_reused": 0,
            "peak_memory_bytes": 1_234_000_000,
            "machine": {"cpu": "a cpu", "cpus": 2, "gpu": None, "threads": 1},
        },
    )


def view(*args: Any, **options: Any) -> Results:
    """Results of `made_up` as they are read."""
    return Results(made_up(*args, **options), Path())


# Figures by the clock: these rows, `counts` of speed, `conditions` and `clock` differ between two
# equal runs.
CLOCK = (
    "tokens_per_s",
    "latency_s_per_token",
    "speedup",
    "tau_needed",
    "tokens",
    "prefill_s",
    "decode_s",
    "speedup_with_prompt",
)
BASE: dict[SuiteKind, float] = {"id": 0.0, "ood": 0.0}
BOTH: dict[str, SuiteKind] = {"prose": "id", "code": "ood"}


def timeless(document: Any) -> dict[str, Any]:
    """A results document without what two equal runs may differ in: the clock, and remarks on
    it.
    """
    kept = {
        key: value
        for key, value in document.items()
        if key not in ("clock", "conditions", "remarks")
    }
    kept["rows"] = [row for row in document["rows"] if row["figure"] not in CLOCK]
    return {**kept, "counts": [each for each in document["counts"] if each["of"] != "speed"]}
