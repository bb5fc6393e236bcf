"""Simulate evaluations of drafts whose speed is known, and count what the decision says of them.

The real rows, groups, intervals and decision judge made-up counts and seconds:

    python benchmarks/studies/verdict.py --out verdict.json

A null is as fast as the target alone, a gain is 1.02 to 1.3 times as fast, a hopeless draft has
1.00 to 1.03 tokens per target call and needs 1.12 to 1.5. Beside each stands a base draft at .8,
beside a hopeless one its start. Two sets of 4 to 60 prompts each are timed, prompt by prompt, the
drafts in rotating order. With near repeats, half as many differ: each stands twice, with another
token in its middle, and is accepted alike. Clocks: `quiet` varies by 3 % from answer to answer,
`noise` by 30 %, `drift` also halves or doubles the speed in the course of a set, and in `bursts`
runs of answers take 2 to 4 times as long.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.prompts import Prompt
from draftsmith.eval.decision import Decision, decide
from draftsmith.eval.decoding import SpeedRun
from draftsmith.eval.method import Method
from draftsmith.eval.predict import PredictedCounts
from draftsmith.eval.reading import AlphaMeasurement
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.rows import (
    Measured,
    Setting,
    counts,
    decoding_rows,
    prediction_rows,
    speed_rows,
    suite_rows,
    timing_conditions,
)
from draftsmith.eval.schema import ModelRow
from draftsmith.eval.suites import Suite

Floats = NDArray[np.float64]
Kind = Literal["null", "gain", "hopeless"]
Clock = Literal["quiet", "noise", "drift", "bursts"]
KINDS: tuple[Kind, ...] = ("null", "gain", "hopeless")
CLOCKS: tuple[Clock, ...] = ("quiet", "noise", "drift", "bursts")
SIZES = (4, 8, 16, 60)
TOKENS = 64
STEP_S = 0.04
# How much of what is saved differs from prompt to prompt.
SPREAD = 0.3
METHOD = Method.of("chain:2", "speculative")
CPUS = 2
SHIPPED = ("ship", "ship_for")


@dataclass(frozen=True)
class Draft:
    """A draft's mean tokens per target call, and the cost of its step in steps of the target."""

    tau: float
    cost: float


def draft_of(kind: Kind, rng: np.random.Generator) -> Draft:
    """Draw a draft of a kind."""
    if kind == "hopeless":
        return Draft(rng.uniform(1.0, 1.03), rng.uniform(1.12, 1.5))
    tau = rng.uniform(1.2, 2.2)
    return Draft(tau, tau / (1.0 if kind == "null" else rng.uniform(1.02, 1.3)))


def seconds(answers_PC: Floats, clock: Clock, rng: np.random.Generator) -> Floats:
    """Take true seconds of prompts and contenders, timed in rotating order, by a clock."""
    prompts, contenders = answers_PC.shape
    order = []
    for index in range(prompts):
        turn = index % contenders
        for which in [*range(turn, contenders), *range(turn)]:
            order.append((index, which))
    count = len(order)
    slower = rng.lognormal(0.0, 0.03 if clock == "quiet" else 0.3, count)
    if clock == "drift":
        slower *= np.linspace(1.0, 2.0, count) ** rng.choice([-1.0, 1.0])
    if clock == "bursts":
        for start in np.flatnonzero(rng.random(count) < 0.08):
            slower[start : start + rng.integers(1, 6)] *= rng.uniform(2.0, 4.0)
    timed_PC = answers_PC.copy()
    for factor, place in zip(slower, order, strict=True):
        timed_PC[place] *= factor
    return timed_PC


def suite_of(name: str, prompts: int, repeats: int, rng: np.random.Generator) -> Suite:
    """Make prompts of which every `repeats` in a row are nearly the same."""
    made = []
    for index in range(prompts):
        if index % repeats == 0:
            ids = rng.integers(0, 30_000, 40)
        ids[20] = index
        made.append(Prompt(f"{name}{index}", name, (*ids.tolist(),)))
    return Suite(name, "ood" if name == "code" else "id", name, tuple(made), (), len(made))


def measured_of(
    suites: Sequence[Suite], drafts: dict[str, Draft], repeats: int, clock: Clock, seed: int
) -> Measured:
    """Draw the counts and seconds of every draft on every set."""
    rng = np.random.default_rng([seed, 1])
    measured = Measured({}, {}, {}, {})
    for suite in suites:
        prompts = len(suite.prompts)
        at = (suite.name, 1.0)
        apart = prompts // repeats
        step_P = STEP_S * rng.lognormal(0.0, 0.03, apart).repeat(repeats)
        answers = [TOKENS * step_P]
        calls = [np.full(prompts, TOKENS)]
        for name, draft in drafts.items():
            # The share of tokens that cost no call differs from prompt to prompt; its mean is kept.
            saved_P = (1 - 1 / draft.tau) * rng.lognormal(-(SPREAD**2) / 2, SPREAD, apart)
            saved_P = np.minimum(saved_P, 0.95)
            counted_P = TOKENS - rng.binomial(TOKENS, saved_P)
            tau_P = (1 / (1 - saved_P)).repeat(repeats)
            counted_P = np.maximum(counted_P, 1).repeat(repeats)
            calls.append(counted_P)
            answers.append(counted_P * draft.cost * step_P)
            measured.alphas[(*at, name)] = alpha_of(tau_P)
            zeros: list[list[int]] = [[] for _ in range(prompts)]
            measured.decodings[(*at, name, METHOD)] = {
                "target_calls": counted_P.tolist(),
                "emitted": [TOKENS] * prompts,
                "proposed": (2 * counted_P).tolist(),
                "accepted": (TOKENS - counted_P).tolist(),
                "depth_sum": (2 * counted_P).tolist(),
                "accepted_by_depth": zeros,
                "reached_by_depth": zeros,
                "identical": None,
            }
        measured.baselines[at] = {
            "output_ids": [[0] * TOKENS] * prompts,
            "finish_reason": ["length"] * prompts,
        }
        timed_PC = seconds(np.stack(answers, 1), clock, rng)
        runs = []
        for index, drafted in enumerate([None, *drafts]):
            run = SpeedRun(
                draft=drafted,
                tree=METHOD.tree if drafted else None,
                verifier=METHOD.verifier if drafted else None,
                emitted=[TOKENS] * prompts,
                target_calls=calls[index].tolist(),
                prefill_s=[STEP_S] * prompts,
                decode_s=timed_PC[:, index].tolist(),
            )
            runs.append(run)
        measured.speeds[at] = {
            "prompt_ids": [prompt.id for prompt in suite.prompts],
            "runs": runs,
            "load": [0.5, 0.5] if clock == "quiet" else [5.0, 5.0],
        }
    return measured


def alpha_of(tau_P: Floats) -> AlphaMeasurement:
    """What reading the target's own text says of a draft: its expected calls."""
    alpha_P = np.minimum((tau_P - 1) / tau_P, 1.0)
    nothing = [0.0] * len(tau_P)
    predicted: dict[str, PredictedCounts] = {
        METHOD.name: {
            "target_calls": (TOKENS / tau_P).tolist(),
            "variance": (TOKENS * alpha_P * (1 - alpha_P)).tolist(),
            "accepted_by_depth": [[] for _ in tau_P],
            "reached_by_depth": [[] for _ in tau_P],
        }
    }
    return {
        "sum": (TOKENS * alpha_P).tolist(),
        "greedy": nothing,
        "match": nothing,
        "missing": nothing,
        "count": [TOKENS] * len(tau_P),
        "roots": {},
        "predicted": predicted,
        "diagnosis": None,
    }


def model_row(name: str) -> ModelRow:
    """A model whose size differs from the others', so that only speed tells them apart."""
    return ModelRow(
        name=name,
        kind="draft",
        fingerprint=name,
        model_type="llama",
        parameters=1,
        memory_bytes=len(name),
        vocabulary=30_000,
        context=None,
        dtype="float32",
        quantize="none",
        device="cpu",
        training=None,
    )


def decided(
    kind: Kind, clock: Clock, prompts: int, repeats: int, seed: int, bootstrap: int
) -> Decision:
    """The decision on one simulated evaluation."""
    rng = np.random.default_rng(seed)
    suites = [suite_of(name, prompts, repeats, rng) for name in ("prose", "code")]
    drafts = {"base": Draft(1.4, 1.75), "mine": draft_of(kind, rng)}
    if kind == "hopeless":
        drafts["base"] = Draft(1.0, 1.5)
    measured = measured_of(suites, drafts, repeats, clock, seed)
    setting = Setting(suites, "base", [1.0], dict.fromkeys(drafts, [METHOD]), bootstrap, seed)
    tables = (decoding_rows, prediction_rows, speed_rows)
    document: Any = {
        "base": "base",
        "drafts": list(drafts),
        "temperatures": [1.0],
        "config": {"seed": seed, "bootstrap": bootstrap},
        "methods": [METHOD.facts | {"lossless": True}],
        "models": {name: model_row(name) for name in drafts},
        "suites": list(suite_rows(setting)),
        "rows": [row for make in tables for row in make(setting, measured)],
        "counts": list(counts(setting, measured)),
        "conditions": timing_conditions(measured, CPUS),
    }
    return decide(ResultsTable(document, Path()))


def spans_1(decision: Decision) -> bool:
    """Whether the chosen setting's interval spans 1 in some cell."""
    ends = [(cell.speedup["low"], cell.speedup["high"]) for cell in decision.cells]
    return any(low is None or high is None or low <= 1 <= high for low, high in ends)


@dataclass
class Tally:
    """Verdicts on drafts of each kind, and how often "cannot tell" had an interval beside 1."""

    verdicts: dict[Kind, Counter[str]]
    beside_1: int = 0

    def share(self, kind: Kind, *verdicts: str) -> float:
        """The share of drafts of a kind that had one of these verdicts."""
        return share(self.verdicts[kind], *verdicts)


def share(found: Mapping[str, int], *verdicts: str) -> float:
    """The share of these verdicts."""
    return sum(found.get(verdict, 0) for verdict in verdicts) / sum(found.values())


def line(row: Mapping[str, Any]) -> str:
    """A row of the study as the table of docs/decision.md has it."""
    cells = [
        row["clock"],
        "nearly twice" if row["repeats"] > 1 else "once",
        f"{share(row['null'], *SHIPPED):.1%}",
        f"{share(row['gain'], *SHIPPED):.0%}",
        f"{share(row['gain'], 'rejected'):.1%}",
        f"{share(row['hopeless'], 'rejected'):.1%}",
        str(row["beside_1"]),
    ]
    return f"| {' | '.join(cells)} |"


def tally(
    clock: Clock, repeats: int, runs: int, sizes: Sequence[int] = SIZES, bootstrap: int = 300
) -> Tally:
    """Decide on `runs` drafts of each kind, of the sizes in turn."""
    found = Tally({kind: Counter() for kind in KINDS})
    for kind in KINDS:
        for index in range(runs):
            prompts = sizes[index % len(sizes)]
            decision = decided(kind, clock, prompts, repeats, 1000 * index + repeats, bootstrap)
            found.verdicts[kind][decision.verdict] += 1
            found.beside_1 += decision.verdict == "busy" and not spans_1(decision)
    return found


def study(runs: int) -> list[dict[str, object]]:
    """Count verdicts by clock and repeats, over `runs` drafts of each kind."""
    rows: list[dict[str, object]] = []
    for clock in CLOCKS:
        for repeats in (1, 2):
            found = tally(clock, repeats, runs)
            row: dict[str, object] = {"clock": clock, "repeats": repeats}
            for kind, verdicts in found.verdicts.items():
                row[kind] = verdicts
            row["beside_1"] = found.beside_1
            rows.append(row)
            sys.stdout.write(f"{line(row)}\n")
            sys.stdout.flush()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(study(options.runs), indent=1) + "\n")
