"""What ways to align gain and lose over a base draft, and the tables of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lib.pages import gap, table
from benchmarks.lib.seeds import (
    difference_over_seeds,
    estimate_of_mean,
    pool_resamples,
    pool_sums,
    two_level,
)
from draftsmith.core.io import JsonObject
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import (
    PromptSums,
    Resamples,
    interval,
    pooled_ratios,
    resamples,
)
from draftsmith.eval.formats import number, with_interval

# Of one draft: per-prompt sums and counts by set.
Alphas = dict[str, PromptSums]
# What `align` trains with policy balanced.
BALANCED = "longer even replay"


@dataclass(frozen=True)
class Sets:
    """Prompt sets by what they are for. own: in distribution; the others are out of it."""

    own: str
    near: tuple[str, ...]
    far: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        """Every set out of distribution."""
        return self.near + self.far


@dataclass(frozen=True)
class Comparison:
    """Drafts beside the base draft, paired by prompt. picks: the resamples of each set."""

    sets: Sets
    base: Alphas
    picks: Mapping[str, Resamples]

    def changes(self, seeds: Sequence[Alphas]) -> JsonObject:
        """Alpha of a draft and its change over the base, by place, and on the worst of the other
        sets. seeds: of the draft, one for each training seed.
        """
        own = (self.sets.own,)
        others = self.sets.others
        row: JsonObject = {"id": self._change(seeds, own), "ood": self._change(seeds, others)}
        by_set = {name: self._change(seeds, (name,)) for name in others}
        for name, change in by_set.items():
            row[f"set {name}"] = change
        values = {name: change["change"]["value"] for name, change in by_set.items()}
        worst = min(values, key=lambda name: values[name])
        return row | {"worst": by_set[worst] | {"set": worst}}

    def share(self, new: Sequence[Alphas], plain: Sequence[Alphas]) -> dict[str, float | None]:
        """The gain in distribution over the plain method's, with the interval of their paired
        quotient, of the seeds that both have.
        """
        together = min(len(new), len(plain))
        own = self.sets.own
        new_sums = [alphas[own] for alphas in new[:together]]
        plain_sums = [alphas[own] for alphas in plain[:together]]
        base = self.base[own]
        picks = self.picks[own]
        base_R = pooled_ratios(base, picks)
        new_gain_R = two_level(new_sums, picks) - base_R
        plain_gain_R = two_level(plain_sums, picks) - base_R
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = interval(new_gain_R / plain_gain_R, picks)
        gain = _gain(new_sums, base)
        plain_gain = _gain(plain_sums, base)
        return {"value": gain / plain_gain if plain_gain else None, "low": low, "high": high}

    def _change(self, seeds: Sequence[Alphas], names: Sequence[str]) -> JsonObject:
        each = [_pooled(alphas, names) for alphas in seeds]
        picks = pool_resamples([self.picks[name] for name in names])
        change = difference_over_seeds(each, _pooled(self.base, names), picks)
        return {"alpha": _mean(each).pooled, "change": change}


def _pooled(alphas: Alphas, names: Sequence[str]) -> PromptSums:
    return pool_sums([alphas[name] for name in names])


def _mean(seeds: Sequence[PromptSums]) -> PromptSums:
    """Per prompt, the mean over seeds; they share the prompts and the counts."""
    return PromptSums(np.mean([each.numerator_P for each in seeds], axis=0), seeds[0].denominator_P)


def _gain(seeds: Sequence[PromptSums], base: PromptSums) -> float:
    return (_mean(seeds).pooled or 0.0) - (base.pooled or 0.0)


def picks_of(sums: PromptSums, name: str, count: int) -> Resamples:
    """The resamples of a set, the same for every draft."""
    return resamples(range(len(sums.numerator_P)), count, row_seed(0, name) % 2**32)


def over_seeds(seeds: Sequence[Alphas], names: Sequence[str], digits: int = 3) -> tuple[str, str]:
    """The mean over training seeds of a ratio pooled over sets, with its interval over prompts; and
    the ratio by seed.
    """
    sums = [_pooled(alphas, names) for alphas in seeds]
    picks = pool_resamples([picks_of(seeds[0][name], name, 2000) for name in names])
    mean = with_interval(estimate_of_mean(sums, picks), digits)
    return mean, ", ".join(number(each.pooled) for each in sums)


def document_of(
    sets: Sets, base: Alphas, found: Mapping[str, Sequence[Alphas]], count: int
) -> JsonObject:
    """Changes over the base by way to align, with the share of the gain of `plain`.

    found: by way, alphas by training seed. Intervals are over seeds and prompts; count: resamples.
    """
    picks = {name: picks_of(each, name, count) for name, each in base.items()}
    comparison = Comparison(sets, base, picks)
    rows = {}
    for way, seeds in found.items():
        row = comparison.changes(seeds) | {"seeds": len(seeds)}
        rows[way] = row | {"share": comparison.share(seeds, found["plain"])}
    return {"sets": {"own": sets.own, "near": sets.near, "far": sets.far}, "rows": rows}


def by_method(results: JsonObject, first: str) -> str:
    """Changes of alpha over the base by method, of a kept study of all methods."""
    rows = []
    for method, row in results["rows"].items():
        words = [method, row["setting"], str(row["seeds"]), gap(row["id"]["change"]), share_of(row)]
        words += [worst_of(row), gap(row["ood"]["change"])]
        area = row["area"]
        rows.append([*words, "" if area is None else f"{area:.2f}"])
    heading = ["setting", "seeds", "ID", "share of plain's gain", "worst OOD set", "OOD", "area"]
    return table([first, *heading], rows)


def share_of(row: JsonObject) -> str:
    """The share of the plain gain, with its interval."""
    share = row["share"]
    return "" if share["value"] is None else f"{with_interval(share, 0, scale=100)} %"


def worst_of(row: JsonObject) -> str:
    """The change on the worst set out of distribution, and its name."""
    worst = row["worst"]
    return f"{gap(worst['change'])} {worst['set']}"


def gains(results: JsonObject) -> str:
    """What each of several domains gained at once, by how their data were mixed. The last column
    says whether every domain gained, by the lower bounds.
    """
    names = [*results["domains"], *results["other"]]
    base = [number(results["base"][name]) for name in names]
    rows = [["base, alpha", *base, ""]]
    for way, row in results["rows"].items():
        lows = [row[name]["low"] for name in results["domains"]]
        changes = [gap(row[name]) for name in names]
        rows.append([way, *changes, "yes" if min(lows) > 0 else "no"])
    return table(["way", *names, "a gain in every domain"], rows) + "\n"
