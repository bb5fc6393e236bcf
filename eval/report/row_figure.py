"""Parts of a row figure: one line a draft, a dot with its interval, names on the left, numbers on the right.

The vertical unit of such axes is the point, counted from the top.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.theme import NARROW, Look, place, sheet
from eval.schema import Difference, Estimate, TransferRow

ROW, HEAD, GAP = 18.0, 20.0, 9.0
# Room under the axes for its numbers and its label.
AXIS = 38.0
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Line:
    """One line of a figure; `draft` gives its colour, None leaves it plain."""

    y: float
    text: str
    draft: str | None


@dataclass
class Rows:
    """Lays headings and rows out from the top down; `payload` holds what each row shows.

    `clear` keeps headings out of the drawing too, where marks stand at their height.
    """

    y: float = 4.0
    sections: list[Line] = field(default_factory=list)
    titles: list[Line] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)
    payload: list[Any] = field(default_factory=list)
    clear: bool = False

    def _line(self, height: float, text: str, draft: str | None) -> Line:
        self.y += height
        return Line(self.y - height / 2, text, draft)

    def section(self, text: str) -> None:
        """A heading over several groups."""
        if self.sections:
            self.y += GAP
        self.sections.append(self._line(HEAD + 2, text, None))

    def title(self, text: str) -> None:
        """A heading over one group."""
        self.titles.append(self._line(HEAD, text, None))

    def row(self, text: str, draft: str | None) -> None:
        """One row."""
        self.rows.append(self._line(ROW, text, draft))


def names_width(look: Look, layout: Rows) -> float:
    """Points that the longest row name takes; headings may run over the drawing, rows may not."""
    longest = max(len(look.short(line.text)) for line in layout.rows)
    width = max(64.0, 18 + longest * look.size.text * 0.62)
    if layout.clear:
        width = max(width, 10 + max(len(line.text) for line in layout.titles) * look.size.text * 0.68)
    return min(width, 0.5 * look.size.width)


def row_axes(look: Look, layout: Rows, right: float) -> tuple[Figure, Axes]:
    """A figure and its axes with all names and headings written, `right` points left free for numbers."""
    top = 14.0
    figure = sheet(look, top + layout.y + AXIS)
    left = names_width(look, layout)
    ax = place(figure, left, top, look.size.width - left - right, layout.y)
    ax.set_ylim(layout.y, 0)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(4 if look.size is NARROW else 7, steps=[1, 2, 5, 10]))
    names(ax, look, layout)
    return figure, ax


def names(ax: Axes, look: Look, layout: Rows) -> None:
    """Write row names right-aligned at the axes' edge and headings from the figure's left edge."""
    left = names_width(look, layout)
    wide = int(look.size.width / (look.size.text * 0.62))
    for line in layout.rows:
        colour = look.colours["ink"] if line.draft is None else look.colour(line.draft)
        ax.annotate(
            look.short(line.text),
            (0, line.y),
            xycoords=("axes fraction", "data"),
            xytext=(-10, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=colour,
            annotation_clip=False,
        )
    for line, weight, role in [(t, "bold", "ink") for t in layout.titles] + [
        (s, "normal", "soft") for s in layout.sections
    ]:
        section = role == "soft"
        ax.annotate(
            line.text.upper() if section else look.short(line.text, min(60, wide - 4)),
            (0, line.y),
            xycoords=("axes fraction", "data"),
            xytext=(-left + 2, 0),
            textcoords="offset points",
            va="center",
            color=look.colours[role],
            fontweight=weight,
            fontsize=look.size.text - (1.5 if section else 0),
            annotation_clip=False,
            # A heading may reach over the drawing; what is under it gives way.
            bbox={"facecolor": look.colours["paper"], "edgecolor": "none", "pad": 1.5},
        )
    for line in layout.sections[1:]:
        ax.annotate(
            "",
            (1, line.y - HEAD / 2 - 3),
            xycoords=("axes fraction", "data"),
            xytext=(-left / (ax.bbox.width / ax.figure.dpi * 72), line.y - HEAD / 2 - 3),
            textcoords=("axes fraction", "data"),
            arrowprops={
                "arrowstyle": "-",
                "color": look.colours["line"],
                "lw": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


def dot(
    ax: Axes,
    look: Look,
    value: Estimate | Difference,
    y: float,
    draft: str,
    *,
    hollow: bool = False,
    size: float = 6.0,
) -> None:
    """A value and its interval; nothing where the value is undefined, no line where there is no interval."""
    if value["value"] is None:
        return
    colour = look.colour(draft)
    if value["low"] is not None and value["high"] is not None:
        ax.plot([value["low"], value["high"]], [y, y], color=colour, lw=1.8, solid_capstyle="round")
    ax.plot(
        [value["value"]],
        [y],
        marker=look.marker(draft),
        ms=size,
        mec=colour,
        mew=1.4,
        mfc=look.colours["paper"] if hollow else colour,
        color=colour,
    )


def margin(ax: Axes, look: Look, y: float, text: str, offset: float, role: str) -> None:
    """Text to the right of the axes."""
    ax.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(offset, 0),
        textcoords="offset points",
        va="center",
        color=look.colours[role],
        annotation_clip=False,
    )


def limits(
    values: Sequence[Estimate | Difference],
    bounds: tuple[float, float],
    include: float | None = None,
) -> tuple[float, float]:
    """Axis limits that hold every value and interval with a little air, within `bounds`."""
    found: list[float] = []
    for value in values:
        found += [x for x in (value["value"], value["low"], value["high"]) if x is not None]
    if include is not None:
        found.append(include)
    if not found:
        return max(0.0, bounds[0]), min(1.0, bounds[1])
    low, high = min(found), max(found)
    air = max(0.05 * (high - low), 0.02)
    return max(bounds[0], low - air), min(bounds[1], high + air)


def tree_name(spec: str) -> str:
    """A tree spec for people: of a file, its name without the folders; results.json has all of it."""
    kind, colon, body = spec.partition(":")
    return f"{kind}:{Path(body).name}" if kind in ("static", "sequoia") and colon else spec


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; an en dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign; a zero has none."""
    if value is None:
        return "–"
    text = f"{value:+.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text.replace("-", MINUS)


def percent(value: float | None) -> str:
    """A share as whole per cent."""
    return "–" if value is None else f"{value * 100:.0f} %".replace("-", MINUS)


def share(row: TransferRow | None, long: bool) -> str:
    """transfer as text, with its interval where there is room."""
    if row is None or row["value"] is None:
        return "undefined" if long else "–"
    if not long or row["low"] is None or row["high"] is None:
        return percent(row["value"])
    low, high = (f"{bound * 100:.0f}".replace("-", MINUS) for bound in (row["low"], row["high"]))
    return f"{percent(row['value'])}  [{low}, {high}]"
