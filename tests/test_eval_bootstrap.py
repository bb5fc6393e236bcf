"""Intervals, pairing and transfer: the statistics behind every figure of an evaluation."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks.lib.seeds import difference_over_seeds, pool_resamples, pool_sums
from draftsmith.eval import figures
from draftsmith.eval.bootstrap import (
    PromptSums,
    difference,
    estimate,
    quotient,
    resamples,
    signs,
)
from draftsmith.eval.counts import Tally, Where

if TYPE_CHECKING:
    pass


def _sums(rates, each=40):
    return PromptSums.of(list(rates * each), [each] * len(rates))


def test_pooled_is_a_ratio_of_sums_and_the_mean_of_ratios_stands_beside_it():
    sums = PromptSums.of([1, 9], [2, 10])
    found = estimate(sums, resamples(range(2), 200, 0))
    assert found["value"] == pytest.approx(10 / 12)
    assert sums.mean_per_prompt == pytest.approx((0.5 + 0.9) / 2) and found["n"] == 2


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        lengths = rng.integers(20, 60, size=60)
        hits = rng.binomial(lengths, rng.beta(6, 4, size=60))
        found = estimate(PromptSums.of(list(hits), list(lengths)), resamples(range(60), 400, trial))
        assert found["low"] is not None and found["high"] is not None
        covered += found["low"] <= 0.6 <= found["high"]
    assert 0.90 <= covered / 300 <= 0.985


def test_an_interval_holds_nothing_impossible():
    picks = resamples(range(2), 400, 0)
    ratio = PromptSums.of([10, 29], [10, 10]).sampled(picks)
    tau = ratio._replace(most=3.0).estimate(picks)
    assert (tau["low"], tau["high"]) == (1.0, 3.0)
    gain = difference(PromptSums.of([10, 0], [10, 10]), PromptSums.of([0, 5], [10, 10]), picks)
    assert (gain["low"], gain["high"]) == (-1.0, 1.0)


@pytest.mark.parametrize("prompts", [2, 3, 5, 8])
def test_few_prompts_are_not_surer_than_they_say(prompts):
    """Plain percentiles call no difference one in half of the cases with 2 prompts, in 10 % with
    8.
    """
    rng = np.random.default_rng(prompts + 1)
    wrong, called = 0, 0
    for trial in range(400):
        lengths = rng.integers(20, 64, size=prompts).astype(float)
        new = PromptSums((0.5 + rng.normal(0, 0.1, size=prompts)) * lengths, lengths)
        found = difference(
            new, PromptSums(0.5 * lengths, lengths), resamples(range(prompts), 400, trial)
        )
        assert found["low"] is not None and found["high"] is not None
        wrong += not found["low"] <= 0 <= found["high"]
        called += signs([found]) != [0]
    assert 0.02 <= wrong / 400 <= 0.085 and called / 400 <= 0.085


def test_a_family_of_few_prompts_calls_something_a_gain_no_more_often_than_one_figure_may():
    rng = np.random.default_rng(4)
    called = 0
    for _ in range(150):
        family = []
        for number in range(6):
            new = PromptSums.of(list(0.5 + rng.normal(0, 0.1, size=5)), [1.0] * 5)
            family.append(
                difference(
                    new, PromptSums.of([0.5] * 5, [1.0] * 5), resamples(range(5), 300, number)
                )
            )
        called += 1 in signs(family)
    assert called / 150 <= 0.06


def test_an_interval_stays_where_the_figure_can_lie():
    picks = resamples(range(2), 400, 0)
    share, ratio = PromptSums.of([9, 2], [10, 10]), PromptSums.of([30, 2], [10, 10])
    assert (estimate(share, picks)["low"], estimate(share, picks)["high"]) == (0.0, 1.0)
    found = estimate(ratio, picks)
    assert found["low"] == 0.0 and found["high"] is not None and found["high"] > 3


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(2)
    level = rng.uniform(0.2, 0.9, size=50)
    base, new = _sums(level), _sums(level + 0.05 + rng.normal(0, 0.01, size=50))
    picks, others = resamples(range(50), 1000, 3), resamples(range(50), 1000, 4)
    paired = difference(new, base, picks)
    unpaired = np.quantile(
        picks.weights_RP @ new.numerator_P / 2000 - others.weights_RP @ base.numerator_P / 2000,
        [0.025, 0.975],
    )
    assert paired["low"] is not None and paired["high"] is not None
    assert paired["high"] - paired["low"] < 0.2 * (unpaired[1] - unpaired[0])
    assert paired["low"] < 0.05 < paired["high"]


def test_what_has_no_value_or_interval_is_none_never_zero():
    picks = resamples(range(3), 100, 0)
    found = estimate(PromptSums.of([0, 0, 0], [0, 0, 0]), picks)
    assert found["value"] is found["low"] is found["high"] is None
    assert (
        difference(PromptSums.of([1, 1, 1], [2, 2, 2]), PromptSums.of([0] * 3, [0] * 3), picks)[
            "value"
        ]
        is None
    )
    assert (
        quotient(PromptSums.of([1] * 3, [1] * 3), PromptSums.of([0] * 3, [0] * 3), picks)["value"]
        is None
    )
    # Many resamples have no value; one prompt has no interval, alone or in a pool.
    only_one_counts = PromptSums.of([1, 0, 0, 0], [2, 0, 0, 0])
    found = estimate(only_one_counts, resamples(range(4), 1000, 0))
    assert found["value"] == 0.5 and found["low"] is None and found["high"] is None
    one, many = resamples(range(1), 100, 0), resamples(range(5), 100, 0)
    assert estimate(PromptSums.of([1], [2]), one)["low"] is None
    assert estimate(PromptSums.of([1] * 6, [2] * 6), pool_resamples([many, one]))["low"] is None


def test_pooling_suites_resamples_each_on_its_own():
    pool = pool_resamples([resamples(range(3), 50, 0), resamples(range(7), 50, 1)])
    assert (pool.weights_RP[:, :3].sum(1) == 3).all() and (pool.weights_RP[:, 3:].sum(1) == 7).all()
    both = pool_sums([PromptSums.of([1, 2], [4, 4]), PromptSums.of([3], [8])])
    assert both.pooled == 6 / 16


def _transfer(id_gain, ood_gain):
    """The transfer of a draft with these gains over its base, on 60 prompts each."""
    tally = Tally()
    for index, (kind, gain) in enumerate((("id", id_gain), ("ood", ood_gain))):
        rng = np.random.default_rng(1 + index)
        level = rng.uniform(0.3, 0.6, size=60)
        noise = rng.normal(0, 0.01, size=60)
        groups = range(60 * index, 60 * index + 60)
        for draft, alpha in (("base", level), ("mine", level + gain + noise)):
            where = Where(draft, 1, f"{kind} set", kind, 1.0)
            tally.append(where, "alpha", groups, alpha * 40)
            tally.append(where, "positions", groups, [40] * 60)
    rows = figures.estimate(tally.table(), base="base", resamples=800)
    return rows[(rows["figure"] == "transfer") & rows["set"].isna()].iloc[0]


@pytest.mark.parametrize(("ood_gain", "expected"), [(0.10, 0.5), (-0.04, -0.2), (0.2, 1.0)])
def test_transfer_is_the_ratio_of_gains_with_its_sign(ood_gain, expected):
    found = _transfer(0.2, ood_gain)
    assert found["value"] == pytest.approx(expected, abs=0.03)
    assert found["low"] < found["value"] < found["high"]


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_transfer_is_undefined_without_a_gain_in_distribution(gain):
    assert _transfer(gain, 0.1)[["value", "low", "high"]].isna().all()


@pytest.mark.parametrize(("seeds", "prompts"), [(5, 64), (3, 24)])
def test_two_levels_cover_the_truth_where_prompts_alone_do_not(seeds, prompts):
    """Training seeds that differ more than prompts let see; each simulated study has seeds and
    prompts of its own.
    """
    draw, covered, too_narrow, studies = np.random.default_rng(0), 0, 0, 300
    for study in range(studies):
        base_P, by_prompt_P = draw.normal(0.4, 0.1, prompts), draw.normal(0.05, 0.02, prompts)
        figures = [
            base_P + by_prompt_P + draw.normal(0, 0.02) + draw.normal(0, 0.01, prompts)
            for _ in range(seeds)
        ]
        ones = np.ones(prompts)
        new, base = [PromptSums(figure_P, ones) for figure_P in figures], PromptSums(base_P, ones)
        picks = resamples(range(prompts), 400, study)
        mean = PromptSums(np.mean(figures, axis=0), ones)
        for name, change in (
            ("both", difference_over_seeds(new, base, picks)),
            ("one", difference(mean, base, picks)),
        ):
            assert change["low"] is not None and change["high"] is not None
            inside = change["low"] < 0.05 < change["high"]
            covered, too_narrow = (
                covered + (name == "both" and inside),
                too_narrow + (name == "one" and inside),
            )
    assert too_narrow / studies < 0.75 and 0.92 <= covered / studies <= 0.995
