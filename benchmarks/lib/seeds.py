"""Figures over several training seeds, and over several prompt sets, with their intervals.

Legend: P prompts, R resamples, S seeds.
"""

import math
from collections.abc import Sequence
from itertools import chain
from statistics import NormalDist

import numpy as np

from draftsmith.eval.bootstrap import (
    LEVEL,
    Floats,
    PromptSums,
    Resamples,
    half_width,
    interval,
    pooled_ratios,
)
from draftsmith.eval.schema import Estimate


def pool_resamples(parts: Sequence[Resamples]) -> Resamples:
    """Put suites side by side: each keeps its own resamples (stratified), their prompts are
    pooled.
    """
    weights_RP = np.concatenate([part.weights_RP for part in parts], axis=1)
    sizes = chain.from_iterable(part.sizes for part in parts)
    return Resamples(weights_RP, tuple(sizes))


def pool_sums(parts: Sequence[PromptSums]) -> PromptSums:
    """Pool the prompts of several suites, in the order of `pool_resamples`."""
    return PromptSums(
        np.concatenate([part.numerator_P for part in parts]),
        np.concatenate([part.denominator_P for part in parts]),
    )


def two_level(seeds: Sequence[PromptSums], picks: Resamples) -> Floats:
    """Mean over training seeds of a pooled ratio, `[R]`: every resample draws seeds and prompts
    again.

    seeds: one figure per training seed, on the same prompts. What the draw of seeds adds is widened
    as `interval` widens the draw of prompts; a single seed adds nothing, since it says nothing
    about others. Two figures of equally many seeds are paired, because they draw the same ones.
    """
    ratio_SR: Floats = np.stack([pooled_ratios(sums, picks) for sums in seeds])
    count = len(seeds)
    mean_R = np.asarray(ratio_SR.mean(0))
    if count == 1:
        return mean_R
    draws = np.random.default_rng(count)
    draws_SR = draws.integers(count, size=ratio_SR.shape)
    drawn_R: Floats = np.take_along_axis(ratio_SR, draws_SR, axis=0).mean(0)
    normal = NormalDist().inv_cdf((1 + LEVEL) / 2)
    widening = math.sqrt(count / (count - 1)) * half_width(count - 1) / normal
    return np.asarray(mean_R + widening * (drawn_R - mean_R))


def estimate_of_mean(seeds: Sequence[PromptSums], picks: Resamples) -> Estimate:
    """Mean over training seeds of a pooled ratio; its interval is over prompts alone, for few
    seeds.
    """
    mean_R = np.mean([pooled_ratios(sums, picks) for sums in seeds], axis=0)
    low, high = interval(mean_R, picks)
    return Estimate(value=_mean(seeds), low=low, high=high, n=picks.prompts)


def _mean(seeds: Sequence[PromptSums]) -> float | None:
    """The mean over training seeds; None if one has no ratio."""
    ratios = [sums.pooled for sums in seeds if sums.pooled is not None]
    return sum(ratios) / len(ratios) if len(ratios) == len(seeds) else None


def difference_over_seeds(
    new: Sequence[PromptSums], base: PromptSums, picks: Resamples
) -> Estimate:
    """Mean over training seeds of a pooled ratio, less the base's, with the interval of
    `two_level`.
    """
    mean = _mean(new)
    below = base.pooled
    value = None if mean is None or below is None else mean - below
    low, high = interval(two_level(new, picks) - pooled_ratios(base, picks), picks)
    return Estimate(value=value, low=low, high=high, n=picks.prompts)
