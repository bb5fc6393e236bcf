"""The decision: what the timings allow to say, how often that is wrong, and in which words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.core.errors import RequirementError
from draftsmith.eval.bootstrap import PromptSums, holm, quotient, resamples
from draftsmith.eval.decision import Setting, decide
from draftsmith.eval.report.findings import lead
from draftsmith.eval.report.page import render_page
from draftsmith.eval.results import Results
from draftsmith.eval.summary import headline_and_table, rows_by_set
from tests.results_made_up import BASE, BOTH, made_up, model_row, view

TREES = ("chain:2", "kary:2,1")


def timed(
    speeds: dict[tuple[str, str, str, float], tuple[float, float | None, float | None]],
    busy: Sequence[str] = (),
    ood: float = 0.1,
) -> Results:
    """Results on prose and code at T = 0 and 1 whose speedups are given by draft, tree, set and
    temperature. busy: sets that were timed on a busy machine.
    """
    found = made_up(
        {"base": BASE, "mine": {"id": 0.2, "ood": ood}}, BOTH, trees=TREES, verifiers=("exact",)
    )

    def speed(row: Any) -> tuple[float, float | None, float | None]:
        return speeds.get(
            (row["draft"], row["tree"], row["domain"], row["temperature"]), (0.5, 0.48, 0.52)
        )

    for row in found["rows"]:
        if row["figure"] in ("speedup", "speedup_with_prompt"):
            row["value"], row["low"], row["high"] = speed(row)
    for counts in found["counts"]:
        if counts["of"] == "speed" and counts["tree"]:
            # The base's times vary from prompt to prompt.
            noise = [1 + (counts["draft"] == "base") * (-1) ** i / 2 for i in range(24)]
            counts["per_prompt"]["decode_s"] = [2.0 / speed(counts)[0] * each for each in noise]
    for condition in found["conditions"]:
        condition["busy"] = condition["domain"] in busy
    return Results(found, Path())


def everywhere(draft: str, tree: str, *speed: float | None) -> dict[Any, Any]:
    return {
        (draft, tree, domain, temperature): speed for domain in BOTH for temperature in (0.0, 1.0)
    }


FAST, SLOW, UNSURE = (1.4, 1.3, 1.5), (0.8, 0.7, 0.9), (1.1, 0.9, 1.3)


def test_a_setting_that_pays_everywhere_is_shipped_whichever_tree_it_is():
    head = lead(timed(everywhere("mine", "kary:2,1", *FAST)))
    assert head.headline == "Ship mine: 1.40 times the target alone"
    assert head.detail.startswith(
        "Faster than the target alone? Yes, with kary:2,1 and exact: on every set at every "
        "temperature (1.40 times with the prompt's forward counted). "
        "Faster than base, too? Yes: 2.80 [2."
    )
    assert head.detail.endswith(
        "] times its speed, all sets together, each with its fastest method."
    )
    assert head.todo == "Decode with it:"
    assert head.command.startswith("draftsmith decode --target t --draft mine --tree kary:2,1 ")
    # Alphas of the base and the draft stand above the fold.
    assert [row["draft"] for row in head.alphas] == ["base", "mine"]
    assert list(head.alphas[0]) == ["draft", "α ID", "α OOD"]
    labels = ["prose (ID), T = 0", "prose (ID), T = 1", "code (OOD), T = 0", "code (OOD), T = 1"]
    assert head.cells == [
        (label, "Faster: 1.40 [1.30, 1.50] times the target alone.") for label in labels
    ]


def test_the_base_draft_is_shipped_when_it_is_the_fastest_and_an_advantage_that_is_none_is_said():
    # Where neither is measurably faster, the one that loses less out of distribution.
    alike = everywhere("mine", "chain:2", *FAST) | everywhere("base", "chain:2", *(1.5, 1.4, 1.6))
    assert decide(timed(alike)).setting == Setting("mine", "chain:2", "exact")
    both = everywhere("mine", "chain:2", *FAST) | everywhere("base", "chain:2", *(2.5, 2.4, 2.6))
    found = decide(timed(both))
    assert found.setting is not None and (found.verdict, found.setting.draft) == ("ship", "base")
    assert found.over_base is None
    equal = everywhere("mine", "chain:2", *(1.6, 1.5, 1.7)) | everywhere("base", "kary:2,1", *FAST)
    equal |= {("base", "kary:2,1", "code", 1.0): (1.9, 1.8, 2.0)}
    head = lead(timed(equal))
    assert "Faster than base, too? Not measurably: 1.07 [0." in head.detail, head.detail
    assert dict(head.cells)["code (OOD), T = 1"].endswith(
        "Faster there, taken alone: base with kary:2,1, 1.90 [1.80, 2.00]."
    )


def test_a_loss_out_of_distribution_decides_only_if_it_is_measurable():
    alike = everywhere("mine", "chain:2", *FAST) | everywhere("base", "chain:2", *(1.35, 1.2, 1.5))
    shipped = []
    for ood in (-0.05, -0.001):
        setting = decide(timed(alike, ood=ood)).setting
        assert setting is not None
        shipped.append(setting.draft)
    assert shipped == ["base", "mine"]


def test_among_drafts_of_one_size_a_measured_gain_outweighs_a_faster_clock():
    """They take as long for a step, so a clock that favours the one of lower alpha is noise."""
    speeds = everywhere("mine", "chain:2", *FAST) | everywhere("base", "chain:2", *(1.5, 1.4, 1.6))
    wide = (1.4, 0.9, 1.9)
    speeds |= {("mine", "chain:2", "code", temperature): wide for temperature in (0.0, 1.0)}
    results = timed(speeds, ood=0.001)
    assert decide(results).setting == Setting("mine", "chain:2", "exact")
    # Not where it pays nowhere.
    nowhere = timed(speeds | everywhere("mine", "chain:2", *wide), ood=0.001)
    assert decide(nowhere).setting == Setting("base", "chain:2", "exact")
    # Nor where its steps may take longer.
    results.document["models"]["mine"]["memory_bytes"] += 1
    assert decide(results).setting == Setting("base", "chain:2", "exact")


def test_a_draft_is_shipped_for_the_sets_on_which_it_pays():
    speeds = everywhere("mine", "chain:2", *FAST)
    speeds |= {("mine", "chain:2", "code", 0.0): SLOW, ("mine", "chain:2", "code", 1.0): UNSURE}
    head = lead(timed(speeds))
    assert head.headline == "Ship mine for prose: 1.40 times the target alone"
    assert head.setting == "mine with chain:2 and exact"
    assert "It is slower on code at T = 0: decode without a draft there." in head.detail
    assert "No clear speedup on code at T = 1: time more prompts" in head.detail
    # What is faster or slower there is said with it.
    quiet = lead(timed(speeds | {("base", "kary:2,1", "code", 1.0): FAST}))
    assert (
        "On code at T = 1, base with kary:2,1 is faster, taken alone: 1.40 [1.30, 1.50]."
        in quiet.detail
    )
    assert dict(quiet.cells)["code (OOD), T = 0"].endswith(
        "Slower there, taken alone: base with chain:2, 0.50 [0.48, 0.52]."
    )
    # The table does not pretend to two digits on a busy machine.
    for busy, speed in ((list(BOTH), " ~1.1 "), ([], " 1.10 [0.90, 1.30] ")):
        assert speed in "\n".join(
            headline_and_table(timed(everywhere("mine", "chain:2", *UNSURE), busy=busy))
        )


@pytest.mark.parametrize(
    ("speed", "verdict", "headline"),
    [
        (SLOW, "none_beats_none", "Do not ship: every draft is slower than the target alone"),
        (UNSURE, "not_shown", "Do not ship: no draft is measurably faster than the target alone"),
        ((1.3, None, None), "too_few", "Not decided: too few prompts were timed"),
    ],
)
def test_what_is_not_shown_is_not_shipped(speed, verdict, headline):
    results = timed(everywhere("mine", "chain:2", *speed))
    found = decide(results)
    assert found.setting is not None
    assert (found.verdict, found.setting.draft, found.paying) == (verdict, "mine", [])
    assert lead(results).headline == headline and f"{speed[0]:.2f} times" in lead(results).detail


@pytest.mark.parametrize(("speed", "verdict"), [(FAST, "ship"), (SLOW, "none_beats_none")])
def test_an_interval_beside_1_decides_on_a_busy_machine_too(speed, verdict):
    results = timed(everywhere("mine", "chain:2", *speed), busy=list(BOTH))
    found = decide(results)
    assert (found.verdict, found.busy, found.over_base) == (verdict, [], None)
    results.require("speedup[prose T=1 tree=chain:2] > 0.1")
    (line,) = unmet(results, "speedup[prose T=1 tree=chain:2] > 2")
    assert "cannot be told" not in line


def test_an_interval_that_spans_1_on_a_busy_machine_decides_nothing():
    speed = UNSURE
    results = timed(everywhere("mine", "chain:2", *speed), busy=list(BOTH))
    found = decide(results)
    assert (found.verdict, found.paying, found.over_base) == ("busy", [], None)
    head = lead(results)
    assert head.headline == "Cannot tell: the machine was busy"
    assert head.command == "draftsmith eval --time_again DIR"
    assert render_page(results).count("The machine was busy during timing.") == 1
    said = head.detail + " ".join(text for _, text in head.cells)
    assert not {"Faster", "Slower", "slower"} & set(said.replace(":", " ").split()), said
    (line,) = unmet(results, "speedup[prose T=1 tree=chain:2] > 1")
    assert line.endswith("speedup cannot be told: the machine was busy; time again (--time_again)")
    (_, line) = unmet(results, "speedup[prose tree=chain:2] < 1.2")
    assert "cannot be told" in line


def test_timings_that_were_taken_again_name_what_would_change_them():
    results = timed(everywhere("mine", "chain:2", *UNSURE), busy=list(BOTH))
    results.document["clock"]["timed_again"] = True
    results.document["config"]["speed_prompts"] = 8
    head = lead(results)
    assert head.command == ""
    assert "load average below 3" in head.todo and "--speed_prompts 16" in head.todo


def unmet(results: Results, requirement: str) -> list[str]:
    with pytest.raises(RequirementError) as caught:
        results.require(requirement)
    return str(caught.value).splitlines()


def test_what_a_quiet_machine_showed_on_other_sets_is_said():
    unsure = {("mine", "chain:2", "code", temperature): UNSURE for temperature in (0.0, 1.0)}
    fast = timed(everywhere("mine", "chain:2", *FAST) | unsure, busy=["code"])
    head = lead(fast)
    assert head.headline == "Ship mine for prose: 1.40 times the target alone"
    assert "On code the machine was busy, and nothing is decided." in head.detail
    assert "Faster than base" not in head.detail and "taken alone" not in head.detail
    assert dict(head.cells)["code (OOD), T = 1"] == (
        "Not decided, the machine was busy: 1.10 [0.90, 1.30] times the target alone."
    )
    assert head.command == "draftsmith eval --time_again DIR"
    head = lead(timed(everywhere("mine", "chain:2", *SLOW) | unsure, busy=["code"]))
    assert head.headline == "Cannot tell on code: the machine was busy"
    assert "It is slower on prose: decode without a draft there." in head.detail


def test_page_and_terminal_show_the_decided_tree_and_how_many_prompts_were_timed():
    speeds = everywhere("mine", "chain:2", *FAST)
    speeds |= {("mine", "kary:2,1", "code", 1.0): (1.9, 1.8, 2.0)}
    results = timed(speeds)
    rows = {(row["draft"], row["set"]): row for row in rows_by_set(results, 1.0)}
    assert rows["mine", "code (OOD)"]["tree"] == "chain:2"
    assert rows["mine", "code (OOD)"]["speed"] == "1.40 [1.30, 1.50]"
    assert "timed)" not in render_page(results)
    for row in results.document["rows"]:
        if (row["figure"], row["draft"]) == ("speedup", "base"):
            row["n"] = 6
    assert "24 prompts ID, 24 OOD (6 to 24 of each set timed)" in render_page(
        Results(results.document, Path())
    )


def test_an_interval_beside_1_that_is_one_of_many_is_told_apart():
    head = lead(timed({("mine", "chain:2", "prose", 0.0): (1.05, 1.005, 1.097)}))
    assert dict(head.cells)["prose (ID), T = 0"] == (
        "Faster taken alone, not for sure as one of 16 comparisons: "
        "1.05 [1.00, 1.10] times the target alone. "
        "Slower there, taken alone: base with chain:2, 0.50 [0.48, 0.52]."
    )


def short_of(results: Results, drafts: Sequence[str], tau: float, needed: float) -> Results:
    """Give drafts these tokens per target call, and steps of that cost."""
    for row in results.rows("tau", "tau_needed"):
        if row["draft"] in drafts:
            value = tau if row["figure"] == "tau" else needed
            row |= {"value": value, "low": value - 0.02, "high": value + 0.02}
    return results


@pytest.mark.parametrize("speed", [UNSURE, SLOW, (1.1, None, None)])
@pytest.mark.parametrize("busy", [[], list(BOTH)])
def test_a_draft_that_cannot_pay_is_rejected_whatever_the_clock_says(speed, busy):
    results = timed(everywhere("mine", "chain:2", *speed), busy=busy)
    head = lead(short_of(results, ["base", "mine"], 1.03, 1.12))
    assert head.decision.verdict == "rejected" and head.command == ""
    assert head.headline == (
        "Do not ship: mine cannot pay here: needs 1.12 tokens per target call, "
        "has 1.03 [1.01, 1.05]"
    )
    assert head.todo.strip() == "How many more steps of training that takes is unknown."
    assert "Too few tokens per target call" in dict(head.cells)["prose (ID), T = 0"]
    # Nothing else is advised.
    said = "\n".join(headline_and_table(results)) + render_page(results)
    assert "time again" not in said.lower() and "--speed_prompts" not in said


def test_a_draft_that_saves_no_call_needs_no_clock_to_be_rejected():
    for needed in (0.9, 1.0):
        results = timed(everywhere("mine", "chain:2", *UNSURE), busy=list(BOTH))
        head = lead(short_of(results, ["base", "mine"], 1.0, needed))
        assert "needs 1.05 tokens per target call, has 1.00" in head.headline


def test_a_draft_that_may_have_enough_is_not_rejected():
    for tau, needed in ((1.11, 1.12), (1.05, 1.06)):
        results = timed(everywhere("mine", "chain:2", *UNSURE), busy=list(BOTH))
        assert decide(short_of(results, ["base", "mine"], tau, needed)).verdict == "busy"


def test_the_steps_that_a_hopeless_draft_needs_are_those_of_its_own_curve():
    results = timed(everywhere("mine", "chain:2", *UNSURE), busy=list(BOTH))
    short_of(results, ["base", "mine"], 1.03, 1.12)
    training = results.document["models"]["mine"]["training"]
    assert training is not None
    training["heldout"] = [(0, 0.0), (40, 0.01), (80, 0.02), (100, 0.03)]
    said = "\n".join(headline_and_table(results))
    assert "that takes about 156 more steps" in said and "train longer" not in said
    training["heldout"][-1] = (100, 0.026)
    assert decide(results).hopeless[-1].steps == 260
    short_of(results, ["base", "mine"], 1.03, 2.0)  # beyond what the curve can say
    assert decide(results).hopeless[-1].steps is None
    training["heldout"][2:] = []
    short_of(results, ["base", "mine"], 1.03, 1.12)
    assert decide(results).hopeless[-1].steps is None


def test_the_rival_that_may_pay_is_named_beside_a_hopeless_draft():
    speeds = everywhere("mine", "chain:2", *UNSURE)
    results = timed(speeds | everywhere("base", "chain:2", *UNSURE), busy=list(BOTH))
    results.document["models"]["base"]["parameters"] = 0
    short_of(results, ["mine"], 1.03, 1.12)
    head = lead(short_of(results, ["base"], 1.3, 1.08))
    assert head.headline.startswith("Do not ship: mine cannot pay here")
    assert "base with chain:2 may pay: needs 1.08, has 1.30 [1.28, 1.32]." in head.todo
    # Shipped, if the clock shows it.
    fast = timed(speeds | everywhere("base", "chain:2", *FAST))
    fast.document["models"]["base"]["parameters"] = 0
    short_of(fast, ["mine"], 1.03, 1.12)
    assert lead(fast).headline.startswith("Ship base")
    assert "mine cannot pay here: needs 1.12" in lead(fast).detail


def test_a_draft_that_was_still_improving_is_said_to_be():
    results = timed(everywhere("mine", "chain:2", *FAST))
    curve = [(0, 0.1), (10, 0.2), (20, 0.3), (30, 0.36), (40, 0.4)]
    training = results.document["models"]["mine"]["training"]
    assert training is not None
    training["heldout"] = curve
    said = (
        "mine: held-out alpha was still rising when training stopped "
        "(+0.040 in the last fifth of its steps): train longer."
    )
    assert lead(results).rising == said and said in headline_and_table(results)
    assert said in render_page(results)
    assert "How held-out acceptance rose in training" in render_page(results)
    curve[-1] = (40, 0.362)
    assert lead(results).rising == "" and lead(results).todo == "Decode with it:"


def test_without_a_clock_or_without_a_lossless_rule_nothing_is_decided():
    head = lead(view({"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}, BOTH, timed=False))
    assert head.headline == "Not decided: nothing was timed" and head.cells == []
    assert "--speed_prompts" in head.todo
    assert decide(view({"base": BASE}, BOTH, verifiers=("typical",))).verdict == "not_timed"


def test_where_a_draft_pays_at_one_temperature_the_command_and_a_table_are_of_that_one():
    results = timed({("mine", "chain:2", domain, 0.0): FAST for domain in BOTH})
    head = lead(results)
    assert head.headline == ("Ship mine for prose and code at T = 0: 1.40 times the target alone")
    assert "--temperature 0 " in head.command
    said = "\n".join(headline_and_table(results))
    assert said.index("temperature 0,") < said.index("1.40 [1.30, 1.50]")
    assert said.index("1.40 [1.30, 1.50]") < said.index("temperature 1,")


def test_one_cell_of_many_that_is_just_clear_of_1_is_not_taken_for_a_speedup():
    """Of many cells some lie just above 1 by chance: Holm's correction over the cells of all
    settings.
    """
    just = (1.05, 1.005, 1.097)
    assert decide(timed({("mine", "chain:2", "prose", 0.0): just})).verdict == "not_shown"
    assert decide(timed({("mine", "chain:2", "prose", 0.0): FAST})).verdict == "ship_for"
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06]) and holm([0.9, 0.8]) == [
        1.0,
        1.0,
    ]


def test_every_set_is_claimed_only_if_every_set_was_timed():
    results = timed(everywhere("mine", "chain:2", *FAST))
    document = results.document
    document["rows"] = [
        row for row in document["rows"] if row["figure"] != "speedup" or row["domain"] == "prose"
    ]
    assert (
        lead(Results(document, Path())).headline
        == "Ship mine for prose: 1.40 times the target alone"
    )


def test_without_sets_out_of_distribution_nothing_is_claimed_there():
    head = lead(view({"base": BASE, "mine": {"id": 0.25}}, {"prose": "id"}))
    assert head.headline.startswith("Ship mine: 1.")
    assert head.headline.endswith("times the target alone; nothing is known out of distribution")
    assert "No set out of distribution was measured: add --ood NAME=PROMPTS." in head.detail


def simulated(settings: int, cells: int, speed: float, rng: np.random.Generator) -> str:
    """The verdict on settings of one true speed, on prompts whose times vary by 10 % from run to
    run.
    """
    rows, counts, prompts = [], [], 8
    for cell in range(cells):
        picks = resamples(range(prompts), 300, cell)
        emitted, level = np.full(prompts, 64.0), rng.lognormal(0, 0.3, prompts)
        alone = PromptSums(emitted, level * rng.lognormal(0, 0.1, prompts))
        for index in range(settings):
            sums = PromptSums(emitted, level * rng.lognormal(0, 0.1, prompts) / speed)
            place = {
                "draft": f"d{index}",
                "domain": f"s{cell}",
                "temperature": 1.0,
                "tree": "chain:4",
            }
            place |= {"verifier": "exact", "at": None, "part": None}
            rows.append(
                {"figure": "speedup", "kind": "id", **place, **quotient(sums, alone, picks)}
            )
            counts.append(
                {
                    "of": "speed",
                    **place,
                    "per_prompt": {"emitted": emitted, "decode_s": sums.denominator_P},
                }
            )
    document: Any = {
        "base": "d0",
        "drafts": [f"d{index}" for index in range(settings)],
        "models": {f"d{index}": model_row(f"d{index}") for index in range(settings)},
        "temperatures": [1.0],
        "methods": [{"tree": "chain:4", "verifier": "exact", "lossless": True}],
        "suites": [
            {"name": f"s{cell}", "kind": "id", "prompt_hashes": list(range(prompts))}
            for cell in range(cells)
        ],
        "rows": rows,
        "counts": counts,
        "conditions": [],
        "config": {"bootstrap": 300, "seed": 0},
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
    shipped = sum(
        simulated(settings, cells, speed, rng) in ("ship", "ship_for") for _ in range(runs)
    )
    assert least <= shipped / runs <= most
