"""results.json as one page to read: the answer in words, the figures, the numbers, and how they were made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftsmith_core.io import write_text_atomic
from eval.report import figures, figures_why
from eval.report.findings import lead
from eval.report.formats import tree_name
from eval.report.tables import tables
from eval.report.theme import DARK, LIGHT, MARKS, Look, inline_svg, roles_of, write_png
from eval.report.viewer import viewed_texts
from eval.results import Results

# A table longer than this is folded; it is all there, one click away, without a script.
OPEN_ROWS = 40
# So are the findings of more drafts than these, the best of which come first.
OPEN_FINDINGS = 3


@dataclass(frozen=True)
class Picture:
    """A figure of the page: its heading, what to read off it, and the drawing."""

    title: str
    caption: str
    drawing: Markup


FIGURES = [
    (
        "alpha",
        "How often the target accepts a drafted token",
        "Dots are α pooled over positions, bars 95 % intervals over prompts. The dashed line carries the base draft "
        "through each domain, so the distance from it is what alignment bought there. Filled marks are in "
        "distribution (ID), hollow ones out of it (OOD).",
        figures.alpha_figure,
    ),
    (
        "gain",
        "What alignment changed, and what of it transferred",
        "Gain in α over the base draft on the same prompts. A bar across zero is no measurable change. On the right, "
        "the share of the pooled ID gain that each OOD domain kept; a dash where that gain is not above zero.",
        figures.gain_figure,
    ),
    (
        "accept",
        "Acceptance by depth, measured while decoding",
        "Of the steps that got as far as depth d, the share in which depth d was accepted too, with 95 % intervals.",
        figures_why.accept_figure,
    ),
    (
        "tau",
        "Tokens per target call, and speed",
        "All sets of a kind pooled: filled marks ID, hollow marks OOD. The line at 1 is the target decoding alone.",
        figures.tau_figure,
    ),
    (
        "cost",
        "Speed against the cost of a step",
        "What the measured tokens per call would be worth where a draft call costs so much of a target call: "
        "τ / (draft calls × cost + verifying), with the first lossless method. The line, a band's upper edge: "
        "verifying costs as much as decoding one token, as on a GPU at small batches; its lower edge: twice as much. "
        "The marks are this machine: measured speedup at the measured cost of a draft call, and in the corner what "
        "verifying costs, in steps of the target alone. Upright lines are typical pairs by their parameters.",
        figures_why.cost_figure,
    ),
    (
        "calibration",
        "Is the draft as sure as it should be?",
        "By tenths of the draft's confidence, the share that the target accepts. On the diagonal a draft is "
        "calibrated, above it too modest, below it too sure. Trees that grow by confidence rely on this.",
        figures_why.calibration_figure,
    ),
    (
        "candidates",
        "What more candidates would bring",
        "Acceptance of the first drafted token with k candidates: drawn without replacement and tried in turn (solid), "
        "or the draft's k most probable (dashed).",
        figures_why.candidates_figure,
    ),
]


def write_report(results: Results) -> Path:
    """Write report.html and plots/*.png where results.json is; returns the page's path."""
    page = results.directory / "report.html"
    write_text_atomic(page, render_page(results, results.directory / "plots"))
    return page


def render_page(results: Results, png_directory: Path | None = None) -> str:
    """The page as text; PNGs beside it when a directory is given."""
    roles = roles_of(results.drafts, results.base)
    pictures = []
    for name, title, caption, draw in FIGURES:
        if name == "accept":
            caption += _first_method(results)
        figure = draw(results, Look(MARKS, roles))
        if figure is not None:
            pictures.append(Picture(title, caption, inline_svg(figure, name, f"{title}. {caption}")))
        plain = draw(results, Look(LIGHT, roles)) if png_directory is not None else None
        if png_directory is not None and plain is not None:
            write_png(plain, png_directory / f"{name}.png")
    suites = results.document["suites"]
    found = lead(results)
    return render_template(
        "report.html.j2",
        found.headline,
        pictures,
        results=results.document,
        lead=found,
        tables=tables(results),
        viewed=viewed_texts(results),
        open_rows=OPEN_ROWS,
        open_findings=OPEN_FINDINGS,
        roles=roles,
        prompts={kind: sum(suite["done"] for suite in suites if suite["kind"] == kind) for kind in ("id", "ood")},
    )


def render_template(name: str, headline: str, pictures: Sequence[Picture], **values: Any) -> str:
    """A page from its template in `templates/`, everything that came from outside escaped."""
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    palettes = {"light": LIGHT, "dark": DARK}
    return environment.get_template(name).render(headline=headline, pictures=pictures, **palettes, **values)


def _first_method(results: Results) -> str:
    method = results.document["methods"][0]
    verifier = method["verifier"] if method["lossless"] else f"{method['verifier']} (lossless: false)"
    return f" Tree {tree_name(method['tree'])}, verifier {verifier}, temperature {results.top_temperature:g}."
