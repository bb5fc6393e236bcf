"""The verdict: what the timings allow to say, how often that is wrong, and in which words."""

import html
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from draftsmith.config import DecodeConfig
from draftsmith.core.command_line import parse
from draftsmith.core.errors import RequirementError
from draftsmith.drafts.cards import checkpoint_card
from draftsmith.eval.bootstrap import holm, signs
from draftsmith.eval.counts import Tally, Where
from draftsmith.eval.decision import Setting, decide
from draftsmith.eval.figures import FIGURES, estimate, rows_as_json
from draftsmith.eval.report.page import render_page
from draftsmith.eval.results import Results
from draftsmith.eval.summary import lead, lines, summary, verdict
from tests.results_made_up import BASE, BOTH, made_up, model_row, view

TREES = ("chain:2", "kary:2,1")
Speed = tuple[float, float | None, float | None]
FAST, SLOW, UNSURE = (1.4, 1.3, 1.5), (0.8, 0.7, 0.9), (1.1, 0.9, 1.3)


def timed(speeds, busy=(), ood=0.1):
    """Results on prose and code at T = 0 and 1 whose speedups are given by draft, tree, set and
    temperature; the others are half as fast. busy: sets that were timed on a busy machine.
    """
    found = made_up(
        {"base": BASE, "mine": {"id": 0.2, "ood": ood}}, BOTH, trees=TREES, verifiers=("exact",)
    )
    found["provenance"]["command"] = "draftsmith eval --out o --speed_prompts 8"
    found["config"] |= {"out": "o", "speed_prompts": 8}
    for row in found["rows"]:
        if row["figure"] in ("speedup", "speedup_with_prompt"):
            place = (row["draft"], row["tree"], row["set"], row["temperature"])
            row["value"], row["low"], row["high"] = speeds.get(place, (0.5, 0.48, 0.52))
    for condition in found["conditions"]:
        condition["busy"] = condition["domain"] in busy
    return Results(found, Path())


def everywhere(draft, tree, speed):
    return {(draft, tree, name, temperature): speed for name in BOTH for temperature in (0.0, 1.0)}


def test_a_setting_that_pays_everywhere_ships_with_its_weakest_row(golden):
    speeds = everywhere("mine", "kary:2,1", FAST)
    speeds["mine", "kary:2,1", "code", 1.0] = (1.25, 1.2, 1.3)
    results = timed(speeds)
    found = decide(results)
    assert (found.verdict, found.setting) == ("ship", Setting("mine", "kary:2,1", "exact"))
    assert found.row is not None and found.row["set"] == "code" and found.row["low"] == 1.2
    head = lead(results)
    golden(head.headline)
    golden(head.decided)
    golden(head.command)


def test_a_setting_ships_for_the_sets_on_which_it_pays(golden):
    speeds = everywhere("mine", "chain:2", FAST)
    speeds |= {("mine", "chain:2", "code", 0.0): SLOW, ("mine", "chain:2", "code", 1.0): UNSURE}
    results = timed(speeds)
    assert decide(results).verdict == "ship_for"
    golden(lead(results).headline)
    # A table and the command are of the temperature at which it pays.
    results = timed({("mine", "chain:2", name, 0.0): FAST for name in BOTH})
    head = lead(results)
    golden(head.headline)
    golden(head.command)
    golden(lines(results))


def test_the_highest_lower_bound_leads_and_a_draft_more_robust_is_named(golden):
    both = everywhere("mine", "chain:2", FAST) | everywhere("base", "chain:2", (1.6, 1.2, 2.0))
    for results in (timed(both), timed(both, ood=-0.1)):
        assert decide(results).setting == Setting("mine", "chain:2", "exact")
    assert lead(timed(both)).robust == ""
    golden(lead(results).robust)
    assert lead(results).robust in lines(results)
    # Not where the intervals of alpha overlap, nor where it is slower.
    assert lead(timed(both, ood=-0.01)).robust == ""
    slower = everywhere("mine", "chain:2", FAST) | everywhere("base", "chain:2", (1.2, 1.1, 1.25))
    assert lead(timed(slower, ood=-0.1)).robust == ""


def test_of_the_chains_that_pay_the_best_is_served_by_an_engine(golden):
    trees = everywhere("mine", "kary:2,1", FAST)
    results = timed(trees | everywhere("mine", "chain:2", (1.2, 1.1, 1.3)))
    assert not any(lead(results).serve)
    results.models["mine"]["engine"] = "vllm"
    golden(verdict(lead(results)))
    results = timed(trees)
    results.models["mine"]["engine"] = "vllm"
    assert not any(lead(results).serve)


@pytest.mark.parametrize("busy", [(), tuple(BOTH)])
def test_what_is_not_shown_is_told_neither_way(busy, golden):
    results = timed(everywhere("mine", "chain:2", UNSURE), busy=busy)
    head = lead(results)
    assert head.decision.verdict == "cannot_tell"
    golden(head.headline)
    golden(head.decided)
    if busy:
        golden(head.command)
        # The table does not pretend to two digits.
        assert " ~1.1 " in "\n".join(lines(results))
    else:
        golden(head.command)
        results.document["config"]["speed_prompts"] = 24
        golden(lead(results).command)
    too_few = timed(everywhere("mine", "chain:2", (1.3, None, None)))
    assert decide(too_few).verdict == "cannot_tell"


@pytest.mark.parametrize(("speed", "verdict"), [(FAST, "ship"), (SLOW, "reject")])
def test_an_interval_beside_1_decides_on_a_busy_machine_too(speed, verdict, golden):
    results = timed(everywhere("mine", "chain:2", speed), busy=list(BOTH))
    assert decide(results).verdict == verdict
    results.require("speedup[prose T=1 tree=chain:2] > 0.1")
    (line,) = unmet(results, "speedup[prose T=1 tree=chain:2] > 2")
    assert "cannot be told" not in line
    unsure = timed(everywhere("mine", "chain:2", UNSURE), busy=list(BOTH))
    (line,) = unmet(unsure, "speedup[prose T=1 tree=chain:2] > 1")
    golden(line)


def test_the_command_and_the_remarks_are_the_same_wherever_they_stand():
    results = timed(everywhere("mine", "chain:2", FAST), busy=["prose"])
    remark = "the machine was busy; treat speeds as rough"
    results.document["remarks"] = [{"about": "busy_machine", "text": remark}]
    results.document["config"]["compile"] = True
    how = "--device cpu --dtype bfloat16 --top_p 0.9 --quantize_draft nf4"
    results.document["provenance"]["command"] = f"draftsmith eval --seed 3 {how}"
    head = lead(results)
    assert "~1.4" in head.headline
    # It runs what was measured, and decode takes it.
    config, _ = parse(DecodeConfig, "decode", shlex.split(head.command)[2:])
    assert (config.dtype, config.device, config.top_p) == ("bfloat16", "cpu", 0.9)
    assert (config.quantize_draft, config.compile, config.tree) == ("nf4", True, "chain:2")
    shown = summary(results)
    assert shown["decision"]["command"] == head.command and shown["remarks"] == [remark]
    # As it is read and copied, without the marks of its words.
    page = html.unescape(re.sub(r"</?span>", "", render_page(results)))
    assert head.command in page and page.count(remark) == 1
    assert f"{head.todo}: {head.command}" in lines(results)
    card = checkpoint_card({"kind": "draft-lm", "target": "T"}, results.document, "mine")
    assert how in card and remark in card


def unmet(results, requirement):
    with pytest.raises(RequirementError) as caught:
        results.require(requirement)
    return str(caught.value).splitlines()


def test_drafts_that_are_all_slower_are_rejected(golden):
    head = lead(timed(everywhere("mine", "chain:2", SLOW)))
    assert head.decision.verdict == "reject"
    golden(head.headline)
    golden(head.decided)
    golden(head.command)


def short_of(results, drafts, tau, needed):
    """Give drafts these tokens per target call, and steps of that cost."""
    for row in results.document["rows"]:
        if row["draft"] in drafts and row["figure"] in ("tau", "tau_needed"):
            value = tau if row["figure"] == "tau" else needed
            row |= {"value": value, "low": value - 0.02, "high": value + 0.02}
    return results


@pytest.mark.parametrize("speed", [UNSURE, SLOW, (1.1, None, None)])
@pytest.mark.parametrize("busy", [[], list(BOTH)])
def test_a_draft_that_cannot_pay_is_rejected_whatever_the_clock_says(speed, busy, golden):
    results = timed(everywhere("mine", "chain:2", speed), busy=busy)
    head = lead(short_of(results, ["base", "mine"], 1.03, 1.12))
    assert head.decision.verdict == "reject"
    golden(head.headline)
    golden(head.decided)
    # What saves no call needs no clock.
    for needed in (0.9, 1.0):
        results = timed(everywhere("mine", "chain:2", speed), busy=busy)
        head = lead(short_of(results, ["base", "mine"], 1.0, needed))
        golden(head.decided)
    # One that may have enough is not rejected, nor is another draft with it.
    for drafts, tau, cost in ((["base", "mine"], 1.11, 1.12), (["mine"], 1.03, 1.12)):
        results = timed(everywhere("base", "chain:2", UNSURE), busy=busy)
        assert decide(short_of(results, drafts, tau, cost)).verdict == "cannot_tell"


def test_temperatures_of_the_same_prompts_do_not_add_up_to_a_rejection():
    results = short_of(timed(everywhere("mine", "chain:2", UNSURE)), ["base", "mine"], 1.0, 1.0)
    for row in results.document["rows"]:
        if row["figure"] == "tau":
            row |= {"low": 0.92, "high": 1.08}
    assert decide(results).verdict == "cannot_tell"


def test_without_a_clock_or_without_a_lossless_rule_nothing_is_told(golden):
    drafts = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}
    untimed = view(drafts, BOTH, timed=False)
    untimed.document["provenance"]["command"] = "draftsmith eval --speed_prompts 0 --out o"
    untimed.document["config"]["speed_prompts"] = 0
    head = lead(untimed)
    assert (head.decision.verdict, head.decision.setting) == ("cannot_tell", None)
    golden(head.command)
    untimed.document["config"]["speed_prompts"] = 4
    golden(lead(untimed).todo)
    golden(lead(untimed).command)
    for row in untimed.document["rows"]:
        row["figure"] = row["figure"].replace("tau", "tau_predicted")
    golden(lead(untimed).decided)
    lossy = view(drafts, BOTH, verifiers=("typical",))
    golden(lead(lossy).decided)
    golden(lead(lossy).command)


def test_one_cell_of_many_that_is_just_clear_of_1_is_not_taken_for_a_speedup():
    """Holm's correction over the cells of all settings."""
    just = (1.05, 1.005, 1.097)
    assert decide(timed({("mine", "chain:2", "prose", 0.0): just})).verdict == "cannot_tell"
    assert decide(timed({("mine", "chain:2", "prose", 0.0): FAST})).verdict == "ship_for"
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06]) and holm([0.9, 0.8]) == [
        1.0,
        1.0,
    ]
    row = {"value": 1.05, "low": 1.005, "high": 1.097, "n": 24}
    assert signs([row]) == [1] and signs([row] * 16) == [0] * 16 and signs([None]) == [None]


def test_what_a_draft_cannot_write_stands_beside_its_alpha(golden):
    results = timed({})
    for row in results.document["rows"]:
        if row["figure"] == "missing_mass" and row["draft"] == "mine" and row["set"] == "code":
            row["value"], row["low"], row["high"] = 0.61, 0.58, 0.64
    golden("\n".join(line for line in lines(results) if "draft" in line or "mine" in line))


def test_every_set_is_claimed_only_if_every_set_was_timed(golden):
    results = timed(everywhere("mine", "chain:2", FAST))
    document = results.document
    document["rows"] = [
        row for row in document["rows"] if row["figure"] != "speedup" or row["set"] == "prose"
    ]
    head = lead(Results(document, Path()))
    golden(head.headline)


def test_without_sets_out_of_distribution_nothing_is_claimed_there(golden):
    head = lead(view({"base": BASE, "mine": {"id": 0.25}}, {"prose": "id"}))
    golden(head.headline)


def simulated(settings, cells, speed, rng):
    """The verdict on settings of one true speed, on prompts whose times vary by 10 % from run to
    run.
    """
    prompts = 8
    tally = Tally()
    names = [f"d{index}" for index in range(settings)]
    for cell in range(cells):
        level = rng.lognormal(0, 0.3, prompts)
        for name in ("target", *names):
            how = ("chain:4", "exact") if name != "target" else (None, None)
            where = Where(name, 1, f"s{cell}", "id", 1.0, *how)
            seconds = level * rng.lognormal(0, 0.1, prompts)
            seconds /= 1.0 if name == "target" else speed
            counts = {"timed_tokens": [64] * prompts, "decode_s": seconds}
            counts |= {"timed_calls": [40] * prompts}
            if name != "target":
                counts |= {"emitted": [64] * prompts, "calls": [40] * prompts}
            for key, values in counts.items():
                tally.append(where, key, range(prompts), list(values))
    figures = {name: FIGURES[name] for name in ("speedup", "tau", "tau_needed")}
    rows = estimate(tally.table(), figures, base="d0", resamples=300)
    document = {
        "base": "d0",
        "drafts": names,
        "models": {name: model_row(name) for name in names},
        "temperatures": [1.0],
        "methods": [{"tree": "chain:4", "verifier": "exact", "lossless": True}],
        "suites": [{"name": f"s{cell}", "kind": "id"} for cell in range(cells)],
        "rows": rows_as_json(rows),
        "conditions": [],
    }
    return decide(Results(document, Path())).verdict


@pytest.mark.parametrize(
    ("settings", "cells", "speed", "runs", "least", "most"),
    [
        (12, 4, 1.0, 60, 0.0, 0.05),
        pytest.param(30, 6, 1.0, 30, 0.0, 0.05, marks=pytest.mark.slow),
        (12, 4, 1.15, 60, 0.85, 1.0),
    ],
)
def test_ship_is_seldom_said_without_a_speedup_and_mostly_with_one(
    settings, cells, speed, runs, least, most
):
    """The best of many settings is judged, so the correction is over settings and cells."""
    rng = np.random.default_rng(0)
    verdicts = [simulated(settings, cells, speed, rng) for _ in range(runs)]
    shipped = sum(verdict in ("ship", "ship_for") for verdict in verdicts)
    assert least <= shipped / runs <= most
