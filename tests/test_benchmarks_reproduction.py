"""The reproduction's judgements: which side of a border a claim is on, what was not tested, and the page's table."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reproduction
from benchmarks.reproduction import UNCHANGED, Measured
from benchmarks.reproduction_pairs import Pair, unchanged
from tests.results_made_up import BASE, BOTH, view


@pytest.mark.parametrize(
    ("low", "high", "border", "above", "agrees"),
    [
        (0.1, 0.3, 0.0, True, True),
        (-0.3, -0.1, 0.0, True, False),
        (-0.1, 0.1, 0.0, True, None),
        (0.0, 0.0, 0.0, True, None),
        (0.01, 0.04, 0.05, False, True),
        (0.06, 0.09, 0.05, False, False),
        (None, None, 0.0, True, None),
    ],
)
def test_a_claim_is_judged_on_its_interval(
    low: float | None, high: float | None, border: float, above: bool, agrees: bool | None
) -> None:
    found = {"value": 0.0, "low": low, "high": high}
    assert reproduction._side(found, border, above=above)["agrees"] is agrees


@pytest.mark.parametrize("best_step", [0, 20])
def test_what_training_did_not_change_is_no_test(best_step: int, tmp_path: Path) -> None:
    (tmp_path / "draftsmith.json").write_text(json.dumps({"best_step": best_step}))
    assert unchanged(str(tmp_path)) == (best_step == 0)
    gained = {"base": BASE, "aligned": {"id": 0.2, "ood": 0.1}}
    results = view(gained, BOTH)
    names: dict[str, Any] = dict.fromkeys(("target", "base", "larger", "sizes"), "") | {"judge": "base", "alike": False}
    here = str(tmp_path)
    pair = Pair(name="tiny", tuned=here, aligned=here, id={"prose": ""}, other={"code": ""}, **names)
    tuned = view({"base": {"id": -0.3, "ood": 0.0}, "x": BASE}, {"code": "id"})
    measured = Measured(pair, results, results, results, results, tuned)
    (transfer,) = reproduction.out_of_distribution(measured)
    (lowered,) = reproduction.tuned_target(measured)
    assert transfer.value == pytest.approx(0.5, abs=0.1) and lowered.pair == "tiny"
    for row in (transfer, lowered):
        assert row.measured.endswith(UNCHANGED) == (best_step == 0)
        assert (row.agrees is None) == (best_step == 0)
