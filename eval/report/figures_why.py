"""Figures that explain, with one panel per prompt set or kind of sets and a line per draft.

Acceptance by depth, speed against the cost of a step, calibration, more candidates. None if there is nothing to show.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.formats import KIND_TITLES, shortened
from eval.report.theme import WIDTH, Look, drawing
from eval.results import Results
from eval.schema import Row

# Typical drafts as a share of their target's parameters, which is their cost where memory bandwidth decides.
# And on which side of its line the name stands.
TYPICAL_COSTS: dict[str, tuple[float, Literal["left", "right"]]] = {
    "68M for 7B": (0.068 / 6.7, "right"),
    "160M for 13B": (0.162 / 13.0, "left"),
    "EAGLE head for 7B": (0.24 / 6.7, "left"),
}
CHEAPEST = -50  # of the costs of a draft call that are drawn, in twentieths of a power of ten
LEGEND_LINE = 0.23  # inches
SHARES = (-0.03, 1.03)  # of an axis from 0 to 1, with whole marks at its ends


def _panels(
    look: Look, titles: dict[str, str], draw: Callable[[Axes, str], object], label: str, height: float = 2.3
) -> Figure:
    """Panels two abreast, drawn by their key, with one legend and one label of the horizontal axis."""
    columns = min(2, len(titles))
    lines = -(-len(titles) // columns)
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, 0.6 + height * lines))
        axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for ax, (key, title) in zip(axes, titles.items(), strict=False):
            draw(ax, key)
            ax.set_title(shortened(title, 22))
            ax.tick_params(labelbottom=True, labelleft=True)
        for ax in axes[len(titles) :]:
            ax.set_visible(False)
        figure.supxlabel(label, color=look.colours["soft"], fontsize=11)
        # A draft may be missing from the first panel and not from others.
        entries = {text: line for ax in axes for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
        for abreast in (3, 2, 1):
            legend = figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=abreast)
            if abreast == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        # The panels stay as high as they are, however many drafts are named above them.
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE * (-(-len(entries) // abreast) - 1))
    return figure


def _line(ax: Axes, look: Look, draft: str, points: Sequence[tuple[float, float]], **style: Any) -> None:
    """The line of one draft, named in the legend unless `label` says otherwise."""
    named: dict[str, Any] = {"label": shortened(draft, 16), "marker": look.marker(draft), "ms": 4.5}
    ax.plot([x for x, _ in points], [y for _, y in points], color=look.colour(draft), **(named | style))


def _by_depth(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return [(row["at"] or 0, row["value"]) for row in rows if row["value"] is not None]


def _sets(results: Results) -> dict[str, str]:
    return {name: name + " (OOD)" * (results.kind(name) == "ood") for name in results.domains()}


def accept_figure(results: Results, look: Look) -> Figure | None:
    """accept@d against depth, one panel per set, for the first method."""
    if not results.methods:
        return None

    def series(draft: str, domain: str) -> list[Row]:
        rows = results.series("accept", draft, domain, None, *results.methods[0])
        return [row for row in rows if row["value"] is not None]

    def draw(ax: Axes, domain: str) -> None:
        for draft in results.drafts:
            rows = series(draft, domain)
            for row in rows:
                if row["low"] is not None and row["high"] is not None:
                    ax.plot(
                        [row["at"] or 0] * 2, [row["low"], row["high"]], color=look.colour(draft), lw=1.2, alpha=0.5
                    )
            if rows:
                _line(ax, look, draft, _by_depth(rows))
        ax.set_ylim(*SHARES)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))

    titles = _sets(results)
    titles = {name: titles[name] for name in titles if any(series(draft, name) for draft in results.drafts)}
    return _panels(look, titles, draw, "depth d") if titles else None


def calibration_figure(results: Results, look: Look) -> Figure | None:
    """Confidence of the draft against acceptance, at the highest temperature; the diagonal is a calibrated draft."""

    def draw(ax: Axes, kind: str) -> None:
        ax.plot([0, 1], [0, 1], color=look.colours["line"], lw=1)
        for draft in results.drafts:
            sure, taken = (results.series(figure, draft, kind) for figure in ("confidence", "acceptance"))
            pairs = [(x["value"], y["value"] or 0.0) for x, y in zip(sure, taken, strict=True)]
            _line(ax, look, draft, [(x, y) for x, y in pairs if x is not None])
        ax.set_ylim(*SHARES)

    return _by_kind(results, look, draw, "confidence", "confidence of the draft")


def candidates_figure(results: Results, look: Look) -> Figure | None:
    """Acceptance against the number of candidates: drawn (solid) and most probable (dashed)."""

    def draw(ax: Axes, kind: str) -> None:
        for draft in results.drafts:
            best, drawn = (results.series(figure, draft, kind) for figure in ("candidates_best", "candidates_drawn"))
            _line(ax, look, draft, _by_depth(best), ls=(0, (3, 2)), **({"label": None} if drawn else {}))
            if drawn:
                _line(ax, look, draft, _by_depth(drawn))
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        ax.set_ylim(*SHARES)

    return _by_kind(results, look, draw, "candidates_best", "candidates k")


def _by_kind(results: Results, look: Look, draw: Callable[[Axes, str], None], needs: str, label: str) -> Figure | None:
    """A panel for each kind of sets at the highest temperature; None if there are no rows of the figure `needs`."""
    titles: dict[str, str] = {kind: KIND_TITLES[kind] for kind in results.kinds}
    label = f"{label}, T = {results.top_temperature:g}"
    return _panels(look, titles, draw, label) if any(results.rows(needs)) else None


def cost_figure(results: Results, look: Look) -> Figure | None:
    """Expected speedup of every draft on every set, by its measured tau, over what a draft call costs; and this
    machine's.
    """
    method = next((each for each in results.methods if results.lossless(each[1])), None)
    if method is None:
        return None

    def value(figure: str, draft: str, domain: str) -> float | None:
        return (row := results.figure(figure, draft, domain, None, *method)) and row["value"]

    # As far as this machine's most costly draft, so that its mark stands beside a line.
    calls = [value("draft_call", draft, domain) or 0.0 for draft in results.drafts for domain in results.domains()]
    costs = [10 ** (power / 20) for power in range(CHEAPEST, 1 + math.ceil(20 * math.log10(max([1.0, *calls]))))]
    highest = [1.0]

    def draw(ax: Axes, domain: str) -> None:
        for draft in results.drafts:
            tau, depth_sum, steps = (value(each, draft, domain) for each in ("tau", "depth_sum", "target_calls"))
            if not tau or not depth_sum or not steps:
                continue
            # A tree is drafted level by level, and verifying it costs as much as decoding one token.
            depth = depth_sum / steps
            _line(ax, look, draft, [(cost, tau / (depth * cost + 1)) for cost in costs], markevery=(10, 24))
            highest.append(tau / (depth * costs[0] + 1))
            call, speedup = (value(each, draft, domain) for each in ("draft_call", "speedup"))
            if call is not None and speedup is not None:
                # A draft too cheap to be told from none stands at the left edge.
                at, style = max(call, costs[0]), {"label": None, "ms": 9, "mfc": look.colours["paper"], "mew": 1.8}
                _line(ax, look, draft, [(at, speedup), (at, tau / (depth * at + 1))], marker="", label=None, ls=":")
                _line(ax, look, draft, [(at, speedup)], **style)
                highest.append(speedup)
        for name, (typical, side) in TYPICAL_COSTS.items():
            ax.axvline(typical, color=look.colours["line"], lw=1, zorder=0)
            ax.annotate(name, (typical, 0.03), xycoords=ax.get_xaxis_transform(), rotation=90, va="bottom", ha=side,
                        fontsize=7.5, color=look.colours["soft"])  # fmt: skip
        ax.axhline(1, color=look.colours["soft"], lw=1)
        ax.set_xscale("log")
        ax.set_ylim(0, 1.06 * max(highest))

    label = f"cost of one draft call / one target call (T = {results.top_temperature:g})"
    return _panels(look, _sets(results), draw, label, 2.7)
