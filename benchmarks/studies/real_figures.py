"""The pictures of SmolLM2: acceptance by draft, change by alignment, amounts of training,
acceptance by depth, speed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.studies import frontier_tables
from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.eval.report.theme import DARK, LIGHT, Look, drawing, roles_of, write_png
from draftsmith.eval.results import Results
from draftsmith.eval.schema import Row

WIDTH, HEIGHT = 10.0, 4.2  # inches
# Of the tree whose depths are drawn.
CHAIN = ("chain:4", "speculative")


def write(
    out: Path, name: str, drafts: Sequence[str], base: str, draw: Callable[[Figure, Look], None]
) -> None:
    """OUT/NAME.png and NAME-dark.png, with the colours of these drafts."""
    for suffix, colours in (("", LIGHT), ("-dark", DARK)):
        with drawing(colours):
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            draw(figure, Look(colours, roles_of(drafts, base)))
            write_png(figure, out / f"{name}{suffix}.png")


def which(results: Results, names: Mapping[str, str], out: Path) -> None:
    """OUT/real-which: alpha of every draft by set."""
    write(out, "real-which", results.drafts, results.base, partial(_by_set, results, names))


def align(bases: Mapping[str, Results], names: Mapping[str, str], out: Path) -> None:
    """OUT/real-align: change of alpha by set at temperature 1, a panel per base."""
    documents = {base: over_seeds(results, 1.0) for base, results in bases.items()}
    ways = list(dict.fromkeys(way for document in documents.values() for way in document["rows"]))
    write(out, "real-align", ["base", *ways], "base", partial(_changes, documents, ways, names))


def over_seeds(results: Results, temperature: float) -> JsonObject:
    """Gain and losses of drafts called BASE-maths-WAY-SEED, by way, over the first draft
    (`frontier_tables`).
    """
    others = tuple(name for name in results.domains("ood") if name != "chat")
    alphas = sums_of(results, temperature)
    found: dict[str, list[frontier_tables.Alphas]] = {}
    for draft in results.aligned:
        found.setdefault(way_of(draft), []).append(alphas[draft])
    sets = frontier_tables.Sets("maths", near=("chat",), far=others)
    return frontier_tables.document_of(sets, alphas[results.base], found, 2000)


def sums_of(results: Results, temperature: float) -> dict[str, frontier_tables.Alphas]:
    """Sums and counts of alpha by draft, set and prompt."""
    alphas: dict[str, frontier_tables.Alphas] = {}
    for (draft, domain, at, _, _), counts in results.counts("alpha").items():
        if at == temperature:
            alpha = counts["per_prompt"]
            alphas.setdefault(draft, {})[domain] = PromptSums.of(alpha["sum"], alpha["count"])
    return alphas


def way_of(draft: str) -> str:
    """WAY of a draft called BASE-maths-WAY-SEED."""
    return draft.partition("-maths-")[2].rpartition("-")[0].replace("-", " ")


def change_on(row: Mapping[str, Any], domain: str) -> Any:
    """The change on a set, or out of distribution, of a way of `over_seeds`."""
    return row[{"maths": "id", "ood": "ood"}.get(domain, f"set {domain}")]["change"]


def amount(results: Results, out: Path) -> None:
    """OUT/real-amount: alpha on chat by the share of the answers, and of the steps."""
    write(out, "real-amount", ["steps", "data"], "data", partial(_shares, results))


def depths(results: Results, names: Mapping[str, str], out: Path) -> None:
    """OUT/real-depths: the chance that a token is accepted, given that those before it are, by its
    depth.
    """
    write(out, "real-depths", results.drafts, results.base, partial(_by_depth, results, names))


def _by_set(results: Results, names: Mapping[str, str], figure: Figure, look: Look) -> None:
    """A panel per temperature; a column per set, in it a point with its interval per draft."""
    domains = results.domains()
    drafts = results.drafts
    panels: Any = figure.subplots(1, len(results.temperatures), sharey=True)
    for ax, temperature in zip(panels, results.temperatures, strict=True):
        for number, draft in enumerate(drafts):
            rows = [results.figure("alpha", draft, domain, temperature) for domain in domains]
            _points(ax, _beside(number, drafts, domains), rows, draft, names, look)
        ax.set_xticks(
            range(len(domains)), [f"{domain}\n{results.kind(domain).upper()}" for domain in domains]
        )
        ax.set_title(f"T = {temperature:g}")
    panels[0].set_ylabel("expected acceptance α")
    _legend(figure, panels[0])


def _changes(
    documents: Mapping[str, Mapping[str, Any]],
    ways: Sequence[str],
    names: Mapping[str, str],
    figure: Figure,
    look: Look,
) -> None:
    """A panel per base; a column per set, in it a point with its interval per way."""
    panels: Any = figure.subplots(1, len(documents), sharey=True)
    for ax, (base, document) in zip(panels, documents.items(), strict=True):
        domains = [document["sets"]["own"], *document["sets"]["near"], *document["sets"]["far"]]
        for number, way in enumerate(ways):
            if way in document["rows"]:
                rows = [change_on(document["rows"][way], domain) for domain in domains]
                _points(ax, _beside(number, ways, domains), rows, way, names, look)
        ax.axhline(0, color=look.colours["base"], lw=1, ls=(0, (2, 2)), zorder=1)
        ax.set_xticks(
            range(len(domains)),
            [f"{name}\n{'OOD' if at else 'ID'}" for at, name in enumerate(domains)],
        )
        ax.set_title(f"{names[base]}, T = 1")
    panels[0].set_ylabel("change of α over the draft of chat")
    _legend(figure, panels[0])


def _shares(results: Results, figure: Figure, look: Look) -> None:
    """A panel per temperature; a line per kind of share, from 1/16 to all."""
    panels: Any = figure.subplots(1, len(results.temperatures), sharey=True)
    labels = {"steps": "share of the steps, all answers", "data": "share of the answers, all steps"}
    for ax, temperature in zip(panels, results.temperatures, strict=True):
        for kind in labels:
            shares = [draft for draft in results.drafts if draft.startswith(kind)]
            drafts = sorted(shares, key=lambda draft: float(draft.partition("-")[2])) + ["all"]
            rows = [results.figure("alpha", draft, "id", temperature) for draft in drafts]
            _points(ax, list(range(len(rows))), rows, kind, labels, look, joined=True)
        ax.set_xticks(range(5), ["1/16", "1/8", "1/4", "1/2", "all"])
        ax.set_xlabel("share")
        ax.set_title(f"T = {temperature:g}")
    panels[0].set_ylabel("expected acceptance α on chat")
    _legend(figure, panels[0])


def _beside(number: int, drafts: Sequence[str], domains: Sequence[str]) -> list[float]:
    return [
        place + (number - (len(drafts) - 1) / 2) * 0.7 / len(drafts)
        for place in range(len(domains))
    ]


def _by_depth(results: Results, names: Mapping[str, str], figure: Figure, look: Look) -> None:
    """A panel for chat and one for all other sets, at temperature 1."""
    drafts = results.drafts
    panels: Any = figure.subplots(1, 2, sharey=True)
    for ax, (place, title) in zip(
        panels, {"id": "chat, in distribution", "ood": "the other sets"}.items(), strict=True
    ):
        for number, draft in enumerate(drafts):
            rows = results.series("accept_predicted", draft, place, 1.0, *CHAIN)
            aside = (number - (len(drafts) - 1) / 2) * 0.06
            places = [(row["at"] or 0) + aside for row in rows]
            _points(ax, places, rows, draft, names, look, joined=True)
        ax.set_xticks(range(1, 5))
        ax.set_xlabel("drafted token")
        ax.set_title(title)
    panels[0].set_ylabel("accepted, given those before, T = 1")
    _legend(figure, panels[0])


def _points(
    ax: Axes,
    places: Sequence[float],
    rows: Sequence[Row | JsonObject | None],
    draft: str,
    names: Mapping[str, str],
    look: Look,
    joined: bool = False,
) -> None:
    known: list[Any] = [
        (place, row) for place, row in zip(places, rows, strict=True) if row is not None
    ]
    values = [row["value"] for _, row in known]
    below = [row["value"] - row["low"] for _, row in known]
    above = [row["high"] - row["value"] for _, row in known]
    style: Any = {"color": look.colour(draft), "marker": look.marker(draft), "ms": 5, "lw": 1.4}
    ax.errorbar(
        [place for place, _ in known],
        values,
        [below, above],
        ls="-" if joined else "none",
        label=names.get(draft, draft).strip("*"),
        **style,
    )


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
