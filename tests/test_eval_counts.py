"""The table of counts and the figures made of it: by hand, and against peers' formulas."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from draftsmith.eval.bootstrap import half_width
from draftsmith.eval.counts import COLUMNS, TARGET, Tally, Where, packed, unpacked
from draftsmith.eval.figures import FIGURES, Ratio, definitions, estimate

CHAIN: dict[str, Any] = {"tree": "chain:2", "rule": "speculative"}


def cell(draft, seed=1, of="prose", kind="id", **how):
    return Where(draft, seed, of, kind, 1.0, **how)


def made_up():
    """Two drafts, two sets of two prompts, of which one is timed; `new` has two training seeds."""
    tally = Tally()
    for name, kind, groups in (("prose", "id", [0, 1]), ("code", "ood", [2, 3])):
        target = cell(TARGET, of=name, kind=kind)
        for key, value in {"timed_tokens": 20, "decode_s": 2.0, "whole_s": 2.5}.items():
            tally.append(target, key, groups, [value])
        tally.append(target, "timed_calls", groups, [20])
        alphas = {("old", 1): [4.0, 8.0], ("new", 1): [6.0, 9.0], ("new", 2): [8.0, 9.0]}
        for (draft, seed), alpha in alphas.items():
            if kind == "ood" and draft == "new":
                alpha = [value - 2.0 for value in alpha]
            where = cell(draft, seed, name, kind)
            tally.append(where, "alpha", groups, alpha)
            tally.append(where, "positions", groups, [10, 20])
            thinking = where._replace(part="span: thinking")
            tally.append(thinking, "alpha", groups, [alpha[0] - 1.0, 0.0])
            tally.append(thinking, "positions", groups, [5, 0])
            decoded = cell(draft, seed, name, kind, **CHAIN)
            counts: dict[str, list[float]] = {
                "emitted": [10, 20],
                "calls": [5, 8],
                "timed_tokens": [10],
                "decode_s": [0.5],
                "timed_calls": [5],
                "whole_s": [1.0],
                "expected_tokens": [10, 20],
                "expected_calls": [5.0, 7.5],
                "calls_variance": [0.5, 0.25],
            }
            for key, values in counts.items():
                tally.append(decoded, key, groups, values)
            for depth, (accepted, reached) in enumerate([([3, 8], [5, 8]), ([2, 4], [3, 8])], 1):
                at = decoded._replace(depth=depth)
                tally.append(at, "accepted_here", groups, accepted)
                tally.append(at, "reached", groups, reached)
    return tally.table()


@pytest.fixture(scope="module")
def rows():
    return estimate(made_up(), base="old", resamples=300)


def value(
    rows,
    figure,
    draft,
    of="prose",
    tree=None,
    depth=None,
    part=None,
    column="value",
):
    """The one row of a figure; `of` None for the pool of the sets in distribution."""
    wanted = {"figure": figure, "draft": draft, "tree": tree, "depth": depth, "part": part}
    found = rows[rows["kind"] == "id"] if of is None else rows
    for name, each in (wanted | {"set": of}).items():
        found = found[found[name].isna() if each is None else found[name] == each]
    (only,) = found[column]
    return float(only)


def test_every_figure_is_known_by_hand(rows):
    assert value(rows, "alpha", "old") == 12 / 30
    assert value(rows, "alpha", "old", of=None) == 12 / 30
    assert value(rows, "alpha", "new") == 32 / 60
    assert value(rows, "alpha_per_prompt", "old") == (4 / 10 + 8 / 20) / 2
    assert value(rows, "alpha", "old", part="span: thinking") == 3 / 5
    assert value(rows, "gain", "new") == pytest.approx(32 / 60 - 12 / 30)
    assert value(rows, "gain", "new", part="span: thinking") == pytest.approx(12 / 10 - 3 / 5)
    assert value(rows, "tau", "old", tree="chain:2") == 30 / 13
    assert value(rows, "tau_gain", "new", tree="chain:2") == 0
    assert value(rows, "accept", "old", tree="chain:2", depth=1) == 11 / 13
    assert value(rows, "accept", "old", tree="chain:2", depth=2) == 6 / 11
    assert value(rows, "tau_predicted", "old", tree="chain:2") == 30 / 12.5
    assert value(rows, "tau_run", "old", tree="chain:2") == 30 / 12.5
    assert value(rows, "tokens_per_s", TARGET) == 10
    assert value(rows, "speedup", "old", tree="chain:2") == (10 / 0.5) / (20 / 2.0)
    assert value(rows, "speedup_with_prompt", "old", tree="chain:2") == (10 / 1) / (20 / 2.5)
    assert value(rows, "tau_needed", "old", tree="chain:2") == (0.5 / 5) / (2.0 / 20)
    # A gain in distribution that may be zero has no transfer.
    assert math.isnan(value(rows, "transfer", "new", of="code"))
    assert not ((rows["figure"] == "transfer") & (rows["kind"] == "id")).any()


def test_seeds_add_up_and_have_a_spread(rows):
    ends = ("seed_low", "seed_high", "seeds")
    found = [value(rows, "alpha", "new", column=name) for name in ends]
    assert found == [15 / 30, 17 / 30, 2]
    gain = [value(rows, "gain", "new", column=name) for name in ends]
    assert gain == [pytest.approx(15 / 30 - 0.4), pytest.approx(17 / 30 - 0.4), 2]
    assert math.isnan(value(rows, "alpha", "old", column="seeds"))


def test_intervals_count_groups_and_only_prompts_that_were_measured(rows):
    assert value(rows, "alpha", "old", column="n") == 2
    # One prompt was timed, which has no interval.
    assert value(rows, "speedup", "old", tree="chain:2", column="n") == 1
    assert math.isnan(value(rows, "speedup", "old", tree="chain:2", column="low"))
    table = made_up()
    table["group"] = np.int32(0)
    one = estimate(table, base="old", resamples=100)
    assert value(one, "alpha", "old", column="n") == 1
    assert math.isnan(value(one, "alpha", "old", column="low"))


def test_figures_of_other_prompts_are_not_compared():
    table = made_up()
    lost = (table["draft"] == "old") & (table["set"] == "prose") & (table["prompt"] == 1)
    rows = estimate(table[~lost & (table["draft"] != TARGET)], base="old", resamples=100)
    assert not rows["figure"].isin(["speedup", "tau_needed"]).any()
    assert set(rows[rows["figure"] == "gain"]["set"].dropna()) == {"code"}
    assert math.isnan(value(rows, "transfer", "new", of="code"))


def test_the_interval_of_a_slow_targets_tokens_per_second_does_not_end_at_1():
    tally = Tally()
    tally.append(cell(TARGET), "timed_tokens", range(4), [10] * 4)
    tally.append(cell(TARGET), "decode_s", range(4), [10.0, 10.0, 10.0, 40.0])
    rows = estimate(tally.table(), base="old", resamples=300)
    assert value(rows, "tokens_per_s", TARGET, column="high") > 1


def test_a_table_is_kept_as_it_is():
    table = made_up()
    assert list(table) == list(COLUMNS)
    kept = unpacked(json.loads(json.dumps(packed(table))))
    pd.testing.assert_frame_equal(kept, table)


def test_a_figure_of_ones_own_is_one_entry():
    own = FIGURES | {"refused": Ratio("refused", "calls", "Calls that accepted nothing.")}
    tally = Tally()
    where = cell("old", **CHAIN)
    tally.append(where, "calls", [0, 1], [5, 8])
    tally.append(where, "refused", [0, 1], [1, 3])
    rows = estimate(tally.table(), own, base="old", resamples=100)
    assert value(rows, "refused", "old", tree="chain:2") == 4 / 13
    assert definitions(own)["refused"] == "Calls that accepted nothing."


def test_every_figure_has_a_meaning():
    assert all(definitions().values()) and set(FIGURES) < set(definitions())


def test_tau_of_a_chain_is_that_of_its_acceptance(rows):
    """With every step offering the whole chain, tau = 1 + a1 + a1 a2 (Leviathan et al. 2023)."""
    rng = np.random.default_rng(0)
    calls_P = rng.integers(20, 40, 30)
    first_P = rng.binomial(calls_P, 0.7)
    second_P = rng.binomial(first_P, 0.5)
    tally = Tally()
    where = cell("old", **CHAIN)
    tally.append(where, "calls", range(30), calls_P)
    tally.append(where, "emitted", range(30), calls_P + first_P + second_P)
    for depth, accepted, reached in ((1, first_P, calls_P), (2, second_P, first_P)):
        tally.append(where._replace(depth=depth), "accepted_here", range(30), accepted)
        tally.append(where._replace(depth=depth), "reached", range(30), reached)
    rows = estimate(tally.table(), base="old", resamples=100)
    one, two = (value(rows, "accept", "old", tree="chain:2", depth=depth) for depth in (1, 2))
    assert value(rows, "tau", "old", tree="chain:2") == pytest.approx(1 + one + one * two)


def test_the_interval_of_a_share_is_wilsons():
    """40 prompts of one position each, 28 of them accepted: a binomial share."""
    tally = Tally()
    tally.append(cell("old"), "alpha", range(40), [1.0] * 28 + [0.0] * 12)
    tally.append(cell("old"), "positions", range(40), [1] * 40)
    rows = estimate(tally.table(), base="old", resamples=20_000)
    wilson = stats.binomtest(28, 40).proportion_ci(method="wilson")
    assert value(rows, "alpha", "old", column="low") == pytest.approx(wilson.low, abs=0.02)
    assert value(rows, "alpha", "old", column="high") == pytest.approx(wilson.high, abs=0.02)


def test_a_paired_difference_is_that_of_scipy():
    """scipy's percentile bootstrap of the same statistic, moved away from its median as ours is."""
    rng = np.random.default_rng(1)
    positions_P = rng.integers(10, 60, 40)
    level_P = rng.uniform(0.3, 0.7, 40)
    old_P = positions_P * level_P
    new_P = positions_P * np.clip(level_P + 0.05 + rng.normal(0, 0.03, 40), 0, 1)
    tally = Tally()
    for draft, alpha_P in (("old", old_P), ("new", new_P)):
        tally.append(cell(draft), "alpha", range(40), alpha_P)
        tally.append(cell(draft), "positions", range(40), positions_P)
    rows = estimate(tally.table(), base="old", resamples=20_000)
    peer = stats.bootstrap(
        (new_P, old_P, positions_P),
        lambda new, old, of, axis: (new.sum(axis) - old.sum(axis)) / of.sum(axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(2),
    )
    middle = np.median(peer.bootstrap_distribution)
    wider = math.sqrt(40 / 39) * half_width(39) / stats.norm.ppf(0.975)
    low, high = (middle + wider * (end - middle) for end in peer.confidence_interval)
    assert value(rows, "gain", "new", column="low") == pytest.approx(low, abs=1e-3)
    assert value(rows, "gain", "new", column="high") == pytest.approx(high, abs=1e-3)
