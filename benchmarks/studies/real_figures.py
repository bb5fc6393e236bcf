"""The pictures of SmolLM2: acceptance by draft, change by alignment, amounts of training,
acceptance by depth, speed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.studies import frontier_tables
from draftsmith.core.io import JsonObject
from draftsmith.eval import formats
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.eval.report.theme import DARK, LIGHT, Look, drawing, roles_of, write_png
from draftsmith.eval.results import Results

WIDTH, HEIGHT = 10.0, 4.2  # inches
# Of the tree whose depths are drawn.
CHAIN = {"tree": "chain:4", "verifier": "speculative"}


def write(
    out: Path,
    name: str,
    drafts: Sequence[str],
    base: str,
    draw: Callable[[Figure, Look], None],
    width: float = WIDTH,
) -> None:
    """OUT/NAME.png and NAME-dark.png, with the colours of these drafts."""
    for suffix, colours in (("", LIGHT), ("-dark", DARK)):
        with drawing(colours):
            figure = Figure(figsize=(width, HEIGHT), layout="constrained")
            draw(figure, Look(colours, roles_of(drafts, base)))
            write_png(figure, out / f"{name}{suffix}.png")


def which(results: Results, names: Mapping[str, str], out: Path) -> None:
    """OUT/real-which: alpha of every draft by set."""
    draw = partial(_by_set, results, results.drafts, names)
    write(out, "real-which", results.drafts, results.base, draw)


def command(results: Results, out: Path) -> None:
    """OUT/real-command: alpha by set of a draft before `align`, and of the two that it made."""
    names = {
        "base": "before",
        "jsd-plain": "aligned, plain",
        "jsd-balanced": "aligned, balanced",
    }
    draw = partial(_by_set, results, list(names), names)
    # Narrow, so that a phone shows it.
    write(out, "real-command", list(names), "base", draw, width=6.0)


def align(bases: Mapping[str, Results], names: Mapping[str, str], out: Path) -> None:
    """OUT/real-align: change of alpha by set at temperature 1, a panel per base."""
    documents = {base: over_seeds(results, 1.0) for base, results in bases.items()}
    ways: list[str] = []
    for document in documents.values():
        ways += [way for way in document["rows"] if way not in ways]
    write(out, "real-align", ["base", *ways], "base", partial(_changes, documents, ways, names))


def over_seeds(results: Results, temperature: float) -> JsonObject:
    """Gain and losses of drafts called BASE-maths-WAY-SEED, by way, over the first draft
    (`frontier_tables`).
    """
    others = [name for name in results.domains("ood") if name != "chat"]
    alphas = sums_of(results, temperature)
    found: dict[str, list[frontier_tables.Alphas]] = {}
    for draft in results.aligned:
        found.setdefault(way_of(draft), []).append(alphas[draft])
    sets = frontier_tables.Sets("maths", near=("chat",), far=tuple(others))
    return frontier_tables.document_of(sets, alphas[results.base], found, 2000)


def sums_of(
    results: Results,
    temperature: float,
    ratio: tuple[str, str] = ("alpha", "positions"),
    way: tuple[str | None, str | None] = (None, None),
    depth: int | None = None,
) -> dict[str, frontier_tables.Alphas]:
    """A ratio of counts by draft, set and prompt. way: tree and verifier, if it is of decoding."""
    counts = results.counts
    counts = counts[(counts["temperature"] == temperature) & counts["key"].isin(ratio)]
    for name, value in {"tree": way[0], "rule": way[1], "depth": depth, "part": None}.items():
        chosen = counts[name].isna() if value is None else counts[name] == value
        counts = counts[chosen]
    found: dict[str, frontier_tables.Alphas] = {}
    for (draft, domain), part in counts.groupby(["draft", "set"], observed=True):
        above, below = (part[part["key"] == key]["value"].to_numpy() for key in ratio)
        found.setdefault(draft, {})[domain] = PromptSums.of(above, below)
    return found


def way_of(draft: str) -> str:
    """WAY of a draft called BASE-maths-WAY-SEED."""
    _, _, way = draft.partition("-maths-")
    return way.rpartition("-")[0].replace("-", " ")


def change_on(row: JsonObject, domain: str) -> JsonObject:
    """The change on a set, or out of distribution, of a way of `over_seeds`."""
    places = {"maths": "id", "ood": "ood"}
    place: JsonObject = row[places.get(domain, f"set {domain}")]
    change: JsonObject = place["change"]
    return change


def amount(results: Results, out: Path) -> None:
    """OUT/real-amount: alpha on chat by the share of the answers, and of the steps."""
    write(out, "real-amount", ["steps", "data"], "data", partial(_shares, results))


def depths(results: Results, names: Mapping[str, str], out: Path) -> None:
    """OUT/real-depths: the chance that a token is accepted, given that those before it are, by its
    depth.
    """
    write(out, "real-depths", results.drafts, results.base, partial(_by_depth, results, names))


def lengths(results: Results, names: Mapping[str, str], out: Path) -> None:
    """OUT/real-long-texts: alpha by the length of the prompt."""
    draw = partial(_by_length, results, names)
    write(out, "real-long-texts", results.drafts, results.base, draw, width=6.0)


def _by_length(results: Results, names: Mapping[str, str], figure: Figure, look: Look) -> None:
    domains = results.domains()
    panels = _panels(figure, 1)
    for number, draft in enumerate(results.drafts):
        rows = [results.figure("alpha", draft, domain, 1.0) for domain in domains]
        aside = 1.04 ** _from_middle(number, results.drafts)
        places = [int(domain) * aside for domain in domains]
        _points(panels[0], places, rows, draft, names, look, joined=True)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks([int(domain) for domain in domains], domains)
    panels[0].set_xlabel("tokens of the prompt")
    _explain(figure, panels, "expected acceptance α, T = 1")


def _by_set(
    results: Results, drafts: Sequence[str], names: Mapping[str, str], figure: Figure, look: Look
) -> None:
    """A panel per temperature; a column per set, in it a point with its interval per draft."""
    domains = results.domains()
    panels = _panels(figure, len(results.temperatures))
    for ax, temperature in zip(panels, results.temperatures, strict=True):
        for number, draft in enumerate(drafts):
            rows = [results.figure("alpha", draft, domain, temperature) for domain in domains]
            _points(ax, _beside(number, drafts, domains), rows, draft, names, look)
        _name_columns(ax, domains, results.domains("id"))
        ax.set_title(f"T = {temperature:g}")
    _explain(figure, panels, "expected acceptance α")


def _changes(
    documents: Mapping[str, JsonObject],
    ways: Sequence[str],
    names: Mapping[str, str],
    figure: Figure,
    look: Look,
) -> None:
    """A panel per base; a column per set, in it a point with its interval per way."""
    panels = _panels(figure, len(documents))
    for ax, (base, document) in zip(panels, documents.items(), strict=True):
        sets = document["sets"]
        domains = [sets["own"], *sets["near"], *sets["far"]]
        for number, way in enumerate(ways):
            if way in document["rows"]:
                rows = [change_on(document["rows"][way], domain) for domain in domains]
                _points(ax, _beside(number, ways, domains), rows, way, names, look)
        ax.axhline(0, color=look.colours["base"], lw=1, ls=(0, (2, 2)), zorder=1)
        _name_columns(ax, domains, domains[:1])
        ax.set_title(f"{names[base]}, T = 1")
    _explain(figure, panels, "change of α over the draft of chat")


def _shares(results: Results, figure: Figure, look: Look) -> None:
    """A panel per temperature; a line per kind of share, from 1/16 to all."""
    panels = _panels(figure, len(results.temperatures))
    labels = {"steps": "share of the steps, all answers", "data": "share of the answers, all steps"}
    for ax, temperature in zip(panels, results.temperatures, strict=True):
        for kind in labels:
            shares = [draft for draft in results.drafts if draft.startswith(kind)]
            drafts = [*sorted(shares, key=_share), "all"]
            rows = [results.figure("alpha", draft, "id", temperature) for draft in drafts]
            _points(ax, list(range(len(rows))), rows, kind, labels, look, joined=True)
        ax.set_xticks(range(5), ["1/16", "1/8", "1/4", "1/2", "all"])
        ax.set_xlabel("share")
        ax.set_title(f"T = {temperature:g}")
    _explain(figure, panels, "expected acceptance α on chat")


def _share(draft: str) -> float:
    """The share of a draft called KIND-SHARE."""
    return float(draft.partition("-")[2])


def _beside(number: int, drafts: Sequence[str], domains: Sequence[str]) -> list[float]:
    aside = _from_middle(number, drafts) * 0.7 / len(drafts)
    return [column + aside for column in range(len(domains))]


def _from_middle(number: int, drafts: Sequence[str]) -> float:
    return number - (len(drafts) - 1) / 2


def _by_depth(results: Results, names: Mapping[str, str], figure: Figure, look: Look) -> None:
    """A panel for chat and one for all other sets, at temperature 1."""
    drafts = results.drafts
    titles = {"id": "chat, in distribution", "ood": "the other sets"}
    panels = _panels(figure, 2)
    for ax, (place, title) in zip(panels, titles.items(), strict=True):
        for number, draft in enumerate(drafts):
            rows = results.series("accept_predicted", draft, place, 1.0, **CHAIN)
            aside = _from_middle(number, drafts) * 0.06
            places = [(row["depth"] or 0) + aside for row in rows]
            _points(ax, places, rows, draft, names, look, joined=True)
        ax.set_xticks(range(1, 5))
        ax.set_xlabel("drafted token")
        ax.set_title(title)
    _explain(figure, panels, "accepted, given those before, T = 1")


def _panels(figure: Figure, count: int) -> list[Axes]:
    """Panels side by side."""
    return list(figure.subplots(1, count, sharey=True, squeeze=False)[0])


def _name_columns(ax: Axes, domains: Sequence[str], own: Sequence[str]) -> None:
    """Name the columns of sets. own: those in distribution."""
    labels = []
    for domain in domains:
        kind = "ID" if domain in own else "OOD"
        labels.append(f"{domain}\n{kind}")
    ax.set_xticks(range(len(domains)), labels)


def _points(
    ax: Axes,
    places: Sequence[float],
    rows: Sequence[formats.Figure | None],
    draft: str,
    names: Mapping[str, str],
    look: Look,
    joined: bool = False,
) -> None:
    known = [(place, row) for place, row in zip(places, rows, strict=True) if row is not None]
    values = [row["value"] for _, row in known]
    below = [row["value"] - row["low"] for _, row in known]
    above = [row["high"] - row["value"] for _, row in known]
    ax.errorbar(
        [place for place, _ in known],
        values,
        [below, above],
        ls="-" if joined else "none",
        label=names.get(draft, draft),
        color=look.colour(draft),
        marker=look.marker(draft),
        ms=5,
        lw=1.4,
    )


def _explain(figure: Figure, panels: Sequence[Axes], what: str) -> None:
    """Say what is drawn, and write the legend."""
    panels[0].set_ylabel(what)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
