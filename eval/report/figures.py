"""Dot plots: one line per draft or set, with its name on the left, 95 % intervals, and a number on the right.

Each figure is a function of the results and a look; None if there is nothing to show.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.formats import number, percent, shortened, tree_name
from eval.report.theme import WIDTH, Look, drawing
from eval.results import Results
from eval.schema import Row

# Inches per line of a dot plot, and above and below the lines.
LINE, FRAME = 0.25, 0.75
NAME = 16  # characters of a name beside the dots
HEADING = 36


@dataclass(frozen=True)
class Line:
    """One line: a heading if it has no draft; else dots (hollow: out of distribution) and a number."""

    text: str
    draft: str | None = None
    dots: Sequence[tuple[Row | None, bool]] = field(default=())
    note: str = ""


def _dot_plot(
    ax: Axes, look: Look, lines: Sequence[Line], bounds: tuple[float, float], reference: float | None = None
) -> None:
    """Draw lines from the top down; x limits hold every interval, within `bounds`; a vertical line at `reference`."""
    held = [] if reference is None else [reference]
    for y, line in enumerate(lines):
        if line.draft is None:
            ax.annotate(
                shortened(line.text, HEADING), (0, y), xycoords=("axes fraction", "data"), fontweight="bold",
                va="center", color=look.colours["ink"], bbox={"facecolor": look.colours["paper"], "lw": 0, "pad": 1},
                zorder=5,
            )  # fmt: skip
            continue
        colour = look.colour(line.draft)
        for value, hollow in line.dots:
            if value is None or value["value"] is None:
                continue
            at = y + (0 if len(line.dots) == 1 else 0.16 if hollow else -0.16)
            held.append(value["value"])
            if value["low"] is not None and value["high"] is not None:
                held += [value["low"], value["high"]]
                ax.plot([value["low"], value["high"]], [at, at], color=colour, lw=1.8, solid_capstyle="round")
            face = look.colours["paper"] if hollow else colour
            # A mark at the end of the axis, as where everything is accepted, is drawn whole.
            mark = look.marker(line.draft)
            ax.plot(value["value"], at, mark, ms=5.5, mec=colour, mew=1.4, mfc=face, clip_on=False)
        ax.annotate(line.note, (1.02, y), xycoords=("axes fraction", "data"), va="center", color=look.colours["ink"])
    named = [(y, line) for y, line in enumerate(lines) if line.draft is not None]
    ax.set_yticks([y for y, _ in named], [shortened(line.text, NAME) for _, line in named])
    for label, (_, line) in zip(ax.get_yticklabels(), named, strict=True):
        assert line.draft is not None
        label.set_color(look.colour(line.draft))
    if reference is not None:
        ax.axvline(reference, color=look.colours["soft"], lw=1)
    if held:
        air = max(0.05 * (max(held) - min(held)), 0.02)
        ax.set_xlim(max(bounds[0], min(held) - air), min(bounds[1], max(held) + air))
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _plots(count: int, lines: int) -> tuple[Figure, list[Axes]]:
    """A figure of dot plots one above the other, each with room for so many lines."""
    figure = Figure(figsize=(WIDTH, count * (lines * LINE + FRAME)))
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def alpha_figure(results: Results, look: Look) -> Figure | None:
    """alpha of every draft on every set, ID first; a dashed line carries the base draft through each set."""
    temperatures = sorted(results.temperatures)
    sets = [(kind, domain) for kind in results.kinds for domain in results.domains(kind)]
    with drawing(look.colours):
        figure, axes = _plots(len(temperatures), len(sets) * (1 + len(results.drafts)))
        for ax, temperature in zip(axes, temperatures, strict=True):
            lines: list[Line] = []
            for kind, domain in sets:
                lines.append(Line(f"{domain} ({kind.upper()})"))
                for draft in results.drafts:
                    alpha = results.alpha(draft, domain, temperature)
                    lines.append(Line(draft, draft, [(alpha, kind == "ood")], number(alpha["value"])))
            _dot_plot(ax, look, lines, (-0.01, 1.01))
            for index, (_, domain) in enumerate(sets):
                base = results.alpha(results.base, domain, temperature)["value"]
                if base is not None:
                    top = index * (1 + len(results.drafts)) + 1
                    ends = [top - 0.4, top + len(results.drafts) - 0.6]
                    ax.plot([base] * 2, ends, color=look.colours["base"], lw=1, ls=(0, (2, 2)))
            ax.set_xlabel(f"expected acceptance α, T = {temperature:g}")
    return figure


def gain_figure(results: Results, look: Look) -> Figure | None:
    """What alignment changed per aligned draft and set, and on the right the share of the ID gain that transferred."""
    if not results.aligned:
        return None
    temperatures = sorted(results.temperatures)
    with drawing(look.colours):
        figure, axes = _plots(len(temperatures), len(results.aligned) * (1 + len(results.domains())))
        for ax, temperature in zip(axes, temperatures, strict=True):
            lines: list[Line] = []
            for draft in results.aligned:
                lines.append(Line(draft))
                for domain in results.domains():
                    kept = results.transfer(draft, domain, temperature)
                    note = "ID" if kept is None else percent(kept["value"])
                    gain = results.gain(draft, domain, temperature)
                    lines.append(Line(domain, draft, [(gain, kept is not None)], note))
            _dot_plot(ax, look, lines, (-1.0, 1.0), reference=0.0)
            if results.domains("ood"):
                ax.annotate("transfer", (1.02, -0.8), xycoords=("axes fraction", "data"), color=look.colours["soft"])
            ax.set_xlabel(f"gain in α over {shortened(results.base, 14)}, T = {temperature:g}")
    return figure


def tau_figure(results: Results, look: Look) -> Figure | None:
    """Tokens per target call and, if timed, speedup, by method: ID and OOD each pooled over their sets."""
    kinds = results.kinds
    panels = {"tau": "tokens per target call, τ", "speedup": "speed, the target alone = 1"}
    panels = {figure: title for figure, title in panels.items() if any(results.rows(figure))}
    with drawing(look.colours):
        figure, axes = _plots(len(panels), len(results.methods) * (1 + len(results.drafts)))
        for ax, (name, title) in zip(axes, panels.items(), strict=True):
            lines: list[Line] = []
            for tree, verifier in results.methods:
                lossy = "" if results.lossless(verifier) else " · lossless: false"
                lines.append(Line(f"{tree_name(tree)} · {verifier}{lossy}"))
                for draft in results.drafts:
                    rows = [results.figure(name, draft, kind, None, tree, verifier) for kind in kinds]
                    note = " / ".join(number(row["value"] if row else None, 2) for row in rows)
                    dots = [(row, kind == "ood") for row, kind in zip(rows, kinds, strict=True)]
                    lines.append(Line(draft, draft, dots, note))
            _dot_plot(ax, look, lines, (0.0, 1e9), reference=1.0)
            ax.set_xlabel(f"{title} (T = {results.top_temperature:g})")
            if len(kinds) > 1:
                ax.annotate("ID / OOD", (1.02, -0.8), xycoords=("axes fraction", "data"), color=look.colours["soft"])
    return figure
