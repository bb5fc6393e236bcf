"""How figures look: palettes, matplotlib settings, and one drawing as a PNG or as an SVG in the
colours of the page.

Figures are drawn in the light palette. In an SVG each of its colours becomes the CSS variable of
its role, so that the page decides between light and dark.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from draftsmith.core.io import atomic_file

_TEMPLATES = Path(__file__).parent / "templates"
_PALETTES = yaml.safe_load((_TEMPLATES / "palettes.yaml").read_text(encoding="utf-8"))
LIGHT: dict[str, str] = _PALETTES["light"]
DARK: dict[str, str] = _PALETTES["dark"]
# More markers than colours, so that no two drafts share both. The circle is the base draft's.
_MARKERS = ("s", "D", "^", "v", "P", "X", "h")
_FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
# Inches. CSS scales every figure; on a phone of 350 pixels its text is still readable.
WIDTH = 5.2
STYLE = _TEMPLATES / "figures.mplstyle"


@dataclass(frozen=True)
class Look:
    """A palette, and which of its roles each draft has."""

    colours: dict[str, str]
    roles: dict[str, str]

    def colour(self, draft: str) -> str:
        """The colour of a draft."""
        return self.colours[self.roles[draft]]

    def marker(self, draft: str) -> str:
        """The marker of a draft, so that colour is never the only difference."""
        if self.roles[draft] == "base":
            return "o"
        aligned = [name for name, role in self.roles.items() if role != "base"]
        return _MARKERS[aligned.index(draft) % len(_MARKERS)]


def roles_of(drafts: Sequence[str], base: str) -> dict[str, str]:
    """A role for every draft: the base is grey, the others take the six colours in turn."""
    aligned = [draft for draft in drafts if draft != base]
    roles = {draft: f"d{index % 6 + 1}" for index, draft in enumerate(aligned)}
    return {base: "base", **roles}


@contextmanager
def drawing(colours: dict[str, str]) -> Iterator[None]:
    """Matplotlib set up for a palette."""
    coloured: Any = {
        "figure.facecolor": colours["paper"],
        "text.color": colours["ink"],
        "axes.edgecolor": colours["line"],
        "grid.color": colours["line"],
        "axes.labelcolor": colours["soft"],
        "xtick.labelcolor": colours["soft"],
        "ytick.labelcolor": colours["soft"],
    }
    with matplotlib.rc_context(coloured, STYLE):
        yield


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=180, metadata={"Software": "draftsmith"})


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """A figure as an SVG element: text as text, colours as CSS variables, ids that no other figure
    has.

    `label` is what a screen reader says. Text in the drawing was escaped by matplotlib.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftsmith"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = "<svg" + buffer.getvalue().partition("<svg")[2]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for role, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"'DejaVu Sans'(, sans-serif)?", _FONTS, svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    return Markup(
        f'<svg {view.group(0)} role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{svg.split(">", 1)[1]}'
    )
