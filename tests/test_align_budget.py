"""What `align` says of its budget before it begins: kept runs that are near, and nothing else."""

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.alignment.budget import Budget, StepCost, budget_lines, step_costs
from draftsmith.alignment.kept_runs import KEPT
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.load import LoadedModels
from tests.tiny_models import stirred_head, tiny_llama

ROOT = Path(__file__).parents[1]
# EAGLE-1: kept runs of 39 to 624 steps.
EAGLE = KEPT[0]
BUDGET = Budget(
    kind="eagle",
    optimizer="adamw",
    fresh=True,
    parameters=EAGLE.parameters,
    target_parameters=EAGLE.target_parameters,
    rows="chat",
    temperature=1.0,
    steps=110,
    answers_per_step=4,
    passes=3.0,
)


def costs(warm: float) -> list[StepCost]:
    """Of a step that is a little cheaper at temperature 0."""
    return [StepCost(0.0, 0.01, warm - 0.1), StepCost(1.0, 0.01, warm)]


@pytest.mark.parametrize("series", KEPT, ids=lambda series: f"{series.kind} {series.optimizer}")
def test_what_is_kept_is_in_the_results(series):
    assert (ROOT / series.page).is_file()
    assert [run.steps for run in series.runs] == sorted(run.steps for run in series.runs)
    for run in series.runs:
        file = ROOT / "docs" / "results" / f"{run.file}.json.xz"
        document = json.loads(lzma.decompress(file.read_bytes()))
        assert document["models"]["target"]["parameters"] == series.target_parameters
        model = document["models"][run.draft]
        assert (model["kind"], model["parameters"]) == (series.kind, series.parameters)
        assert model["training"]["steps"] == run.steps
        rows = [
            row
            for row in document["rows"]
            if (row["draft"], row["domain"], row["temperature"]) == (run.draft, "id", 1.0)
        ]
        (alpha,) = (row for row in rows if row["figure"] == "alpha")
        assert (run.alpha_low, run.alpha_high) == pytest.approx(
            (alpha["low"], alpha["high"]), abs=6e-4
        )
        (tau,) = (
            row
            for row in rows
            if (row["figure"], row["tree"], row["verifier"])
            == ("tau_predicted", "chain:2", "speculative")
        )
        assert run.tau == pytest.approx(tau["value"], abs=6e-4)


def test_a_near_budget_is_between_the_runs_beside_it():
    (line,) = budget_lines(BUDGET, [])
    low, high = (float(line.split("alpha of ")[1].split()[place]) for place in (0, 2))
    assert EAGLE.runs[1].alpha_low < low < EAGLE.runs[2].alpha_low
    assert EAGLE.runs[1].alpha_high < high < EAGLE.runs[2].alpha_high
    assert "110 steps of 4 answers" in line and EAGLE.page in line and "adamw" in line
    (exact,) = budget_lines(replace(BUDGET, steps=156), [])
    assert "0.19 to 0.22" in exact


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "medusa"},
        {"fresh": False},
        {"parameters": 2 * EAGLE.parameters},
        {"target_parameters": 10 * EAGLE.target_parameters},
        {"rows": "text"},
        {"temperature": 0.0},
        {"answers_per_step": 32},
        {"passes": 20.0},
        {"steps": 2000},
    ],
)
def test_nothing_is_said_where_no_kept_run_is_near(changed):
    budget = replace(BUDGET, **changed)
    assert budget_lines(budget, []) == []
    assert budget_lines(budget, costs(1.5)) == [
        "pays: from 1.40 tokens per call at T = 0, 1.50 at T = 1, on chain:2 here (its step was "
        "timed)"
    ]


def test_only_runs_of_the_same_optimizer_are_near():
    (line,) = budget_lines(replace(BUDGET, optimizer="muon", steps=300), [])
    assert "muon" in line and "adamw" not in line


def test_a_budget_far_below_all_kept_runs_is_told_what_those_took():
    bought, pays = budget_lines(replace(BUDGET, steps=13), costs(1.2))
    assert "at 39 steps, 3.0 times these, of 4 answers" in bought
    assert "at these steps" not in pays


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (1.1, "our runs had 1.20 at these steps"),
        (1.25, "our runs had 1.25 at about 206 steps, 1.9 times these"),
        (1.9, "no run of ours had more than 1.38, at 624 steps"),
        (3.4, "more than it can bring, so no draft pays on it"),
    ],
)
def test_how_long_a_draft_that_pays_took(cost, words):
    assert budget_lines(BUDGET, costs(cost))[1].endswith(words)


def test_a_step_of_an_untrained_draft_is_timed():
    target = tiny_llama(0, layers=3)
    models = LoadedModels("target", target, None, {})  # type: ignore[arg-type]
    costs = step_costs(models, stirred_head("eagle", target), [3, 4, 5], [0.0, 1.0])
    assert [cost.temperature for cost in costs] == [0.0, 1.0]
    assert all(cost.target_s > 0 and cost.ratio > 0 for cost in costs)
    assert step_costs(models, MedusaHeads.fresh(target, num_heads=1), [3, 4, 5], [0.0]) == []
