"""Tables of the study of SmolLM2-135M-Instruct (`real_pair.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.pages import table
from benchmarks.lib.seeds import estimate_of_mean, pool_resamples, pool_sums
from benchmarks.studies import frontier_tables, real_figures
from draftsmith.eval.report.formats import number, with_interval
from draftsmith.eval.results import Results
from draftsmith.eval.schema import Row

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
    return results.figure("tau_predicted", draft, kind, temperature, *real_figures.CHAIN)


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
        cells = [
            with_interval(results.alpha(draft, domain, temperature)) for domain in results.domains()
        ]
        cells += [
            with_interval(predicted_tau(results, draft, kind, temperature), 2)
            for kind in ("id", "ood")
        ]
        rows.append([name, *cells])
    own = results.domains("id")[0]
    return table([first, *results.domains(), f"tau {own}", "tau elsewhere"], rows)


def over_seeds(seeds: Sequence[Results], first: str) -> str:
    """alpha of drafts that were trained with every seed: its mean with the interval over prompts,
    and by seed; by seed the predicted tau of chains of 4.
    """
    own, *others = seeds[0].domains()
    drafts = [
        draft for draft in seeds[0].drafts if all(draft in results.drafts for results in seeds)
    ]
    rows = [[NAMES[draft]] for draft in drafts]
    for temperature in (0.0, 1.0):
        alphas = [real_figures.sums_of(results, temperature) for results in seeds]
        for row, draft in zip(rows, drafts, strict=True):
            for names in ([own], others):
                picks = pool_resamples(
                    [frontier_tables.picks_of(alphas[0][draft][name], name, 2000) for name in names]
                )
                sums = [pool_sums([alpha[draft][name] for name in names]) for alpha in alphas]
                by_seed = ", ".join(number(one.pooled, 3) for one in sums)
                row.append(f"{with_interval(estimate_of_mean(sums, picks))} ({by_seed})")
            taus = [predicted_tau(results, draft, "id", temperature) for results in seeds]
            row.append(", ".join(number(tau["value"] if tau else None, 2) for tau in taus))
    heading = [
        f"{what}, T = {at}" for at in (0, 1) for what in (own, "elsewhere", f"tau {own} by seed")
    ]
    return table([first, *heading], rows)


def draft_speeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed over the target alone and decoded tau, by set, draft, tree and temperature."""
    ways = dict.fromkeys((row["temperature"], row["tree"]) for row in rows if row["draft"])
    lines: dict[tuple[str, str], dict[tuple[float, str], str]] = {}
    for row in rows:
        cell = f"{number(row['over_alone'], 2)} ({number(row['tau'], 2)})"
        line = lines.setdefault((row.get("domain", "chat"), row["draft"]), {})
        line[row["temperature"], row["tree"]] = cell
    several = len({domain for domain, _ in lines}) > 1
    head = ["one chat at a time", *(f"{tree}, T = {at:g}" for at, tree in ways)]
    cells = []
    for (domain, draft), line in lines.items():
        if draft:
            name = f"{domain}, {_short(draft)}" if several else _short(draft)
            cells.append([name, *(line.get(way, "") for way in ways)])
    return table(head, cells)


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
    places = list(dict.fromkeys((domain, temperature) for _, domain, temperature, _ in found))
    taus = {(name, domain, temperature): tau for name, domain, temperature, tau in found}
    rows = (
        [name, *(number(taus.get((name, *at)), 2) for at in places)]
        for name in dict.fromkeys(n for n, *_ in found)
    )
    return table(["method, decoded", *(f"{domain}, T = {at:g}" for domain, at in places)], rows)


def by_depth(results: Results, first: str, temperature: float) -> str:
    """The chance that each of four drafted tokens of a chain is accepted, given those before it, in
    distribution.
    """
    rows = []
    for draft in results.drafts:
        accepted = results.series("accept_predicted", draft, "id", temperature, *real_figures.CHAIN)
        cells = [with_interval(row) for row in accepted]
        cells += [
            with_interval(predicted_tau(results, draft, kind, temperature), 2)
            for kind in ("id", "ood")
        ]
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
            cells.append(frontier_tables.share_of(row))
            rows.append([f"{NAMES[way]}, T = {temperature:g}", str(row["seeds"]), *cells])
    heading = [*results.domains(), "all but maths", "share of plain's gain"]
    return table([first, "seeds", *heading], rows)


def amounts(results: Results, first: str, temperature: float) -> str:
    """alpha and the predicted tau of chains of 4, by the tokens and the steps that a head was
    trained with.
    """
    rows = []
    for draft in sorted(results.drafts):
        trained: Any = results.document["models"][draft]["training"]
        kind, _, share = draft.partition("-")
        what = f"1/{1 / float(share):g} of the {kind}" if share else "all"
        cells = [f"{trained['response_tokens']:,}", str(trained["steps"])]
        for place in ("id", "ood"):
            cells.append(with_interval(results.figure("alpha", draft, place, temperature)))
            cells.append(with_interval(predicted_tau(results, draft, place, temperature), 2))
        rows.append([what, *cells])
    return table(
        [first, "tokens", "steps", "alpha chat", "tau chat", "alpha maths", "tau maths"], rows
    )
