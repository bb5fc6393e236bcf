"""results.json as one page to read: the picture, the figures, what decides, and the rest folded."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.core.io import write_text_atomic
from draftsmith.eval.report import WORDS, figures
from draftsmith.eval.report.tables import Table, first_rows, tables
from draftsmith.eval.report.theme import DARK, LIGHT, Look, inline_svg, roles_of, write_png
from draftsmith.eval.results_table import ResultsTable
from draftsmith.eval.summary import Lead, lead

FIGURES = {
    "alpha": figures.alpha_figure,
    "gain": figures.gain_figure,
    "tau": figures.tau_figure,
}


class Picture(NamedTuple):
    """A figure of the page: its heading, what to read off it, and the drawing."""

    title: str
    caption: str
    drawing: Markup


def write_report(results: ResultsTable) -> Path:
    """Write report.html and plots/*.png where results.json is; returns the page's path."""
    page = results.directory / "report.html"
    write_text_atomic(page, render_page(results, results.directory / "plots"))
    return page


def render_page(results: ResultsTable, png_directory: Path | None = None) -> str:
    """The page as text; PNGs beside it when a directory is given."""
    prompts = {"id": 0, "ood": 0}
    for suite in results.document["suites"]:
        prompts[suite["kind"]] += suite["done"]
    head = lead(results)
    return render_template(
        "report.html.j2",
        head,
        pictures=pictures(results, png_directory=png_directory),
        first=first_table(results, head),
        results=results.document,
        tables=tables(results),
        prompts=prompts,
    )


def pictures(
    results: ResultsTable, *names: str, more: str = "", png_directory: Path | None = None
) -> list[Picture]:
    """The figures of the page, or some of them; `more` ends their captions."""
    look = Look(LIGHT, roles_of(results.drafts, results.base))
    found = []
    for name in names or FIGURES:
        drawn = FIGURES[name](results, look)
        if drawn is None:
            continue
        words = WORDS["figures"][name]
        caption = words["caption"].format(base=results.base) + more
        label = f"{words['title']}. {drawn.text}"
        found.append(Picture(words["title"], caption, inline_svg(drawn.figure, name, label)))
        if png_directory is not None:
            write_png(drawn.figure, png_directory / f"{name}.png")
    return found


def first_table(results: ResultsTable, head: Lead) -> Table:
    """The table that the terminal prints too."""
    words = WORDS["first_table"]
    rows = first_rows(results, head.decision, head.temperature)
    note = words["note"].format(temperature=f"{head.temperature:g}")
    return Table(words["title"], note, 2, rows)


def render_template(name: str, head: Lead, **values: Any) -> str:
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
    return template.render(lead=head, light=LIGHT, dark=DARK, **values)


def _unbroken(text: str) -> str:
    """No line ends inside T = 1, 37 %, 3 seeds or an interval."""
    text = re.sub(r"\[[^]]*\]", lambda part: part[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    text = text.replace(" seeds ", "\N{NO-BREAK SPACE}seeds ")
    text = text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    return text.replace(" %", "\N{NO-BREAK SPACE}%")
