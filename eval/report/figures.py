"""The figures of a report: dot plots with a line per draft and set, and panels with a curve per
draft.

Each figure is a function of the results and a look; None if there is nothing to show.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.formats import KIND_TITLES, kept, number, shortened, tree_name
from eval.report.theme import WIDTH, Look, drawing
from eval.results_table import ResultsTable
from eval.schema import Row

# Inches per line of a dot plot, and above and below the lines.
LINE, FRAME = 0.25, 0.75
NAME = 16  # characters of a name beside the dots
HEADING = 36
# Typical drafts: their share of the target's parameters, which is their cost if memory bandwidth is
# the limit, and the side of the line on which the name stands.
TYPICAL_COSTS: dict[str, tuple[float, Literal["left", "right"]]] = {
    "68M for 7B": (0.068 / 6.7, "right"),
    "160M for 13B": (0.162 / 13.0, "left"),
    "EAGLE head for 7B": (0.24 / 6.7, "left"),
}
CHEAPEST = -50  # of the costs of a draft call that are drawn, in twentieths of a power of ten
LEGEND_LINE = 0.23  # inches
SHARES = (-0.03, 1.03)  # of an axis from 0 to 1, with whole marks at its ends


@dataclass(frozen=True)
class Line:
    """One line: a heading if it has no draft; else dots (hollow: out of distribution), a dashed
    mark, and a number.
    """

    text: str
    draft: str | None = None
    dots: Sequence[Row | None] = ()
    note: str = ""
    dashed: float | None = None


def _dot_plots(
    look: Look,
    panels: Sequence[tuple[str, Sequence[Line]]],
    bounds: tuple[float, float],
    *,
    reference: float | None = None,
    notes: str = "",
) -> Figure:
    """Draw panels of (label, lines) one above the other. The x limits hold every interval, within
    `bounds`; a vertical line stands at `reference`, and `notes` above the numbers on the right.
    """
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, sum(len(lines) * LINE + FRAME for _, lines in panels)))
        for ax, (label, lines) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
        ):
            values = [] if reference is None else [reference]
            for y, line in enumerate(lines):
                values += _draw(ax, look, y, line)
            named = [(y, line) for y, line in enumerate(lines) if line.draft is not None]
            ax.set_yticks([y for y, _ in named], [shortened(line.text, NAME) for _, line in named])
            for text, (_, line) in zip(ax.get_yticklabels(), named, strict=True):
                text.set_color(look.colour(line.draft or ""))
            if reference is not None:
                ax.axvline(reference, color=look.colours["soft"], lw=1)
            if values:
                air = max(0.05 * (max(values) - min(values)), 0.02)
                ax.set_xlim(max(bounds[0], min(values) - air), min(bounds[1], max(values) + air))
            ax.set_ylim(len(lines) - 0.4, -0.6)
            ax.grid(visible=False, axis="y")
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            ax.set_xlabel(label)
            ax.annotate(
                notes, (1.02, -0.8), xycoords=("axes fraction", "data"), color=look.colours["soft"]
            )
    return figure


def _draw(ax: Axes, look: Look, y: int, line: Line) -> list[float]:
    place = ("axes fraction", "data")
    if line.draft is None:
        box = {"facecolor": look.colours["paper"], "lw": 0, "pad": 1}
        text = shortened(line.text, HEADING)
        ax.annotate(
            text,
            (0, y),
            xycoords=place,
            fontweight="bold",
            va="center",
            bbox=box,
            zorder=5,
            color=look.colours["ink"],
        )
        return []
    colour, values = look.colour(line.draft), []
    if line.dashed is not None:
        ax.plot(
            [line.dashed] * 2, [y - 0.5, y + 0.5], color=look.colours["base"], lw=1, ls=(0, (2, 2))
        )
    for row in line.dots:
        if row is None or row["value"] is None:
            continue
        hollow = row["kind"] == "ood"
        at = y + (0 if len(line.dots) == 1 else 0.16 if hollow else -0.16)
        values.append(row["value"])
        if row["low"] is not None and row["high"] is not None:
            values += [row["low"], row["high"]]
            ax.plot(
                [row["low"], row["high"]], [at, at], color=colour, lw=1.8, solid_capstyle="round"
            )
        face = look.colours["paper"] if hollow else colour
        # A mark at the end of the axis, as where everything is accepted, is drawn whole.
        mark = look.marker(line.draft)
        ax.plot(row["value"], at, mark, ms=5.5, mec=colour, mew=1.4, mfc=face, clip_on=False)
    ax.annotate(line.note, (1.02, y), xycoords=place, va="center", color=look.colours["ink"])
    return values


def alpha_figure(results: ResultsTable, look: Look) -> Figure | None:
    """alpha of every draft on every set, ID first; a dashed line carries the base draft through
    each set.
    """
    panels = []
    for temperature in sorted(results.temperatures):
        lines: list[Line] = []
        for domain in results.domains():
            base = results.alpha(results.base, domain, temperature)["value"]
            alphas = [results.alpha(draft, domain, temperature) for draft in results.drafts]
            lines.append(Line(f"{domain} ({results.kind(domain).upper()})"))
            lines += [
                Line(row["draft"], row["draft"], [row], number(row["value"]), base)
                for row in alphas
            ]
        panels.append((f"expected acceptance α, T = {temperature:g}", lines))
    return _dot_plots(look, panels, (-0.01, 1.01))


def gain_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Gain in alpha per aligned draft and set; on the right, the share of the ID gain that
    transferred.
    """
    if not results.aligned:
        return None
    panels = []
    for temperature in sorted(results.temperatures):
        lines: list[Line] = []
        for draft in results.aligned:
            lines.append(Line(draft))
            for domain in results.domains():
                gain, transfer = (
                    get(draft, domain, temperature) for get in (results.gain, results.transfer)
                )
                lines.append(
                    Line(domain, draft, [gain], "ID" if transfer is None else kept(transfer, gain))
                )
        panels.append((f"gain in α over {shortened(results.base, 14)}, T = {temperature:g}", lines))
    notes = "transfer" if results.domains("ood") else ""
    return _dot_plots(look, panels, (-1.0, 1.0), reference=0.0, notes=notes)


def tau_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Tokens per target call and, if timed, speedup, by method: ID and OOD each pooled over their
    sets.
    """
    panels = []
    for name, title in (
        ("tau", "tokens per target call, τ"),
        ("speedup", "speed, the target alone = 1"),
    ):
        lines: list[Line] = []
        for tree, verifier in results.methods if any(results.rows(name)) else ():
            lossy = "" if results.lossless(verifier) else " · lossless: false"
            lines.append(Line(f"{tree_name(tree)} · {verifier}{lossy}"))
            for draft in results.drafts:
                rows = [
                    results.figure(name, draft, kind, None, tree, verifier)
                    for kind in results.kinds
                ]
                note = " / ".join(number(row["value"] if row else None, 2) for row in rows)
                lines.append(Line(draft, draft, rows, note))
        if lines:
            panels.append((f"{title} (T = {results.top_temperature:g})", lines))
    notes = "ID / OOD" if len(results.kinds) > 1 else ""
    return _dot_plots(look, panels, (0.0, 1e9), reference=1.0, notes=notes) if panels else None


def _panels(
    look: Look,
    titles: dict[str, str],
    draw: Callable[[Axes, str], object],
    label: str,
    height: float = 2.3,
) -> Figure:
    """Panels two abreast, drawn by their key, with one legend and one label of the horizontal
    axis.
    """
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
        entries = {
            text: line
            for ax in axes
            for line, text in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        for abreast in (3, 2, 1):
            legend = figure.legend(
                entries.values(), entries.keys(), loc="outside upper left", ncols=abreast
            )
            if abreast == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        # The panels stay as high as they are, however many drafts are named above them.
        figure.set_figheight(
            figure.get_figheight() + LEGEND_LINE * (-(-len(entries) // abreast) - 1)
        )
    return figure


def _line(
    ax: Axes, look: Look, draft: str, points: Sequence[tuple[float, float]], **style: Any
) -> None:
    named: dict[str, Any] = {"label": shortened(draft, 16), "marker": look.marker(draft), "ms": 4.5}
    ax.plot(
        [x for x, _ in points], [y for _, y in points], color=look.colour(draft), **(named | style)
    )


def _by_depth(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return [(row["at"] or 0, row["value"]) for row in rows if row["value"] is not None]


def _sets(results: ResultsTable) -> dict[str, str]:
    return {name: name + " (OOD)" * (results.kind(name) == "ood") for name in results.domains()}


def accept_figure(results: ResultsTable, look: Look) -> Figure | None:
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
                        [row["at"] or 0] * 2,
                        [row["low"], row["high"]],
                        color=look.colour(draft),
                        lw=1.2,
                        alpha=0.5,
                    )
            if rows:
                _line(ax, look, draft, _by_depth(rows))
        ax.set_ylim(*SHARES)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))

    titles = _sets(results)
    titles = {
        name: titles[name]
        for name in titles
        if any(series(draft, name) for draft in results.drafts)
    }
    return _panels(look, titles, draw, "depth d") if titles else None


def calibration_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Confidence of the draft against acceptance, at the highest temperature; the diagonal is a
    calibrated draft.
    """

    def draw(ax: Axes, kind: str) -> None:
        ax.plot([0, 1], [0, 1], color=look.colours["line"], lw=1)
        for draft in results.drafts:
            sure, taken = (
                results.series(figure, draft, kind) for figure in ("confidence", "acceptance")
            )
            pairs = [(x["value"], y["value"] or 0.0) for x, y in zip(sure, taken, strict=True)]
            _line(ax, look, draft, [(x, y) for x, y in pairs if x is not None])
        ax.set_ylim(*SHARES)

    return _by_kind(results, look, draw, "confidence", "confidence of the draft")


def candidates_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Acceptance against the number of candidates: drawn (solid) and most probable (dashed)."""

    def draw(ax: Axes, kind: str) -> None:
        for draft in results.drafts:
            best, drawn = (
                results.series(figure, draft, kind)
                for figure in ("candidates_best", "candidates_drawn")
            )
            _line(
                ax,
                look,
                draft,
                _by_depth(best),
                ls=(0, (3, 2)),
                **({"label": None} if drawn else {}),
            )
            if drawn:
                _line(ax, look, draft, _by_depth(drawn))
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        ax.set_ylim(*SHARES)

    return _by_kind(results, look, draw, "candidates_best", "candidates k")


def _by_kind(
    results: ResultsTable, look: Look, draw: Callable[[Axes, str], None], needs: str, label: str
) -> Figure | None:
    """A panel for each kind of sets at the highest temperature; None if there are no rows of the
    figure `needs`.
    """
    titles: dict[str, str] = {kind: KIND_TITLES[kind] for kind in results.kinds}
    label = f"{label}, T = {results.top_temperature:g}"
    return _panels(look, titles, draw, label) if any(results.rows(needs)) else None


def cost_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Expected speedup by measured tau over the cost of a draft call, per draft and set, and this
    machine's speedup.
    """
    method = next((method for method in results.methods if results.lossless(method[1])), None)
    if method is None:
        return None

    def value(figure: str, draft: str, domain: str) -> float | None:
        return (row := results.figure(figure, draft, domain, None, *method)) and row["value"]

    # As far as this machine's most costly draft, so that its mark stands beside a line.
    calls = [
        value("draft_call", draft, domain) or 0.0
        for draft in results.drafts
        for domain in results.domains()
    ]
    costs = [
        10 ** (power / 20)
        for power in range(CHEAPEST, 1 + math.ceil(20 * math.log10(max([1.0, *calls]))))
    ]
    highest = [1.0]

    def draw(ax: Axes, domain: str) -> None:
        for draft in results.drafts:
            tau, depth_sum, steps = (
                value(name, draft, domain) for name in ("tau", "depth_sum", "target_calls")
            )
            if not tau or not depth_sum or not steps:
                continue
            # A tree is drafted level by level, and verifying it costs as much as decoding one
            # token.
            depth = depth_sum / steps
            _line(
                ax,
                look,
                draft,
                [(cost, tau / (depth * cost + 1)) for cost in costs],
                markevery=(10, 24),
            )
            highest.append(tau / (depth * costs[0] + 1))
            call, speedup = (value(name, draft, domain) for name in ("draft_call", "speedup"))
            if call is not None and speedup is not None:
                # A draft too cheap to be told from none stands at the left edge.
                at, style = (
                    max(call, costs[0]),
                    {"label": None, "ms": 9, "mfc": look.colours["paper"], "mew": 1.8},
                )
                _line(
                    ax,
                    look,
                    draft,
                    [(at, speedup), (at, tau / (depth * at + 1))],
                    marker="",
                    label=None,
                    ls=":",
                )
                _line(ax, look, draft, [(at, speedup)], **style)
                highest.append(speedup)
        for name, (typical, side) in TYPICAL_COSTS.items():
            ax.axvline(typical, color=look.colours["line"], lw=1, zorder=0)
            ax.annotate(
                name,
                (typical, 0.03),
                xycoords=ax.get_xaxis_transform(),
                rotation=90,
                va="bottom",
                ha=side,
                fontsize=7.5,
                color=look.colours["soft"],
            )
        ax.axhline(1, color=look.colours["soft"], lw=1)
        ax.set_xscale("log")
        ax.set_ylim(0, 1.06 * max(highest))

    label = f"cost of one draft call / one target call (T = {results.top_temperature:g})"
    return _panels(look, _sets(results), draw, label, 2.7)
