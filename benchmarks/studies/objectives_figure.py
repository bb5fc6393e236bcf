"""The picture of objectives: what a gain in distribution cost out of it, by objective and
learning rate.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.core.io import JsonObject
from draftsmith.eval.report.theme import DARK, LIGHT, Look, drawing, roles_of, write_png

# Those with a colour; with more, none could be told apart. The others are drawn in grey.
COLOURED = ("fkl", "ce", "jsd", "tvd", "lk_alpha", "rkl")
PATHS = {"": LIGHT, "-dark": DARK}
WIDTH, HEIGHT = 10.0, 4.6  # inches


def write_pictures(results: JsonObject, out: Path, name: str) -> None:
    """OUT/NAME.png and NAME-dark.png."""
    for suffix, colours in PATHS.items():
        look = Look(colours, roles_of(COLOURED, "base"))
        write_png(picture(results, look), out / f"{name}{suffix}.png")


def picture(results: JsonObject, look: Look) -> Figure:
    """alpha ID (x) and OOD (y) at T = 1, seed 0: one line per objective, one mark per rate, larger
    with the rate.
    """
    own = results["domains"][0]
    rates = [f"{rate:g}" for rate in sorted(results["options"]["rates"])]
    grey = [name for name in results["by_rate"] if name not in COLOURED]
    coloured = [name for name in COLOURED if name in results["by_rate"]]
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        ax = figure.subplots()
        ends = {}
        for name in [*grey, *coloured]:
            by_rate = results["by_rate"][name]
            tried = [by_rate[rate] for rate in rates]
            x = [at[own] for at in tried]
            y = [at["ood"] for at in tried]
            _draw(ax, x, y, name, look)
            if name in COLOURED:
                ends[name] = (x[-1], y[-1])
        base = results["figures"]["1"]["base"]
        point = (base[own]["alpha"]["value"], base["ood"]["alpha"]["value"])
        _draw_base(ax, point, look)
        ax.set_xlabel(
            f"expected acceptance α in distribution ({own}), T = 1; marks grow with the learning "
            f"rate: {', '.join(rates)}"
        )
        ax.set_ylabel("α out of distribution")
        _name_ends(ax, ends, look)
        return figure


def _draw(ax: Axes, x: Sequence[float], y: Sequence[float], name: str, look: Look) -> None:
    """The line of an objective."""
    known = name in COLOURED
    colour = look.colour(name) if known else look.colours["line"]
    order = 3 if known else 2
    ax.plot(x, y, color=colour, lw=1.8 if known else 1.2, zorder=order)
    sizes = [14 + 26 * i for i in range(len(x))]
    marker = look.marker(name) if known else "o"
    ax.scatter(x, y, s=sizes, marker=marker, color=colour, zorder=order)


def _draw_base(ax: Axes, point: tuple[float, float], look: Look) -> None:
    """The draft that training began with."""
    colours = look.colours
    ax.axhline(point[1], color=colours["base"], lw=1, ls=(0, (2, 2)), zorder=1)
    ax.scatter([point[0]], [point[1]], s=60, color=colours["base"], zorder=4)
    ax.annotate(
        "base draft", point, xytext=(8, 5), textcoords="offset points", color=colours["soft"]
    )


def _name_ends(ax: Axes, ends: Mapping[str, tuple[float, float]], look: Look) -> None:
    """Name the lines on the right, one below another."""
    low, high = ax.get_ylim()
    spread = (high - low) * 15 / (HEIGHT * 72 - 62)
    last = float("inf")
    for name in sorted(ends, key=lambda name: -ends[name][1]):
        last = min(ends[name][1], last - spread)
        colour = look.colour(name)
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 4}
        ax.annotate(
            name,
            ends[name],
            xytext=(1.015, last),
            textcoords=("axes fraction", "data"),
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops=arrow,
        )
