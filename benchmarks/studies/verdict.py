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

from draftsmith.core.io import JsonObject
from draftsmith.core.prompts import Prompt
from draftsmith.decode.method import Method
from draftsmith.eval.counts import TARGET, Tally, Where
from draftsmith.eval.decision import Decision, decide
from draftsmith.eval.figures import FIGURES, estimate, rows_as_json
from draftsmith.eval.remarks import conditions
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import Conditions
from draftsmith.eval.suites import Suite, prompt_groups

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
JUDGED = {name: FIGURES[name] for name in ("tau", "tau_predicted", "tau_needed", "speedup")}


@dataclass(frozen=True)
class Draft:
    """A draft's mean tokens per target call, and the cost of its step in steps of the target."""

    tau: float
    cost: float


@dataclass(frozen=True)
class Counted:
    """The counts of an evaluation, and how quiet the machine was."""

    tally: Tally
    conditions: list[Conditions]


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


def counted(
    suites: Sequence[Suite], drafts: dict[str, Draft], repeats: int, clock: Clock, seed: int
) -> Counted:
    """Draw the counts and seconds of every draft on every set."""
    rng = np.random.default_rng([seed, 1])
    groups = prompt_groups(suites)
    tally = Tally()
    found_conditions = []
    for suite in suites:
        prompts = len(suite.prompts)
        apart = prompts // repeats
        step_P = STEP_S * rng.lognormal(0.0, 0.03, apart).repeat(repeats)
        answers = [TOKENS * step_P]
        calls = [np.full(prompts, TOKENS)]
        predicted = [np.full(prompts, TOKENS)]
        for draft in drafts.values():
            # The share of tokens that cost no call differs from prompt to prompt; its mean is kept.
            saved_P = (1 - 1 / draft.tau) * rng.lognormal(-(SPREAD**2) / 2, SPREAD, apart)
            saved_P = np.minimum(saved_P, 0.95)
            counted_P = TOKENS - rng.binomial(TOKENS, saved_P)
            counted_P = np.maximum(counted_P, 1).repeat(repeats)
            calls.append(counted_P)
            answers.append(counted_P * draft.cost * step_P)
            predicted.append(TOKENS * (1 - saved_P).repeat(repeats))
        timed_PC = seconds(np.stack(answers, 1), clock, rng)
        for index, name in enumerate([TARGET, *drafts]):
            how = (METHOD.tree, METHOD.verifier) if index else (None, None)
            where = Where(name, 1, suite.name, suite.kind, 1.0, *how)
            counts = {
                "timed_tokens": np.full(prompts, TOKENS),
                "timed_calls": calls[index],
                "decode_s": timed_PC[:, index],
            }
            if index:
                counts |= {key: np.full(prompts, TOKENS) for key in ("emitted", "expected_tokens")}
                counts |= {"calls": calls[index], "expected_calls": predicted[index]}
            for key, values in counts.items():
                tally.append(where, key, groups[suite.name], values)
        load = [0.5, 0.5] if clock == "quiet" else [5.0, 5.0]
        rates = (timed_PC[:, 0] / TOKENS).tolist()
        found_conditions.append(conditions(suite.name, 1.0, load, rates, CPUS))
    return Counted(tally, found_conditions)


def decided(
    kind: Kind, clock: Clock, prompts: int, repeats: int, seed: int, bootstrap: int
) -> Decision:
    """The decision on one simulated evaluation."""
    rng = np.random.default_rng(seed)
    suites = [suite_of(name, prompts, repeats, rng) for name in ("prose", "code")]
    drafts = {"base": Draft(1.4, 1.75), "mine": draft_of(kind, rng)}
    if kind == "hopeless":
        drafts["base"] = Draft(1.0, 1.5)
    measured = counted(suites, drafts, repeats, clock, seed)
    table = measured.tally.table()
    rows = estimate(table, JUDGED, base="base", resamples=bootstrap, seed=seed)
    document: JsonObject = {
        "base": "base",
        "drafts": list(drafts),
        "models": {name: {} for name in drafts},
        "temperatures": [1.0],
        "methods": [METHOD.facts | {"lossless": True}],
        "suites": [{"name": suite.name, "kind": suite.kind} for suite in suites],
        "rows": rows_as_json(rows),
        "conditions": measured.conditions,
    }
    return decide(ResultsTable(document, Path()))


@dataclass
class Tallied:
    """Verdicts on drafts of each kind."""

    verdicts: dict[Kind, Counter[str]]

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
        f"{share(row['gain'], 'reject'):.1%}",
        f"{share(row['hopeless'], 'reject'):.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def tally(
    clock: Clock, repeats: int, runs: int, sizes: Sequence[int] = SIZES, bootstrap: int = 300
) -> Tallied:
    """Decide on `runs` drafts of each kind, of the sizes in turn."""
    found = Tallied({kind: Counter() for kind in KINDS})
    for kind in KINDS:
        for index in range(runs):
            prompts = sizes[index % len(sizes)]
            decision = decided(kind, clock, prompts, repeats, 1000 * index + repeats, bootstrap)
            found.verdicts[kind][decision.verdict] += 1
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
