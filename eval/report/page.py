"""results.json as one page to read: the answer in words, the figures, the numbers, and how they were made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from draftsmith_core.io import write_text_atomic
from eval.report import figures
from eval.report.findings import lead
from eval.report.row_figure import tree_name
from eval.report.tables import Table, tables
from eval.report.theme import (
    DARK,
    LIGHT,
    NARROW,
    WIDE,
    Look,
    inline_svg,
    light,
    roles_of,
    themed,
    write_png,
)
from eval.results import Results
from eval.schema import ResultsDocument

# A table longer than this is folded; it is all there, one click away, without a script.
OPEN_ROWS = 40


@dataclass(frozen=True)
class Picture:
    """A figure of the page: its heading, what to read off it, and its two drawings."""

    name: str
    title: str
    caption: str
    drawings: list[Markup]


Draw = Callable[[ResultsDocument, Look], Figure | None]

FIGURES: list[tuple[str, str, str, Draw]] = [
    (
        "alpha",
        "How often the target accepts a drafted token",
        "Dots are α pooled over positions, bars 95 % intervals over prompts. The dashed line carries "
        "the base draft "
        "down through each domain, so the distance from it is what alignment bought there.",
        figures.alpha_figure,
    ),
    (
        "gain",
        "What alignment changed, and what of it transferred",
        "Gain in α over the base draft on the same prompts. A bar across zero is no measurable change. "
        "Filled marks "
        "are in distribution, hollow ones out of it; on the right, the share of the pooled gain at home "
        "that each "
        "domain kept.",
        figures.gain_figure,
    ),
    (
        "accept",
        "Acceptance by depth, measured while decoding",
        "Of the steps that got as far as depth d, the share in which depth d was accepted too, with 95 % intervals.",
        figures.accept_figure,
    ),
    (
        "tau",
        "Tokens per target call, and speed",
        "All suites of a kind pooled: filled marks in distribution (ID), hollow marks out of it (OOD). "
        "The line at 1 "
        "is the target decoding alone.",
        figures.tau_figure,
    ),
]


def write_report(results: Results) -> Path:
    """Write report.html and plots/*.png where results.json is; returns the page's path."""
    page = results.directory / "report.html"
    write_text_atomic(page, render_page(results.document, results.directory / "plots"))
    return page


def render_page(results: ResultsDocument, png_directory: Path | None = None) -> str:
    """The page as text, everything that came from outside escaped; PNGs beside it when a directory is
    given."""
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    roles = roles_of(results["drafts"], results["base"])
    pictures = []
    for name, title, caption, draw in FIGURES:
        if png_directory is not None:
            figure = draw(results, light(WIDE, roles))
            if figure is not None:
                write_png(figure, png_directory / f"{name}.png")
        drawings = []
        for size in (WIDE, NARROW):
            figure = draw(results, themed(size, roles))
            if figure is not None:
                drawings.append(inline_svg(figure, f"{name}-{size.name}", f"{title}. {caption}"))
        if drawings:
            pictures.append(Picture(name, title, _caption(results, name, caption), drawings))
    counted: list[Table] = tables(results)
    return environment.get_template("report.html.j2").render(
        results=results,
        lead=lead(results),
        pictures=pictures,
        tables=counted,
        open_rows=OPEN_ROWS,
        roles=roles,
        temperature=figures.headline_temperature(results),
        light=LIGHT,
        dark=DARK,
        prompts={
            kind: sum(suite["done"] for suite in results["suites"] if suite["kind"] == kind) for kind in ("id", "ood")
        },
    )


def _caption(results: ResultsDocument, name: str, caption: str) -> str:
    if name == "accept":
        way = results["methods"][0]
        temperature = figures.headline_temperature(results)
        verifier = way["verifier"] if way["lossless"] else f"{way['verifier']} (lossless: false)"
        return f"{caption} Tree {tree_name(way['tree'])}, verifier {verifier}, temperature {temperature:g}."
    return caption
