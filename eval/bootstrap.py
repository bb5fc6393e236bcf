"""Ratios of sums over prompts, and the 95 % intervals a bootstrap over prompts gives them.

Legend: P prompts, R resamples. A prompt is the unit that is resampled, because tokens of one prompt are not
independent of each other. Counts are kept per prompt and divided last (law 3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eval.schema import Difference, Estimate, Transfer

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
# A resample in which the denominator is zero has no value. When more than this share of them has none, the
# percentiles of the rest would describe a different quantity, so no interval is given.
MAX_UNDEFINED = 0.05


@dataclass(frozen=True)
class PromptSums:
    """Per-prompt numerators and denominators `[P]` of one pooled ratio."""

    numerator_P: Floats
    denominator_P: Floats

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "PromptSums":
        """From two equally long sequences of numbers."""
        if len(numerators) != len(denominators):
            raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
        return cls(np.asarray(numerators, np.float64), np.asarray(denominators, np.float64))

    @property
    def pooled(self) -> float | None:
        """Sum of numerators / sum of denominators; None when the denominators add up to zero."""
        below = float(self.denominator_P.sum())
        return float(self.numerator_P.sum()) / below if below else None

    @property
    def mean_per_prompt(self) -> float | None:
        """Mean of the per-prompt ratios, over the prompts that have one."""
        has = self.denominator_P > 0
        return float((self.numerator_P[has] / self.denominator_P[has]).mean()) if has.any() else None


@dataclass(frozen=True)
class Resamples:
    """How often each prompt occurs in each resample, `[R, P]`.

    Two figures computed with one `Resamples` are paired. `usable` is False when a suite has a single prompt:
    there is nothing to resample, so no interval exists.
    """

    weights_RP: Floats
    usable: bool


def resamples(prompts: int, count: int, seed: int) -> Resamples:
    """`count` resamples of `prompts` prompts with replacement, from one seed."""
    if prompts == 0:
        return Resamples(np.zeros((count, 0)), False)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=count)
    return Resamples(weights.astype(np.float64), prompts > 1)


def pool_resamples(parts: Sequence[Resamples]) -> Resamples:
    """Several suites side by side: each is resampled on its own (stratified), their prompts pooled."""
    return Resamples(np.concatenate([part.weights_RP for part in parts], axis=1), all(part.usable for part in parts))


def pool_sums(parts: Sequence[PromptSums]) -> PromptSums:
    """The prompts of several suites, in the order of `pool_resamples`."""
    return PromptSums(
        np.concatenate([part.numerator_P for part in parts]), np.concatenate([part.denominator_P for part in parts])
    )


def pooled_ratios(sums: PromptSums, picks: Resamples) -> Floats:
    """The pooled ratio in every resample, `[R]`; NaN where its denominator is zero."""
    below_R = picks.weights_RP @ sums.denominator_P
    above_R = picks.weights_RP @ sums.numerator_P
    ratio_R = np.full_like(below_R, np.nan)
    np.divide(above_R, below_R, out=ratio_R, where=below_R > 0)
    return ratio_R


def interval(values_R: Floats, picks: Resamples) -> tuple[float | None, float | None]:
    """The percentile interval of a resampled figure, or (None, None) where there is none."""
    defined = values_R[np.isfinite(values_R)]
    if not picks.usable or defined.size < (1 - MAX_UNDEFINED) * values_R.size or not defined.size:
        return None, None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def estimate(sums: PromptSums, picks: Resamples) -> Estimate:
    """The pooled ratio with its interval."""
    value = sums.pooled
    bounds = (None, None) if value is None else interval(pooled_ratios(sums, picks), picks)
    return Estimate(
        value=value,
        low=bounds[0],
        high=bounds[1],
        mean_per_prompt=sums.mean_per_prompt,
        numerator=float(sums.numerator_P.sum()),
        denominator=float(sums.denominator_P.sum()),
        prompts=len(sums.numerator_P),
    )


def quotient(above: PromptSums, below: PromptSums, picks: Resamples) -> Estimate:
    """One pooled ratio over another on the same prompts, as a speedup is, with its paired interval.

    `numerator` and `denominator` are the two pooled ratios; a mean of per-prompt quotients is not given.
    """
    a, b = above.pooled, below.pooled
    value = a / b if a is not None and b else None
    with np.errstate(divide="ignore", invalid="ignore"):
        values_R = pooled_ratios(above, picks) / pooled_ratios(below, picks)
    bounds = (None, None) if value is None else interval(values_R, picks)
    return Estimate(
        value=value,
        low=bounds[0],
        high=bounds[1],
        mean_per_prompt=None,
        numerator=a or 0.0,
        denominator=b or 0.0,
        prompts=len(above.numerator_P),
    )


def difference(new: PromptSums, base: PromptSums, picks: Resamples) -> Difference:
    """new - base of the pooled ratios, paired by prompt: both sides of every resample hold the same
    prompts."""
    a, b = new.pooled, base.pooled
    value = a - b if a is not None and b is not None else None
    values_R = pooled_ratios(new, picks) - pooled_ratios(base, picks)
    low, high = (None, None) if value is None else interval(values_R, picks)
    return Difference(value=value, low=low, high=high, prompts=len(new.numerator_P))


def transfer(
    new_id: PromptSums,
    base_id: PromptSums,
    picks_id: Resamples,
    new_ood: PromptSums,
    base_ood: PromptSums,
    picks_ood: Resamples,
) -> Transfer:
    """(gain OOD) / (gain ID): the share of what alignment bought in distribution that survives out of it.

    The two sets of prompts are resampled independently. A ratio to a gain that may be zero means nothing, so
    it is undefined unless the interval of the ID gain lies above zero.
    """
    gain_id = difference(new_id, base_id, picks_id)
    gain_ood = difference(new_ood, base_ood, picks_ood)
    found = Transfer(value=None, low=None, high=None, undefined=None, gain_id=gain_id, gain_ood=gain_ood)
    if gain_id["value"] is None or gain_ood["value"] is None:
        return {**found, "undefined": "a gain is undefined"}
    if gain_id["low"] is None or gain_id["high"] is None:
        return {**found, "undefined": "the gain in distribution has no interval"}
    if gain_id["high"] < 0:
        return {**found, "undefined": "acceptance fell in distribution, so there is no gain to transfer"}
    if gain_id["low"] <= 0:
        return {**found, "undefined": "the gain in distribution cannot be told from zero"}
    id_R = pooled_ratios(new_id, picks_id) - pooled_ratios(base_id, picks_id)
    ood_R = pooled_ratios(new_ood, picks_ood) - pooled_ratios(base_ood, picks_ood)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = interval(ood_R / id_R, picks_ood)
    return {**found, "value": gain_ood["value"] / gain_id["value"], "low": low, "high": high}


# Half the width of a 95 % interval in standard errors.
HALF_WIDTH = 1.959964


def signs(figures: Sequence[tuple[float, float, float] | None]) -> list[int | None]:
    """Of one family of figures (value, low, high): 1 above zero, -1 below it, 0 where neither can be told at 95 %.

    A sign needs an interval on its side of zero, and one-sided significance under Holm's correction over the family;
    the standard error is read off the interval. None where there is no figure.
    """
    scores = {
        index: figure[0] * 2 * HALF_WIDTH / max(figure[2] - figure[1], 1e-12)
        for index, figure in enumerate(figures)
        if figure is not None
    }
    found: list[int | None] = [0 if index in scores else None for index in range(len(figures))]
    # A family for either side: clear losses must not make it easier to call something a gain.
    for side in (1, -1):
        p_values = [math.erfc(side * score / math.sqrt(2)) / 2 for score in scores.values()]
        for index, p in zip(scores, holm(p_values), strict=True):
            figure = figures[index]
            assert figure is not None
            if p <= (1 - LEVEL) / 2 and side * figure[1 if side == 1 else 2] > 0:
                found[index] = side
    return found


def bounds(figure: Difference | None) -> tuple[float, float, float] | None:
    """(value, low, high) of a difference, as `signs` takes it; None where it has no interval."""
    if figure is None or figure["value"] is None or figure["low"] is None or figure["high"] is None:
        return None
    return figure["value"], figure["low"], figure["high"]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of one family of tests adjusted for their number (Holm 1979), in the order given, at most 1."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
