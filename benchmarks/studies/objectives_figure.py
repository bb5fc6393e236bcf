"""The picture of objectives: what a gain in distribution cost out of it, by objective and
learning rate.
"""

from pathlib import Path

from matplotlib.figure import Figure

from draftsmith.core.io import JsonObject
from draftsmith.eval.report.theme import DARK, LIGHT, Look, drawing, write_png

# Those with a colour; with more, none could be told apart. The others are drawn in grey.
COLOURED = ("fkl", "ce", "jsd", "tvd", "lk_alpha", "rkl")
PATHS = {"": LIGHT, "-dark": DARK}
WIDTH, HEIGHT = 10.0, 4.6  # inches


def write_pictures(results: JsonObject, out: Path, name: str = "objectives") -> None:
    """OUT/NAME.png and NAME-dark.png."""
    roles = {name: f"d{i + 1}" for i, name in enumerate(COLOURED)} | {"base": "base"}
    for suffix, colours in PATHS.items():
        look = Look(colours, roles)
        write_png(picture(results, look), out / f"{name}{suffix}.png")


def picture(results: JsonObject, look: Look) -> Figure:
    """alpha ID (x) and OOD (y) at T = 1, seed 0: one line per objective, one mark per rate, larger
    with the rate.
    """
    own = results["domains"][0]
    rates = sorted(results["options"]["rates"])
    with drawing(look.colours):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        ax = figure.subplots()
        ends = []
        names = [name for name in results["by_rate"] if name not in COLOURED]
        for name in [*names, *(name for name in COLOURED if name in results["by_rate"])]:
            tried = [results["by_rate"][name][f"{rate:g}"] for rate in rates]
            x = [at[own] for at in tried]
            y = [at["ood"] for at in tried]
            known = name in COLOURED
            colour = look.colour(name) if known else look.colours["line"]
            ax.plot(x, y, color=colour, lw=1.8 if known else 1.2, zorder=3 if known else 2)
            sizes = [14 + 26 * i for i in range(len(rates))]
            ax.scatter(
                x,
                y,
                s=sizes,
                marker=look.marker(name) if known else "o",
                color=colour,
                zorder=3 if known else 2,
            )
            if known:
                ends.append((x[-1], y[-1], name))
        base = {
            where: results["figures"]["1"]["base"][where]["alpha"]["value"]
            for where in (own, "ood")
        }
        ax.axhline(base["ood"], color=look.colours["base"], lw=1, ls=(0, (2, 2)), zorder=1)
        ax.scatter([base[own]], [base["ood"]], s=60, color=look.colours["base"], zorder=4)
        ax.annotate(
            "base draft",
            (base[own], base["ood"]),
            xytext=(8, 5),
            textcoords="offset points",
            color=look.colours["soft"],
        )
        told = ", ".join(f"{rate:g}" for rate in rates)
        ax.set_xlabel(
            f"expected acceptance α in distribution ({own}), T = 1; marks grow with the learning "
            f"rate: {told}"
        )
        ax.set_ylabel("α out of distribution")
        low, high = ax.get_ylim()
        spread = (high - low) * 15 / (HEIGHT * 72 - 62)
        last = float("inf")
        for x_end, y_end, name in sorted(ends, key=lambda end: -end[1]):
            last = min(y_end, last - spread)
            ax.annotate(
                name,
                (x_end, y_end),
                xytext=(1.015, last),
                textcoords=("axes fraction", "data"),
                va="center",
                color=look.colour(name),
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": look.colour(name),
                    "lw": 0.6,
                    "shrinkA": 0,
                    "shrinkB": 4,
                },
            )
        return figure
