"""Tables of the study of SmolLM2-135M-Instruct (`real_pair.py`)."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from benchmarks.lib.pages import by_temperature, table
from benchmarks.studies import frontier_tables, real_figures
from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums, difference, resamples
from draftsmith.eval.formats import number, with_interval
from draftsmith.eval.results import Results
from draftsmith.eval.schema import Estimate, Row

NAMES = {
    "pruned": "two pruned layers",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE-1",
    "hydra": "Hydra",
    "fresh": "a small LLaMA",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "jetspec": "JetSpec",
    "base": "of chat",
    "plain": "plain",
    "balanced": "balanced",
    "all chats": "replay of all chats",
}


def predicted_tau(results: Results, draft: str, kind: str, temperature: float) -> Row | None:
    """The tau that is predicted of chains of 4."""
    return results.figure("tau_predicted", draft, kind, temperature, **real_figures.CHAIN)


def taus(results: Results, draft: str, temperature: float) -> list[str]:
    """The predicted tau of chains of 4 in distribution and out of it."""
    rows = [predicted_tau(results, draft, kind, temperature) for kind in ("id", "ood")]
    return [with_interval(row, 2) for row in rows]


# What a piece of the study adds to the name of a draft, and what that says.
_PIECES = {"-recipe": "", "-longer": "", "-longest": "", "-longest-maths": ", aligned to maths"}


def acceptance(
    results: Results, first: str, temperature: float, names: Mapping[str, str] | None = None
) -> str:
    """Alpha of every draft by set, and the predicted tau of chains of 4 in distribution and out of
    it. names: the drafts that are shown, and as what; all by default.
    """
    rows = []
    names = names or {draft: NAMES.get(draft, draft) for draft in results.drafts}
    for draft, name in names.items():
        alphas = [results.alpha(draft, domain, temperature) for domain in results.domains()]
        cells = [with_interval(alpha) for alpha in alphas]
        rows.append([name, *cells, *taus(results, draft, temperature)])
    own = results.domains("id")[0]
    return table([first, *results.domains(), f"tau {own}", "tau elsewhere"], rows)


def over_seeds(seeds: Sequence[Results], first: str) -> str:
    """alpha of drafts that were trained with every seed: its mean with the interval over prompts,
    and by seed; by seed the predicted tau of chains of 4.
    """
    own, *others = seeds[0].domains()
    drafts = seeds[0].drafts
    for results in seeds[1:]:
        drafts = [draft for draft in drafts if draft in results.drafts]
    rows = [[NAMES[draft]] for draft in drafts]
    for temperature in (0.0, 1.0):
        alphas = [real_figures.sums_of(results, temperature) for results in seeds]
        for row, draft in zip(rows, drafts, strict=True):
            of_draft = [each[draft] for each in alphas]
            for names in ([own], others):
                mean, by_seed = frontier_tables.over_seeds(of_draft, names)
                row.append(f"{mean} ({by_seed})")
            found = [predicted_tau(results, draft, "id", temperature) for results in seeds]
            values = [tau["value"] if tau else None for tau in found]
            row.append(", ".join(number(value, 2) for value in values))
    heading = by_temperature([own, "elsewhere", f"tau {own} by seed"], (0, 1))
    return table([first, *heading], rows)


def draft_speeds(rows: Sequence[JsonObject]) -> str:
    """Speed over the target alone and decoded tau, by set, draft, tree and temperature."""
    ways = dict.fromkeys((row["temperature"], row["tree"]) for row in rows if row["draft"])
    lines: dict[tuple[str, str], dict[tuple[float, str], str]] = {}
    for row in rows:
        cell = f"{number(row['over_alone'], 2)} ({number(row['tau'], 2)})"
        line = lines.setdefault((row.get("domain", "chat"), row["draft"]), {})
        line[row["temperature"], row["tree"]] = cell
    several = len({domain for domain, _ in lines}) > 1
    heading = [f"{tree}, T = {at:g}" for at, tree in ways]
    shown = []
    for (domain, draft), line in lines.items():
        if draft:
            name = f"{domain}, {_short(draft)}" if several else _short(draft)
            cells = [line.get(way, "") for way in ways]
            shown.append([name, *cells])
    return table(["one chat at a time", *heading], shown)


def _short(draft: str) -> str:
    """The name of a draft of any piece."""
    lookup, _, name = draft.rpartition(", ")
    for piece, meaning in _PIECES.items():
        if name.endswith(piece):
            short = NAMES[name.removesuffix(piece)] + meaning
            return f"{lookup}, {short}" if lookup else short
    return NAMES[draft]


def weightless(found: Sequence[tuple[str, str, float, float | None]]) -> str:
    """Decoded tau by method, set and temperature, of rows (method, set, temperature, tau); no
    intervals.
    """
    lines: dict[str, dict[str, float | None]] = {}
    places: dict[str, None] = {}
    for name, domain, temperature, tau in found:
        place = f"{domain}, T = {temperature:g}"
        places[place] = None
        lines.setdefault(name, {})[place] = tau
    rows = []
    for name, line in lines.items():
        cells = [number(line.get(place), 2) for place in places]
        rows.append([name, *cells])
    return table(["method, decoded", *places], rows)


def by_depth(results: Results, first: str, temperature: float) -> str:
    """The chance that each of four drafted tokens of a chain is accepted, given those before it, in
    distribution.
    """
    rows = []
    for draft in results.drafts:
        accepted = results.series(
            "accept_predicted", draft, "id", temperature, **real_figures.CHAIN
        )
        cells = [with_interval(row) for row in accepted]
        cells += taus(results, draft, temperature)
        rows.append([NAMES.get(draft, draft), *cells])
    return table([first, *map(str, range(1, 5)), "tau chat", "tau elsewhere"], rows)


def changes_over_seeds(results: Results, first: str) -> str:
    """Change of alpha of every way to align to maths, over the draft of chat, and the share of the
    plain gain. Intervals are over seeds and prompts.
    """
    rows = []
    domains = [*results.domains(), "ood"]
    for temperature in sorted(results.temperatures, reverse=True):
        for way, row in real_figures.over_seeds(results, temperature)["rows"].items():
            cells = [
                with_interval(real_figures.change_on(row, domain), sign=True) for domain in domains
            ]
            title = f"{NAMES[way]}, T = {temperature:g}"
            rows.append([title, str(row["seeds"]), *cells, frontier_tables.share_of(row)])
    heading = [*results.domains(), "all but maths", "share of plain's gain"]
    return table([first, "seeds", *heading], rows)


def amounts(results: Results, first: str, temperature: float) -> str:
    """alpha and the predicted tau of chains of 4, by the tokens and the steps that a head was
    trained with.
    """
    rows = []
    for draft in sorted(results.drafts):
        trained = results.document["models"][draft]["training"]
        assert trained is not None
        kind, _, share = draft.partition("-")
        what = "all"
        if share:
            what = f"1/{1 / float(share):g} of the {kind}"
        cells = [f"{trained['response_tokens']:,}", str(trained["steps"])]
        for place in ("id", "ood"):
            cells.append(with_interval(results.figure("alpha", draft, place, temperature)))
            cells.append(with_interval(predicted_tau(results, draft, place, temperature), 2))
        rows.append([what, *cells])
    return table(
        [first, "tokens", "steps", "alpha chat", "tau chat", "alpha maths", "tau maths"], rows
    )


def gain_over_seeds(results: Results, new: str, old: str, domain: str) -> Estimate:
    """Return the gain in alpha of some drafts over others at temperature 1, the mean over the
    training seeds of each, with its interval over prompts.
    """
    document = results.document
    (suite,) = [row for row in document["suites"] if row["name"] == domain]
    alphas = real_figures.sums_of(results, 1.0)

    def sums(pattern: str) -> PromptSums:
        named = [alphas[draft][domain] for draft in alphas if fnmatchcase(draft, pattern)]
        accepted = np.sum([each.numerator_P for each in named], axis=0)
        return PromptSums(accepted, np.sum([each.denominator_P for each in named], axis=0))

    config = document["config"]
    picks = resamples(suite["prompt_groups"], config["bootstrap"], config["seed"])
    return difference(sums(new), sums(old), picks)
