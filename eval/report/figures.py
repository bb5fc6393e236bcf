"""Dot plots: one line per draft or set, with its name on the left, 95 % intervals, and a number on the right.

Each figure is a function of the results and a look; None if there is nothing to show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.formats import kept, number, shortened, tree_name
from eval.report.theme import WIDTH, Look, drawing
from eval.results import Results
from eval.schema import Row

# Inches per line of a dot plot, and above and below the lines.
LINE, FRAME = 0.25, 0.75
NAME = 16  # characters of a name beside the dots
HEADING = 36


@dataclass(frozen=True)
class Line:
    """One line: a heading if it has no draft; else dots (hollow: out of distribution), a dashed mark, and a number."""

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
    """Draw panels of (label, lines) one above the other. The x limits hold every interval, within `bounds`; a vertical
    line stands at `reference`, and `notes` above the numbers on the right.
    """
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, sum(len(lines) * LINE + FRAME for _, lines in panels)))
        for ax, (label, lines) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
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
            ax.annotate(notes, (1.02, -0.8), xycoords=("axes fraction", "data"), color=look.colours["soft"])
    return figure


def _draw(ax: Axes, look: Look, y: int, line: Line) -> list[float]:
    """Draw one line and return the values on it."""
    place = ("axes fraction", "data")
    if line.draft is None:
        box = {"facecolor": look.colours["paper"], "lw": 0, "pad": 1}
        text = shortened(line.text, HEADING)
        ax.annotate(text, (0, y), xycoords=place, fontweight="bold", va="center", bbox=box, zorder=5,
                    color=look.colours["ink"])  # fmt: skip
        return []
    colour, values = look.colour(line.draft), []
    if line.dashed is not None:
        ax.plot([line.dashed] * 2, [y - 0.5, y + 0.5], color=look.colours["base"], lw=1, ls=(0, (2, 2)))
    for row in line.dots:
        if row is None or row["value"] is None:
            continue
        hollow = row["kind"] == "ood"
        at = y + (0 if len(line.dots) == 1 else 0.16 if hollow else -0.16)
        values.append(row["value"])
        if row["low"] is not None and row["high"] is not None:
            values += [row["low"], row["high"]]
            ax.plot([row["low"], row["high"]], [at, at], color=colour, lw=1.8, solid_capstyle="round")
        face = look.colours["paper"] if hollow else colour
        # A mark at the end of the axis, as where everything is accepted, is drawn whole.
        mark = look.marker(line.draft)
        ax.plot(row["value"], at, mark, ms=5.5, mec=colour, mew=1.4, mfc=face, clip_on=False)
    ax.annotate(line.note, (1.02, y), xycoords=place, va="center", color=look.colours["ink"])
    return values


def alpha_figure(results: Results, look: Look) -> Figure | None:
    """alpha of every draft on every set, ID first; a dashed line carries the base draft through each set."""
    panels = []
    for temperature in sorted(results.temperatures):
        lines: list[Line] = []
        for domain in results.domains():
            base = results.alpha(results.base, domain, temperature)["value"]
            alphas = [results.alpha(draft, domain, temperature) for draft in results.drafts]
            lines.append(Line(f"{domain} ({results.kind(domain).upper()})"))
            lines += [Line(row["draft"], row["draft"], [row], number(row["value"]), base) for row in alphas]
        panels.append((f"expected acceptance α, T = {temperature:g}", lines))
    return _dot_plots(look, panels, (-0.01, 1.01))


def gain_figure(results: Results, look: Look) -> Figure | None:
    """What alignment changed per aligned draft and set, and on the right what of the ID gain transferred."""
    if not results.aligned:
        return None
    panels = []
    for temperature in sorted(results.temperatures):
        lines: list[Line] = []
        for draft in results.aligned:
            lines.append(Line(draft))
            for domain in results.domains():
                gain, transfer = (get(draft, domain, temperature) for get in (results.gain, results.transfer))
                lines.append(Line(domain, draft, [gain], "ID" if transfer is None else kept(transfer, gain)))
        panels.append((f"gain in α over {shortened(results.base, 14)}, T = {temperature:g}", lines))
    notes = "transfer" if results.domains("ood") else ""
    return _dot_plots(look, panels, (-1.0, 1.0), reference=0.0, notes=notes)


def tau_figure(results: Results, look: Look) -> Figure | None:
    """Tokens per target call and, if timed, speedup, by method: ID and OOD each pooled over their sets."""
    panels = []
    for name, title in (("tau", "tokens per target call, τ"), ("speedup", "speed, the target alone = 1")):
        lines: list[Line] = []
        for tree, verifier in results.methods if any(results.rows(name)) else ():
            lossy = "" if results.lossless(verifier) else " · lossless: false"
            lines.append(Line(f"{tree_name(tree)} · {verifier}{lossy}"))
            for draft in results.drafts:
                rows = [results.figure(name, draft, kind, None, tree, verifier) for kind in results.kinds]
                note = " / ".join(number(row["value"] if row else None, 2) for row in rows)
                lines.append(Line(draft, draft, rows, note))
        if lines:
            panels.append((f"{title} (T = {results.top_temperature:g})", lines))
    notes = "ID / OOD" if len(results.kinds) > 1 else ""
    return _dot_plots(look, panels, (0.0, 1e9), reference=1.0, notes=notes) if panels else None
