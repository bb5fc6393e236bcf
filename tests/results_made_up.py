"""Results of evaluations that never ran, for tests of what is made of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.core.io import JsonObject, read_tree_file
from draftsmith.core.prompts import Prompt
from draftsmith.decode.method import Method
from draftsmith.eval.counts import Tally, Where, at_depths, decoded, packed, unpacked
from draftsmith.eval.figures import definitions, estimate, rows_as_json
from draftsmith.eval.remarks import conditions
from draftsmith.eval.request import draft_and_seed
from draftsmith.eval.results import SCHEMA_VERSION, Results
from draftsmith.eval.schema import ModelRow, SuiteKind, Training
from draftsmith.eval.suites import Suite, suite_rows


def model_row(name: str) -> ModelRow:
    return ModelRow(
        name=name,
        kind="draft",
        fingerprint="0123456789abcdef",
        model_type="llama",
        parameters=1000,
        memory_bytes=4_120_000,
        vocabulary=17,
        dtype="float32",
        quantize="none",
        device="cpu",
        training=Training(objective="ce", response_tokens=9000, steps=40)
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
) -> JsonObject:
    """Results of drafts whose acceptance is a level of 0.5 plus their gain; the first draft is the
    base. copies: how often each prompt stands in its set, with equal measurements.
    """
    rng = np.random.default_rng(0)
    methods = [
        Method.of(tree, verifier, read_tree_file) for tree in trees for verifier in verifiers
    ]
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
    groups = {
        suite.name: [i // copies + 1000 * n for i in range(prompts)] for n, suite in enumerate(sets)
    }
    tally = Tally()
    for suite in sets:
        level = rng.uniform(0.45, 0.55, size=prompts // copies).repeat(copies)
        for temperature in (0.0, 1.0):

            def append(run: str, counts: dict[str, Any], method: Method | None = None) -> None:
                draft, seed = draft_and_seed(run)
                where = Where(draft, seed, suite.name, suite.kind, temperature)  # noqa: B023
                rows = [decoded(method, key, list(values)) for key, values in counts.items()]
                tally.extend(where, groups[suite.name], rows)  # noqa: B023

            def by_depth(run: str, key: str, rows: list[list[int]], method: Method) -> None:
                draft, seed = draft_and_seed(run)
                where = Where(draft, seed, suite.name, suite.kind, temperature)  # noqa: B023
                tally.extend(where, groups[suite.name], at_depths(method, key, rows))  # noqa: B023

            whole = [20] * prompts
            append("target", {"tokens": whole, "stopped": [0] * prompts})
            if timed:
                seconds = {"decode_s": [2.0] * prompts, "whole_s": [2.1] * prompts}
                append("target", {"timed_tokens": whole, "timed_calls": whole, **seconds})
            for draft, gain in gains.items():
                noise = rng.normal(0, 0.01, size=prompts // copies).repeat(copies)
                rate = level + gain[suite.kind] + noise
                alphas = {"alpha": rate * 20, "greedy": rate * 19, "match": rate * 12}
                append(draft, {**alphas, "missing": [0.0] * prompts, "positions": whole})
                calls = [max(7, round(20 / (1 + r + r * r))) for r in rate]
                first = [min(20 - c, c) if offered else 0 for c in calls]
                reached = [[c, f] if offered else [0, 0] for c, f in zip(calls, first, strict=True)]
                for method in methods:
                    decoding = {
                        "calls": calls,
                        "emitted": whole,
                        "proposed": [2 * c for c in calls],
                        "accepted": [20 - c for c in calls],
                        "offered_depth": [2 * c for c in calls],
                    }
                    if not temperature:
                        equal = prompts if same is None else same
                        decoding["outputs"] = [1] * prompts
                        decoding["identical"] = [int(i < equal) for i in range(prompts)]
                        decoding["gap"] = [gap or 0.0] * prompts
                    append(draft, decoding, method)
                    by_depth(draft, "accepted_here", [[f, 0] for f in first], method)
                    by_depth(draft, "reached", reached, method)
                    if timed:
                        seconds = {
                            "decode_s": [0.15 * c for c in calls],
                            "whole_s": [0.15 * c + 0.1 for c in calls],
                        }
                        clock = {"timed_tokens": whole, "timed_calls": calls, **seconds}
                        append(draft, clock, method)
    table = tally.table()
    names = [name for name in gains if draft_and_seed(name)[1] == 1]
    most = {method.tree: method.most_tokens for method in methods}
    rows = estimate(table, base=names[0], resamples=300, most_tokens=most)
    times = [(suite.name, temperature) for suite in sets for temperature in (0.0, 1.0)]
    quiet = [conditions(*at, [0.5, 0.6], [0.1] * prompts, 2) for at in times if timed]
    return {
        "schema_version": SCHEMA_VERSION,
        "definitions": definitions(),
        "remarks": [],
        "config": {
            "seed": 0,
            "bootstrap": 300,
            "max_new_tokens": 20,
            "batch_size": 8,
            "top_k": 0,
            "top_p": 1.0,
        },
        "base": names[0],
        "drafts": names,
        "temperatures": [0.0, 1.0],
        "methods": [{**method.facts, "lossless": method.lossless} for method in methods],
        "models": {"target": model_row("t"), **{draft: model_row(draft) for draft in gains}},
        "suites": suite_rows(sets, groups),
        "rows": rows_as_json(rows),
        "counts": packed(table),
        "conditions": quiet,
        "provenance": {
            "command": "draftsmith eval",
            "versions": {"python": "3"},
            "git_commit": None,
        },
        "clock": {
            "started": "then",
            "finished": "now",
            "cells_measured": 1,
            "cells_reused": 0,
            "peak_memory_bytes": 1_234_000_000,
            "machine": {"cpu": "a cpu", "cpus": 2, "gpu": None, "threads": 1},
        },
    }


def view(*args: Any, **options: Any) -> Results:
    """Results of `made_up` as they are read."""
    return Results(made_up(*args, **options), Path())


# Figures and counts by the clock: these, `conditions` and `clock` differ between two equal runs.
CLOCK = ("tokens_per_s", "latency_s_per_token", "speedup", "tau_needed", "speedup_with_prompt")
CLOCK_COUNTS = ("timed_tokens", "timed_calls", "decode_s", "whole_s")
BASE: dict[SuiteKind, float] = {"id": 0.0, "ood": 0.0}
BOTH: dict[str, SuiteKind] = {"prose": "id", "code": "ood"}


def timeless(document: Any) -> dict[str, Any]:
    """A results document without what two equal runs may differ in: the clock, and remarks on
    it.
    """
    differ = ("clock", "conditions", "remarks", "counts")
    kept = {key: value for key, value in document.items() if key not in differ}
    kept["rows"] = [row for row in document["rows"] if row["figure"] not in CLOCK]
    counts = unpacked(document["counts"])
    counts = counts[~counts["key"].isin(CLOCK_COUNTS)]
    return {**kept, "counts": counts.to_csv()}
