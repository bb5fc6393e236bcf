"""The figures of a report: dot plots with a line per draft and set.

Each figure is a function of the results and a look; None if there is nothing to show.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.eval.formats import (
    named_set,
    number,
    shortened,
    tree_name,
    with_interval,
)
from draftsmith.eval.report.theme import WIDTH, Look, drawing
from draftsmith.eval.results_table import FigureRow, ResultsTable

# Inches per line of a dot plot, and above and below the lines.
LINE = 0.25
FRAME = 0.75
NAME = 16  # characters of a name beside the dots
HEADING = 36
# Coordinates of what stands beside the line `y` of a dot plot.
BESIDE = ("axes fraction", "data")
# A panel of fewer points than this says no more than its row of a table.
LEAST_POINTS = 3


class Drawn(NamedTuple):
    """A figure, and its values as text for those who cannot see it."""

    figure: Figure
    text: str


class Line(NamedTuple):
    """One line of a dot plot: dots (hollow: out of distribution), a dashed mark, and a number. A
    line without a draft is a heading.
    """

    text: str
    draft: str | None = None
    dots: Sequence[FigureRow] = ()
    note: str = ""
    dashed: float | None = None


class Panel(NamedTuple):
    """The lines of a dot plot, and the label of its axis."""

    label: str
    lines: Sequence[Line]


def alpha_figure(results: ResultsTable, look: Look) -> Drawn | None:
    """alpha of every draft on every set, ID first; a dashed line carries the base draft through
    each set.
    """
    panels = []
    for temperature in sorted(results.temperatures, reverse=True):
        lines: list[Line] = []
        for domain in results.domains():
            base = results.alpha(results.base, domain, temperature)
            lines.append(Line(named_set(base)))
            dashed = base["value"] if results.aligned else None
            for draft in results.drafts:
                row = results.alpha(draft, domain, temperature)
                lines.append(Line(draft, draft, [row], number(row["value"]), dashed))
        label = f"expected acceptance α, T = {temperature:g}"
        panels.append(Panel(label, lines))
    return _dot_plots(look, panels, (-0.01, 1.01))


def gain_figure(results: ResultsTable, look: Look) -> Drawn | None:
    """Gain in alpha per aligned draft and set."""
    panels = []
    for temperature in sorted(results.temperatures, reverse=True) if results.aligned else ():
        lines: list[Line] = []
        for draft in results.aligned:
            lines.append(Line(draft))
            for domain in results.domains():
                where = {"draft": draft, "set": domain, "temperature": temperature}
                rows = results.where(figure="gain", part=None, **where)
                note = " / ".join(number(row["value"], sign=True) for row in rows)
                lines.append(Line(domain, draft, rows, note))
        label = f"gain in α over {shortened(results.base, 14)}, T = {temperature:g}"
        panels.append(Panel(label, lines))
    return _dot_plots(look, panels, (-1.0, 1.0), reference=0.0)


def tau_figure(results: ResultsTable, look: Look) -> Drawn | None:
    """Tokens per target call and, if timed, speedup, by method: ID and OOD each pooled over their
    sets.
    """
    panels = []
    titles = {"tau": "tokens per target call, τ", "speedup": "speed, the target alone = 1"}
    for name, title in titles.items():
        pools = {"figure": name, "set": None, "temperature": results.top_temperature}
        lines: list[Line] = []
        for tree, rule in results.methods:
            lossy = "" if results.lossless(rule) else " · lossless: false"
            lines.append(Line(f"{tree_name(tree)} · {rule}{lossy}"))
            for draft in results.drafts:
                rows = results.where(**pools, draft=draft, tree=tree, rule=rule)
                note = " / ".join(number(row["value"], 2) for row in rows)
                if rows:
                    lines.append(Line(draft, draft, rows, note))
        label = f"{title} (T = {results.top_temperature:g})"
        panels.append(Panel(label, lines))
    notes = "ID / OOD" if len(results.kinds) > 1 else ""
    return _dot_plots(look, panels, (0.0, 1e9), reference=1.0, notes=notes)


def _dot_plots(
    look: Look,
    panels: Sequence[Panel],
    bounds: tuple[float, float],
    *,
    reference: float | None = None,
    notes: str = "",
) -> Drawn | None:
    """Draw panels one above the other, without those of few points.

    bounds: of the x axis, which holds every interval. reference: x of a vertical line. notes:
    stand above the numbers on the right.
    """
    panels = [panel for panel in panels if len(_dots_of(panel)) >= LEAST_POINTS]
    if not panels:
        return None
    height = FRAME * len(panels) + LINE * sum(len(panel.lines) for panel in panels)
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, panel in zip(axes, panels, strict=True):
            names = {}
            for y, line in enumerate(panel.lines):
                if line.draft is None:
                    _heading(ax, look, y, line.text)
                else:
                    names[y] = shortened(line.text, NAME)
                    _dots(ax, look, y, line, line.draft)
            ax.set_yticks(list(names), list(names.values()))
            if reference is not None:
                ax.axvline(reference, color=look.colours["soft"], lw=1)
            left, right = ax.get_xlim()
            ax.set_xlim(max(bounds[0], left), min(bounds[1], right))
            ax.set_ylim(len(panel.lines) - 0.4, -0.6)
            ax.grid(visible=False, axis="y")
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            ax.set_xlabel(panel.label)
            ax.annotate(notes, (1.02, -0.8), xycoords=BESIDE, color=look.colours["soft"])
    return Drawn(figure, " ".join(map(_in_text, panels)))


def _dots_of(panel: Panel) -> list[FigureRow]:
    rows = chain.from_iterable(line.dots for line in panel.lines)
    return [row for row in rows if row["value"] is not None]


def _in_text(panel: Panel) -> str:
    said = []
    for line in panel.lines:
        figures = " / ".join(with_interval(row) for row in line.dots)
        said.append(f"{line.text} {figures}".rstrip())
    return f"{panel.label}: {'; '.join(said)}."


def _heading(ax: Axes, look: Look, y: int, text: str) -> None:
    ax.annotate(
        shortened(text, HEADING),
        (0, y),
        xycoords=BESIDE,
        fontweight="bold",
        va="center",
        bbox={"facecolor": look.colours["paper"], "lw": 0, "pad": 1},
        zorder=5,
        color=look.colours["ink"],
    )


def _dots(ax: Axes, look: Look, y: int, line: Line, draft: str) -> None:
    """Draw the dots of a line, with strokes for the lowest and highest training seed."""
    colour = look.colour(draft)
    if line.dashed is not None:
        ends = [y - 0.5, y + 0.5]
        ax.plot([line.dashed] * 2, ends, color=look.colours["base"], lw=1, ls=(0, (2, 2)))
    for row in line.dots:
        if row["value"] is None:
            continue
        hollow = row["kind"] == "ood"
        side = 0.16 if hollow else -0.16
        at = y if len(line.dots) == 1 else y + side
        if row["seeds"] is not None:
            ax.plot([row["seed_low"], row["seed_high"]], [at, at], "|", ms=9, mec=colour, mew=1.1)
        if row["low"] is not None:
            ends = [row["low"], row["high"]]
            ax.plot(ends, [at, at], color=colour, lw=1.8, solid_capstyle="round")
        face = look.colours["paper"] if hollow else colour
        # A mark at the end of the axis, as where everything is accepted, is drawn whole.
        mark = look.marker(draft)
        ax.plot(row["value"], at, mark, ms=5.5, mec=colour, mew=1.4, mfc=face, clip_on=False)
    ax.annotate(line.note, (1.02, y), xycoords=BESIDE, va="center", color=look.colours["ink"])
