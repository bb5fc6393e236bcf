"""The figures of `frontier.py`: the setting taken of each method, areas, tables, the picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.lib.pages import gap, table
from benchmarks.lib.seeds import difference_over_seeds, pool_sums, two_level
from benchmarks.studies.objectives_tables import mean_of
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import (
    PromptSums,
    Resamples,
    interval,
    pool_resamples,
    pooled_ratios,
    resamples,
)
from draftsmith.eval.report.formats import with_interval
from draftsmith.eval.report.theme import DARK, LIGHT, drawing, write_png

# Of one draft: per-prompt sums and counts by set.
Alphas = dict[str, PromptSums]
Found = Mapping[tuple[str, str], Sequence[Alphas]]
COLOURS = {
    "plain": "ink",
    "interpolation": "d6",
    "anchor kl": "d3",
    "LoRA": "soft",
    "replay + interpolation": "d4",
    "even replay + interpolation": "d2",
    "longer even replay + interpolation": "d5",
    "mixed replay + interpolation": "d1",
}
MARKERS = dict(zip(COLOURS, "oPDvsXh*", strict=True))
# The bar: at least this share of the plain method's gain, and on the worst set out of distribution
# no loss of this much (non-inferiority: the lower bound of the change is above minus the margin).
GAIN, MARGIN = 0.9, 0.01
# What `align` trains with policy balanced.
BALANCED = "longer even replay"


@dataclass(frozen=True)
class Sets:
    """Prompt sets by what they are for. own: in distribution, reported. tuning: out of it, never
    reported, beside `heldout` (in distribution), `general` and `even` (what the target writes by
    itself, begun as for replay).
    """

    own: str
    tuning: tuple[str, ...]
    near: tuple[str, ...]
    far: tuple[str, ...]

    @property
    def tuned_on(self) -> tuple[str, ...]:
        """Out of distribution, for tuning."""
        return ("general", "even", *self.tuning)

    @property
    def all(self) -> tuple[str, ...]:
        """Every set that alpha is measured on."""
        return (self.own, *self.near, *self.far, "heldout", *self.tuned_on)


def picks_of(sums: PromptSums, name: str, count: int) -> Resamples:
    """The resamples of a set, the same for every draft."""
    return resamples(len(sums.numerator_P), count, row_seed(0, name) % 2**32)


def document_of(
    sets: Sets,
    base: Alphas,
    found: Found,
    plain: str,
    count: int,
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Figures of all points with seed 0, and of what is taken of each method with all the seeds
    that it has.

    plain: the setting of the plain method. settings: of each method, chosen elsewhere; None: chosen
    here, as `chosen_settings` does. Changes are over the base, paired by prompt; intervals are over
    seeds and prompts.
    """
    picks = {name: picks_of(each, name, count) for name, each in base.items()}
    places = {"id": (sets.own,), "ood": sets.near + sets.far, "near": sets.near, "far": sets.far}
    # Where every setting was chosen elsewhere, nothing need be measured on the sets for it.
    tuned_on = sets.tuned_on if "heldout" in base else ()
    places |= {"heldout": ("heldout",), "tuning": tuned_on} if tuned_on else {}
    places |= {f"set {name}": (name,) for name in places["ood"]}

    def pooled(alphas: Alphas, place: str) -> PromptSums:
        return pool_sums([alphas[name] for name in places[place]])

    def picked(place: str) -> Resamples:
        return pool_resamples([picks[name] for name in places[place]])

    def changes(seeds: Sequence[Alphas]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for place in places:
            each, before = [pooled(alphas, place) for alphas in seeds], pooled(base, place)
            change = difference_over_seeds(each, before, picked(place))
            by_seed = [(one.pooled or 0.0) - (before.pooled or 0.0) for one in each]
            row[place] = {"alpha": mean_of(each).pooled, "change": {**change, "seeds": by_seed}}
        worst = min(places["ood"], key=lambda name: row[f"set {name}"]["change"]["value"])
        return row | {"worst": row[f"set {worst}"] | {"set": worst}}

    points = [
        {"method": method, "setting": setting, **changes(seeds[:1])}
        for (method, setting), seeds in found.items()
    ]
    taken = chosen_settings([{"points": points}]) if settings is None else dict(settings)
    measured = dict.fromkeys(point["method"] for point in points if point["method"] in taken)
    taken = {method: taken[method] for method in measured} | {"plain": plain}
    reference = found["plain", plain]
    rows = {}
    for method, setting in taken.items():
        seeds = found[method, setting]
        together = min(len(seeds), len(reference))
        row = changes(seeds) | {"setting": setting, "seeds": len(seeds)}
        row["share"] = _share(
            [pooled(alphas, "id") for alphas in seeds[:together]],
            [pooled(alphas, "id") for alphas in reference[:together]],
            pooled(base, "id"),
            picked("id"),
        )
        rows[method] = row
    gain, loss = (rows["plain"][place]["change"]["value"] for place in ("id", "ood"))
    for method, row in rows.items():
        row["area"] = area(
            [_place(point) for point in points if point["method"] == method], gain, loss
        )
        row["met"] = met(row)
    return {
        "sets": {"own": sets.own, "near": sets.near, "far": sets.far, "tuned_on": tuned_on},
        "base": {place: pooled(base, place).pooled for place in places},
        "prompts": {name: len(each.numerator_P) for name, each in base.items()},
        "points": points,
        "taken": taken,
        "rows": rows,
    }


def _place(point: Mapping[str, Any]) -> tuple[float, float]:
    return point["id"]["change"]["value"], point["ood"]["change"]["value"]


def chosen_settings(documents: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """By method the setting with the greatest sum, over documents, of the changes on held-out
    prompts in distribution and on the sets for tuning: nothing that is reported. Of the plain
    method, the first of these alone.
    """
    merits: dict[str, dict[str, float]] = {}
    for point in (point for document in documents for point in document["points"]):
        places = ("heldout",) if point["method"] == "plain" else ("heldout", "tuning")
        settings = merits.setdefault(point["method"], {})
        merit = sum(float(point[place]["change"]["value"]) for place in places)
        settings[point["setting"]] = settings.get(point["setting"], 0.0) + merit
    return {
        method: max(settings, key=lambda setting: settings[setting])
        for method, settings in merits.items()
    }


def _share(
    new: Sequence[PromptSums], plain: Sequence[PromptSums], base: PromptSums, picks: Resamples
) -> dict[str, float | None]:
    """The gain over the plain method's gain, with the interval of their paired quotient."""
    base_R = pooled_ratios(base, picks)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = interval(
            (two_level(new, picks) - base_R) / (two_level(plain, picks) - base_R), picks
        )
    above, below = ((mean_of(each).pooled or 0.0) - (base.pooled or 0.0) for each in (new, plain))
    return {"value": above / below if below else None, "low": low, "high": high}


def met(row: Mapping[str, Any]) -> bool:
    """Whether the share of the plain gain is at least `GAIN`, and the worst set out of distribution
    is not inferior.
    """
    share, low = row["share"]["value"], row["worst"]["change"]["low"]
    return bool(share is not None and share >= GAIN and low is not None and low > -MARGIN)


def area(places: Sequence[tuple[float, float]], gain: float, loss: float) -> float | None:
    """The area under a method's frontier, as a share of the rectangle from (0, plain loss) to
    (plain gain, 0).

    places: (change in distribution, change out of it) of its points; the base, (0, 0), is one of
    every method. The frontier is their upper hull, because a server that gives each request one of
    two drafts at random has a mixture of both alphas. 1: the whole gain of the plain method at no
    loss; more where the base is surpassed out of distribution. None where the plain method has no
    gain, or no loss: there is nothing to trade.
    """
    if gain <= 0 or loss >= 0:
        return None
    hull = frontier(places)
    x, y = (np.array(each) for each in zip(*hull, strict=True))
    steps = np.linspace(0, gain, 2001)
    heights = np.where(steps <= x[-1], np.clip(np.interp(steps, x, y) - loss, 0, None), 0.0)
    return float(np.trapezoid(heights, steps) / (gain * -loss))


def frontier(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the upper hull of the places and (0, 0), from no gain to the greatest; it
    never rises.
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted({(0.0, 0.0), *(place for place in places if place[0] > 0)}):
        # A corner below the line from the one before it to this point is none.
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) <= (
            y - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    top = max(range(len(hull)), key=lambda index: hull[index][1])
    # Less gain than at the highest corner can be had with that corner itself.
    return ([(0.0, hull[top][1])] if top else []) + hull[top:]


def tables(results: Mapping[str, Any]) -> str:
    """The table of all methods, in Markdown, and what it is measured on."""
    sets, base = results["sets"], results["base"]
    said = ", ".join(f"{place} {base[place]:.3f}" for place in ("id", "ood", "near", "far"))
    on = f"ID: {sets['own']}; near: {', '.join(sets['near'])}; far: {', '.join(sets['far'])}"
    if sets["tuned_on"]:
        on += (
            f"; tuned on held-out prompts of {sets['own']}, and out of distribution on "
            f"{', '.join(sets['tuned_on'])}"
        )
    return f"{by_method(results, 'method')}\n\nBase: {said}. {on}.\n"


def by_method(results: Mapping[str, Any], first: str) -> str:
    """Changes of alpha over the base by method."""
    rows = []
    for method, row in results["rows"].items():
        words = [method, row["setting"], str(row["seeds"]), gap(row["id"]["change"]), share_of(row)]
        words += [worst_of(row), gap(row["ood"]["change"])]
        rows.append([*words, "" if row["area"] is None else f"{row['area']:.2f}"])
    heading = ["setting", "seeds", "ID", "share of plain's gain", "worst OOD set", "OOD", "area"]
    return table([first, *heading], rows)


def share_of(row: Mapping[str, Any]) -> str:
    """The share of the plain gain, with its interval."""
    return "" if row["share"]["value"] is None else f"{with_interval(row['share'], 0, scale=100)} %"


def worst_of(row: Mapping[str, Any]) -> str:
    """The change on the worst set out of distribution, and its name."""
    return f"{gap(row['worst']['change'])} {row['worst']['set']}"


def write_pictures(results: Mapping[str, Any], out: Path, name: str = "frontier") -> None:
    """OUT/NAME.png and NAME-dark.png."""
    for suffix, colours in (("", LIGHT), ("-dark", DARK)):
        write_png(picture(results, colours), out / f"{name}{suffix}.png")


def picture(results: Mapping[str, Any], colours: Mapping[str, str]) -> Figure:
    """Change in alpha ID (x) and OOD (y) over the base, seed 0: all points, and the frontier of
    each method.
    """
    with drawing(dict(colours)):
        figure = Figure(figsize=(10.5, 5.0))
        ax = figure.subplots()
        for method, role in COLOURS.items():
            # What is merged has the drafts that it goes to at its end.
            own = (
                method,
                method.removesuffix(" + interpolation") if method != "interpolation" else "plain",
            )
            places = [_place(point) for point in results["points"] if point["method"] in own]
            if method not in results["taken"]:
                continue
            colour, strong = colours[role], method == "plain" or "replay" in method
            x, y = zip(*frontier(places), strict=True)
            ax.plot(x, y, color=colour, lw=2.0 if strong else 1.2, zorder=3 if strong else 2)
            x, y = zip(*places, strict=True)
            ax.scatter(x, y, s=34, marker=MARKERS[method], color=colour, label=method, zorder=4)
            for point in results["points"]:
                if point["method"] in own and results["taken"][point["method"]] == point["setting"]:
                    ax.scatter(
                        *_place(point),
                        s=150,
                        marker="o",
                        facecolors="none",
                        edgecolors=colour,
                        zorder=4,
                    )
        ax.scatter([0], [0], s=60, color=colours["base"], zorder=5)
        ax.annotate(
            "base", (0, 0), xytext=(0, -20), textcoords="offset points", color=colours["soft"]
        )
        ax.axhline(0, color=colours["base"], lw=1, ls=(0, (2, 2)), zorder=1)
        ax.set_xlabel(
            f"change in α in distribution ({results['sets']['own']}), T = 1, seed 0; rings: the "
            "settings taken"
        )
        ax.set_ylabel("change in α out of distribution")
        # Beside the drawing: wherever it stood in it, it would hide a point.
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
        return figure
