"""results.json as one page to read: the answer in words, the figures, the numbers, and how they
were made.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.core.io import write_text_atomic
from draftsmith.eval.formats import tree_name
from draftsmith.eval.report import WORDS, figures
from draftsmith.eval.report.findings import lead
from draftsmith.eval.report.tables import tables
from draftsmith.eval.report.theme import DARK, LIGHT, Look, inline_svg, roles_of, write_png
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.schema import BUSY

# A table longer than this is folded; it is all there, one click away, without a script.
OPEN_ROWS = 40


@dataclass(frozen=True)
class Picture:
    """A figure of the page: its heading, what to read off it, and the drawing."""

    title: str
    caption: str
    drawing: Markup


FIGURES = {
    "alpha": figures.alpha_figure,
    "gain": figures.gain_figure,
    "training": figures.training_figure,
    "accept": figures.accept_figure,
    "context": figures.context_figure,
    "tau": figures.tau_figure,
    "calibration": figures.calibration_figure,
}


def write_report(results: ResultsTable) -> Path:
    """Write report.html and plots/*.png where results.json is; returns the page's path."""
    page = results.directory / "report.html"
    write_text_atomic(page, render_page(results, results.directory / "plots"))
    return page


def render_page(results: ResultsTable, png_directory: Path | None = None) -> str:
    """The page as text; PNGs beside it when a directory is given."""
    look = Look(LIGHT, roles_of(results.shown, results.base))
    pictures = []
    for name, draw in FIGURES.items():
        figure = draw(results, look)
        if figure is None:
            continue
        words = WORDS["figures"][name]
        title = words["title"]
        caption = words["caption"] if results.aligned else words.get("alone", words["caption"])
        if name == "accept":
            tree, verifier = results.methods[0]
            lossy = "" if results.lossless(verifier) else " (lossless: false)"
            caption += (
                f" Tree {tree_name(tree)}, verifier {verifier}{lossy}, temperature "
                f"{results.top_temperature:g}."
            )
        pictures.append(Picture(title, caption, inline_svg(figure, name, f"{title}. {caption}")))
        if png_directory is not None:
            write_png(figure, png_directory / f"{name}.png")
    prompts = {"id": 0, "ood": 0}
    for suite in results.document["suites"]:
        prompts[suite["kind"]] += suite["done"]
    remarks = [row["text"] for row in results.document["remarks"] if row["about"] != BUSY]
    head = lead(results)
    of_pairs = () if results.aligned else ("gain", "transfer")
    words = results.document["definitions"]
    definitions = {word: text for word, text in words.items() if word not in of_pairs}
    return render_template(
        "report.html.j2",
        head.headline,
        pictures,
        results=results.document,
        lead=head,
        remarks=remarks,
        tables=tables(results),
        definitions=definitions,
        open_rows=OPEN_ROWS,
        prompts=prompts,
        timed=_timed(results),
    )


def _timed(results: ResultsTable) -> str:
    """How many prompts of a set the clock counted, if not all."""
    counts = sorted({row["n"] for row in results.by_set("speedup")})
    most = max(len(set(results.prompt_groups(name))) for name in results.domains())
    return " to ".join(map(str, counts)) if counts and counts[0] < most else ""


def render_template(name: str, headline: str, pictures: Sequence[Picture], **values: Any) -> str:
    """A page from its template in `templates/`, everything that came from outside escaped."""
    environment = Environment(
        loader=PackageLoader("draftsmith.eval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    template = environment.get_template(name)
    return template.render(headline=headline, pictures=pictures, light=LIGHT, dark=DARK, **values)


def _unbroken(text: str) -> str:
    """No line ends inside T = 1, 37 %, 3 seeds or an interval."""
    text = re.sub(r"\[[^]]*\]", lambda part: part[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    text = text.replace(" seeds ", "\N{NO-BREAK SPACE}seeds ")
    text = text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    return text.replace(" %", "\N{NO-BREAK SPACE}%")
