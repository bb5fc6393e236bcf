"""Simulated evaluations of drafts whose speed is known: what the decision says of them."""

import json
import re

import pytest

from benchmarks.lib.places import ROOT
from benchmarks.studies.verdict import SHIPPED, decided, line, tally


@pytest.mark.parametrize("clock", ["quiet", "bursts"])
@pytest.mark.parametrize("prompts", [4, 16])
def test_simulated_drafts_get_the_verdict_that_they_deserve(clock, prompts):
    hopeless = decided("hopeless", clock, prompts, 2, seed=1, bootstrap=100)
    assert hopeless.verdict == "reject"
    null = decided("null", clock, prompts, 2, seed=1, bootstrap=100)
    assert null.verdict not in SHIPPED
    gain = decided("gain", clock, prompts, 2, seed=1, bootstrap=100)
    assert gain.verdict != "reject"


def test_the_page_of_the_decision_has_the_kept_shares():
    page = (ROOT / "docs" / "decision.md").read_text(encoding="utf-8")
    study = json.loads((ROOT / "docs" / "results" / "verdict.json").read_text())
    rows = [line(row) for row in study]
    assert len(rows) == 8 and "|---|\n" + "\n".join(rows) + "\n" in page
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", page)) <= 600, "words"


@pytest.mark.slow
def test_verdicts_on_many_simulated_drafts():
    found = tally("bursts", repeats=2, runs=80, bootstrap=200)
    assert found.share("null", *SHIPPED) <= 0.04
    assert found.share("hopeless", "reject") >= 0.95
    assert found.share("gain", "reject") <= 0.03
