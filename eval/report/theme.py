"""How figures are drawn: sizes, colours, and one drawing turned into a PNG and an SVG that follows the
page's theme.

Colours are drawn as roles. A PNG gets the light palette; in an SVG every role becomes a CSS variable,
so that the page decides. Lengths are points (1/72 inch), which are also the units of the SVG.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith_core.io import atomic_file

# After Okabe and Ito (2008), told apart with any kind of colour vision; the base draft is always grey.
LIGHT = {
    "ink": "#1c2024",
    "soft": "#60666d",
    "line": "#d9dce0",
    "paper": "#ffffff",
    "base": "#868c94",
    "d1": "#0072b2",
    "d2": "#d55e00",
    "d3": "#008a66",
    "d4": "#b5508c",
    "d5": "#9a7500",
    "d6": "#2f93c4",
}
DARK = {
    "ink": "#e8eaed",
    "soft": "#a2a9b2",
    "line": "#363b42",
    "paper": "#14171a",
    "base": "#8f969f",
    "d1": "#56b4e9",
    "d2": "#ff9347",
    "d3": "#35cfa0",
    "d4": "#e89ac7",
    "d5": "#e6c229",
    "d6": "#9fd3f0",
}
# Colours that occur nowhere else, drawn into the SVG and replaced there.
_MARKS = {role: f"#fe01{index:02x}" for index, role in enumerate(LIGHT)}
_MARKERS = ("o", "s", "D", "^", "v", "P")
FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


@dataclass(frozen=True)
class Size:
    """A figure's width and text, in points; `label` is the longest name in characters."""

    name: str
    width: float
    text: float
    label: int


WIDE = Size("wide", 720, 11, 30)
NARROW = Size("narrow", 350, 11, 15)


@dataclass(frozen=True)
class Look:
    """One size in one palette, and the colour and marker of every draft."""

    size: Size
    colours: dict[str, str]
    roles: dict[str, str]

    def colour(self, draft: str) -> str:
        """The colour of a draft."""
        return self.colours[self.roles[draft]]

    def marker(self, draft: str) -> str:
        """The marker of a draft, so that colour is never the only difference."""
        role = self.roles[draft]
        return "o" if role == "base" else _MARKERS[(int(role[1:]) - 1) % len(_MARKERS)]

    def short(self, text: str, longest: int | None = None) -> str:
        """A name cut in its middle to fit; tables hold the whole one."""
        longest = longest or self.size.label
        if len(text) <= longest:
            return text
        tail = (longest - 1) // 2
        return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def roles_of(drafts: Sequence[str], base: str) -> dict[str, str]:
    """A role for every draft: the base is grey, the others take the six colours in turn."""
    aligned = [draft for draft in drafts if draft != base]
    return {base: "base"} | {draft: f"d{index % 6 + 1}" for index, draft in enumerate(aligned)}


@contextmanager
def drawing(look: Look) -> Iterator[None]:
    """Matplotlib set up for one look. Names are drawn as they are: no mathematics between dollar signs."""
    ink, soft, line = (look.colours[role] for role in ("ink", "soft", "line"))
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": look.size.text,
        "text.parse_math": False,
        "text.color": ink,
        "axes.labelcolor": soft,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.labelsize": look.size.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": line,
        "grid.linewidth": 0.8,
        "xtick.color": line,
        "xtick.labelcolor": soft,
        "ytick.color": line,
        "ytick.labelcolor": soft,
        "xtick.labelsize": look.size.text - 0.5,
        "ytick.labelsize": look.size.text - 0.5,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
    with matplotlib.rc_context(settings):
        yield


def sheet(look: Look, height: float) -> Figure:
    """An empty figure of the look's width."""
    paper = look.colours["paper"]
    return Figure(figsize=(look.size.width / 72, height / 72), facecolor=paper, edgecolor="none")


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place given in points from the top left corner."""
    total_width, total_height = (inches * 72 for inches in figure.get_size_inches())
    return figure.add_axes(
        (
            left / total_width,
            1 - (top + height) / total_height,
            width / total_width,
            height / total_height,
        )
    )


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=144, metadata={"Software": "draftsmith"})


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """A figure as an SVG element: text as text, colours as CSS variables, ids that no other figure has.

    `label` is what a screen reader says. Text in the drawing was escaped by matplotlib.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftsmith"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for role, mark in _MARKS.items():
        svg = svg.replace(mark, f"var(--{role})")
    svg = re.sub(r"'DejaVu Sans'(, sans-serif)?", FONTS, svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    start = re.search(r'viewBox="[^"]*"', svg)
    assert start is not None
    head, rest = svg.split(">", 1)
    del head
    return Markup(
        f'<svg class="figure-{escape(name.rsplit("-", 1)[-1])}" {start.group(0)} role="img" '
        f'aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'
    )


def light(size: Size, roles: dict[str, str]) -> Look:
    """The look of a PNG."""
    return Look(size, LIGHT, roles)


def themed(size: Size, roles: dict[str, str]) -> Look:
    """The look of an inline SVG."""
    return Look(size, _MARKS, roles)
