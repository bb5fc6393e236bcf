"""The figures of a report: dot plots with a line per draft and set, and panels with a curve per
draft.

Each figure is a function of the results and a look; None if there is nothing to show.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.eval.diagnosis.rows import CONTEXT, EDGES, bin_names
from draftsmith.eval.formats import KIND_TITLES, kept, number, shortened, tree_name
from draftsmith.eval.report.theme import WIDTH, Look, drawing
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import Row
from draftsmith.eval.seeds import draft_of, shown

# Inches per line of a dot plot.
LINE = 0.25
# Inches above and below the lines.
FRAME = 0.75
PANEL = 2.3  # inches of a panel's height
NAME = 16  # characters of a name beside the dots
HEADING = 36
LEGEND_LINE = 0.23  # inches
# Coordinates of what stands beside the line `y` of a dot plot.
BESIDE = ("axes fraction", "data")
SHARES = (-0.03, 1.03)  # of an axis from 0 to 1, with whole marks at its ends
# A panel, or a curve, of fewer points than this says no more than its row of a table.
LEAST_POINTS = 3


@dataclass(frozen=True)
class Line:
    """One line of a dot plot: dots (hollow: out of distribution), a dashed mark, and a number. A
    line without a draft is a heading.
    """

    text: str
    draft: str | None = None
    dots: Sequence[Row | None] = ()
    note: str = ""
    dashed: float | None = None


def _dot_plots(
    results: ResultsTable,
    look: Look,
    panels: Sequence[tuple[str, Sequence[Line]]],
    bounds: tuple[float, float],
    *,
    reference: float | None = None,
    notes: str = "",
) -> Figure | None:
    """Draw panels of (label, lines) one above the other, without those of few points.

    bounds: of the x axis, which holds every interval. reference: x of a vertical line. notes:
    stand above the numbers on the right.
    """
    panels = [panel for panel in panels if _count_dots(panel[1]) >= LEAST_POINTS]
    if not panels:
        return None
    height = sum(len(lines) * LINE + FRAME for _, lines in panels)
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, (label, lines) in zip(axes, panels, strict=True):
            values = [] if reference is None else [reference]
            names = {}
            for y, line in enumerate(lines):
                if line.draft is None:
                    _heading(ax, look, y, line.text)
                else:
                    names[y] = shortened(line.text, NAME)
                    values += _dots(results, ax, look, y, line, line.draft)
            ax.set_yticks(list(names), list(names.values()))
            for text, y in zip(ax.get_yticklabels(), names, strict=True):
                text.set_color(look.colour(lines[y].draft or ""))
            if reference is not None:
                ax.axvline(reference, color=look.colours["soft"], lw=1)
            if values:
                low = min(values)
                high = max(values)
                air = max(0.05 * (high - low), 0.02)
                ax.set_xlim(max(bounds[0], low - air), min(bounds[1], high + air))
            ax.set_ylim(len(lines) - 0.4, -0.6)
            ax.grid(visible=False, axis="y")
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            ax.set_xlabel(label)
            ax.annotate(notes, (1.02, -0.8), xycoords=BESIDE, color=look.colours["soft"])
    return figure


def _count_dots(lines: Sequence[Line]) -> int:
    rows = filter(None, chain.from_iterable(line.dots for line in lines))
    return sum(row["value"] is not None for row in rows)


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


def _dots(
    results: ResultsTable, ax: Axes, look: Look, y: int, line: Line, draft: str
) -> list[float]:
    """Draw the dots of a line, with a stroke for every run of the draft; return all values that the
    axis must hold.
    """
    colour = look.colour(draft)
    values = []
    if line.dashed is not None:
        ends = [y - 0.5, y + 0.5]
        ax.plot([line.dashed] * 2, ends, color=look.colours["base"], lw=1, ls=(0, (2, 2)))
    for row in line.dots:
        if row is None or row["value"] is None:
            continue
        hollow = row["kind"] == "ood"
        side = 0.16 if hollow else -0.16
        at = y if len(line.dots) == 1 else y + side
        runs = results.of_runs(row, draft)
        ax.plot(runs, [at] * len(runs), "|", ms=9, mec=colour, mew=1.1)
        values += [row["value"], *runs]
        if row["low"] is not None and row["high"] is not None:
            ends = [row["low"], row["high"]]
            values += ends
            ax.plot(ends, [at, at], color=colour, lw=1.8, solid_capstyle="round")
        face = look.colours["paper"] if hollow else colour
        # A mark at the end of the axis, as where everything is accepted, is drawn whole.
        mark = look.marker(draft)
        ax.plot(row["value"], at, mark, ms=5.5, mec=colour, mew=1.4, mfc=face, clip_on=False)
    ax.annotate(line.note, (1.02, y), xycoords=BESIDE, va="center", color=look.colours["ink"])
    return values


def alpha_figure(results: ResultsTable, look: Look) -> Figure | None:
    """alpha of every draft on every set, ID first; a dashed line carries the base draft through
    each set.
    """
    panels = []
    for temperature in sorted(results.temperatures):
        lines: list[Line] = []
        for domain in results.domains():
            base = None
            if results.aligned:
                base = results.alpha(results.base, domain, temperature)["value"]
            kind = results.kind(domain).upper()
            lines.append(Line(f"{domain} ({kind})"))
            for draft in results.shown:
                row = results.alpha(draft, domain, temperature)
                lines.append(Line(draft, draft, [row], number(row["value"]), base))
        panels.append((f"expected acceptance α, T = {temperature:g}", lines))
    return _dot_plots(results, look, panels, (-0.01, 1.01))


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
                gain = results.gain(draft, domain, temperature)
                transfer = results.transfer(draft, domain, temperature)
                note = "ID" if transfer is None else kept(transfer, gain)
                lines.append(Line(domain, draft, [gain], note))
        panels.append((f"gain in α over {shortened(results.base, 14)}, T = {temperature:g}", lines))
    notes = "transfer" if results.domains("ood") else ""
    return _dot_plots(results, look, panels, (-1.0, 1.0), reference=0.0, notes=notes)


def tau_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Tokens per target call and, if timed, speedup, by method: ID and OOD each pooled over their
    sets.
    """
    panels = []
    titles = {"tau": "tokens per target call, τ", "speedup": "speed, the target alone = 1"}
    for name, title in titles.items():
        lines: list[Line] = []
        for tree, verifier in results.methods if any(results.rows(name)) else ():
            lossy = "" if results.lossless(verifier) else " · lossless: false"
            lines.append(Line(f"{tree_name(tree)} · {verifier}{lossy}"))
            for draft in shown(results.drafts_of((tree, verifier))):
                rows = []
                for kind in results.kinds:
                    rows.append(results.figure(name, draft, kind, None, tree, verifier))
                note = " / ".join(number(row["value"] if row else None, 2) for row in rows)
                lines.append(Line(draft, draft, rows, note))
        if lines:
            panels.append((f"{title} (T = {results.top_temperature:g})", lines))
    notes = "ID / OOD" if len(results.kinds) > 1 else ""
    return _dot_plots(results, look, panels, (0.0, 1e9), reference=1.0, notes=notes)


def _panels(
    look: Look,
    titles: dict[str, str],
    draw: Callable[[Axes, str], object],
    label: str,
) -> Figure:
    """Panels two abreast, drawn by their key, with one legend and one label of the horizontal
    axis.
    """
    columns = min(2, len(titles))
    lines = -(-len(titles) // columns)
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, 0.6 + PANEL * lines))
        axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
        for ax, (key, title) in zip(axes, titles.items(), strict=False):
            draw(ax, key)
            ax.set_title(shortened(title, 22))
            ax.tick_params(labelbottom=True, labelleft=True)
        for ax in axes[len(titles) :]:
            ax.set_visible(False)
        figure.supxlabel(label, color=look.colours["soft"], fontsize=11)
        # A draft may be missing from the first panel and not from others.
        entries: dict[str, Artist] = {}
        for ax in axes:
            handles, texts = ax.get_legend_handles_labels()
            entries.update(zip(texts, handles, strict=True))
        for abreast in (3, 2, 1):
            legend = figure.legend(
                entries.values(), entries.keys(), loc="outside upper left", ncols=abreast
            )
            if abreast == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()
        # The panels stay as high as they are, however many drafts are named above them.
        legend_lines = -(-len(entries) // abreast)
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE * (legend_lines - 1))
    return figure


def _line(ax: Axes, look: Look, draft: str, x: Sequence[float], y: Sequence[float]) -> None:
    label = shortened(draft_of(draft), 16)
    if x:
        ax.plot(x, y, color=look.colour(draft), label=label, marker=look.marker(draft), ms=4.5)


def _curve(
    ax: Axes,
    look: Look,
    draft: str,
    points: Iterable[tuple[float | None, Row]],
) -> None:
    """Draw figures over x with their intervals, without points that are not defined."""
    xs: list[float] = []
    values: list[float] = []
    for x, row in points:
        if x is None or row["value"] is None:
            continue
        xs.append(x)
        values.append(row["value"])
        if row["low"] is not None and row["high"] is not None:
            ends = [row["low"], row["high"]]
            ax.plot([x, x], ends, color=look.colour(draft), lw=1.2, alpha=0.5)
    _line(ax, look, draft, xs, values)


def _by_at(rows: Sequence[Row]) -> list[tuple[float | None, Row]]:
    return [(row["at"], row) for row in rows]


def training_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Held-out alpha by step of every draft's training."""
    curves = {}
    for draft in results.drafts:
        curve = results.heldout(draft)
        if len(curve) >= LEAST_POINTS:
            curves[draft] = curve

    def draw(ax: Axes, _: str) -> None:
        for draft, curve in curves.items():
            _line(ax, look, draft, [step for step, _ in curve], [alpha for _, alpha in curve])

    return _panels(look, {"": ""}, draw, "step of the training") if curves else None


def _sets(results: ResultsTable) -> dict[str, str]:
    titles = {name: name for name in results.domains("id")}
    return titles | {name: f"{name} (OOD)" for name in results.domains("ood")}


def accept_figure(results: ResultsTable, look: Look) -> Figure | None:
    """accept@d against depth, one panel per set, for the first method."""
    if not results.methods:
        return None

    tree, verifier = results.methods[0]
    drafts = results.drafts_of((tree, verifier))

    def series(draft: str, domain: str) -> list[Row]:
        rows = results.series("accept", draft, domain, None, tree, verifier)
        return [row for row in rows if row["value"] is not None]

    def draw(ax: Axes, domain: str) -> None:
        for draft in drafts:
            _curve(ax, look, draft, _by_at(series(draft, domain)))
        ax.set_ylim(SHARES)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))

    titles = _sets(results)
    for name in list(titles):
        if all(len(series(draft, name)) < LEAST_POINTS for draft in drafts):
            del titles[name]
    return _panels(look, titles, draw, "depth d") if titles else None


def context_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Acceptance against the tokens before a position, at the highest temperature; None if all
    texts are short.
    """
    parts = [f"{CONTEXT}: {name}" for name in bin_names(CONTEXT)]

    def draw(ax: Axes, kind: str) -> None:
        for draft in results.shown:
            rows = {row["part"]: row for row in results.series("alpha_by_part", draft, kind)}
            points = [(x, rows[part]) for x, part in enumerate(parts) if part in rows]
            _curve(ax, look, draft, points)
        ax.set_ylim(SHARES)
        ax.set_xticks(range(len(parts)), ["0", *map(str, EDGES[CONTEXT])], fontsize="x-small")

    if not any(row["part"] in parts[1:] for row in results.rows("alpha_by_part")):
        return None
    return _by_kind(results, look, draw, "alpha_by_part", "tokens before, from")


def calibration_figure(results: ResultsTable, look: Look) -> Figure | None:
    """Confidence of the draft against acceptance, at the highest temperature; the diagonal is a
    calibrated draft.
    """

    def draw(ax: Axes, kind: str) -> None:
        ax.plot([0, 1], [0, 1], color=look.colours["line"], lw=1)
        for draft in results.drafts:
            sure = [row["value"] for row in results.series("confidence", draft, kind)]
            taken = results.series("acceptance", draft, kind)
            _curve(ax, look, draft, zip(sure, taken, strict=True))
        ax.set_ylim(SHARES)

    return _by_kind(results, look, draw, "confidence", "confidence of the draft")


def _by_kind(
    results: ResultsTable, look: Look, draw: Callable[[Axes, str], None], needs: str, label: str
) -> Figure | None:
    """A panel for each kind of sets at the highest temperature; None if there are no rows of the
    figure `needs`.
    """
    titles: dict[str, str] = {kind: KIND_TITLES[kind] for kind in results.kinds}
    label = f"{label}, T = {results.top_temperature:g}"
    return _panels(look, titles, draw, label) if any(results.rows(needs)) else None
