"""The tables of docs/evidence/: one on each page, and all others in docs/results/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lib.pages import by_temperature, gap, table
from benchmarks.studies import (
    causal_tables,
    frontier_tables,
    heads_tables,
    objectives_tables,
    real_figures,
    real_speed,
    real_tables,
    recipe_tables,
)
from benchmarks.studies.real_tables import NAMES
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import Figure, number, with_interval
from draftsmith.eval.results import Results

# A document of one of the studies.
Document = JsonObject
# Base drafts that every way to keep what they knew was tried on.
FRONTIERS = ("nano", "stories", "pruned")
# Domains that the demo's draft was aligned to; nothing was chosen on the last two.
ALIGNED_TO = {
    "prose": "prose",
    "code": "code",
    "gsm8k": "gsm8k, held back",
    "unicode": "unicode, held back",
}
# Longer runs of the study of objectives, as their tables and their results name them.
LONGER = {
    "nano, 320 steps": "objectives-nano-320",
    "stories, 480 steps": "objectives-stories-480",
}
WAYS = ("plain", "balanced")


@dataclass(frozen=True)
class Evidence:
    """What a page is made of. name: of the page, and of the file with all tables. sections: by
    heading, Markdown.
    """

    name: str
    title: str
    table: str
    sections: Mapping[str, str]

    def details(self) -> str:
        """Return the file with all tables."""
        parts = [
            f"# Tables: {self.title}\n\n`python -m benchmarks.studies.figures` makes them from the "
            f"results in this folder. [What they show](../evidence/{self.name}.md)."
        ]
        for heading, text in self.sections.items():
            parts += [f"## {heading}", text.strip()]
        return "\n\n".join(parts) + "\n"


def in_one_table(demo: Results, large: Results, chat: Results) -> str:
    """Return the README's table. large: the demo's drafts beside the padded target, for speed.
    chat: a draft of SmolLM2's chats that `draftsmith align` aligned to maths.
    """
    rows = _by_draft("demo", demo, large, ("chain:2", "speculative"))
    rows += _by_draft("SmolLM2", chat, chat, ("kary:4", "mcsd"))
    return table(["draft", "ID", "OOD", "tokens per call", "speed"], rows)


def _by_draft(pair: str, results: Results, timed: Results, way: tuple[str, str]) -> list[list[str]]:
    """Return a row per trained draft. timed: where the speeds are. way: the tree and the
    verifier.
    """
    rows = []
    tree, verifier = way
    for draft in [results.base, *results.aligned]:
        name = draft.removeprefix("jsd-").replace("balanced", "**balanced**")
        alphas = [_value(results.figure("alpha", draft, kind, 1.0)) for kind in ("id", "ood")]
        tau = _value(results.figure("tau_predicted", draft, "id", 1.0, tree, verifier))
        speed = with_interval(timed.figure("speedup", draft, "id", 1.0, tree, verifier), 2)
        rows.append([f"{pair}, {name}", *map(number, alphas), number(tau, 2), speed])
    return rows


def _value(figure: Figure | None) -> float:
    """The value of a figure that every draft of a kept evaluation has."""
    assert figure is not None
    return float(figure["value"])


def which_draft(
    first: Results, second: Results, weightless: Sequence[tuple[str, str, float, float | None]]
) -> Evidence:
    """Return the tables of the drafts of SmolLM2. first, second: the two training seeds."""
    rows = []
    for draft in first.drafts:
        alphas = [first.figure("alpha", draft, kind, 1.0) for kind in ("id", "ood")]
        cells = [with_interval(alpha) for alpha in alphas]
        cells += real_tables.taus(first, draft, 1.0) + real_tables.taus(first, draft, 0.0)
        rows.append([NAMES[draft], *cells])
    heading = by_temperature(["alpha chat", "alpha elsewhere"], [1])
    heading += by_temperature(["tau chat", "tau elsewhere"], [1, 0])
    sections = {
        f"Acceptance by set, T = {at:g}": real_tables.acceptance(first, "draft", at)
        for at in (1.0, 0.0)
    }
    sections["Two training seeds"] = real_tables.over_seeds([first, second], "draft")
    sections["Methods without weights, tokens per call, decoded"] = real_tables.weightless(
        weightless
    )
    return Evidence(
        name="which-draft",
        title="which draft",
        table=table(["draft", *heading], rows),
        sections=sections,
    )


def alignment(
    bases: Mapping[str, Results],
    balanced: Mapping[str, Document],
    frontiers: Mapping[str, Document],
    several: Document,
) -> Evidence:
    """Return the tables of alignment. bases: drafts of SmolLM2's chats aligned to maths. balanced:
    the demo's draft aligned to a domain. frontiers: all ways, by pair. several: several domains.
    """
    documents: dict[str, Document] = {
        f"SmolLM2, {NAMES[base]}, maths": real_figures.over_seeds(results, 1.0)
        for base, results in bases.items()
    }
    documents |= {f"demo, {ALIGNED_TO[name]}": document for name, document in balanced.items()}
    rows = []
    for name, document in documents.items():
        ways = dict(zip(WAYS, ("plain", frontier_tables.BALANCED), strict=True))
        for way, method in ways.items():
            row = document["rows"].get(method) or document["rows"][way]
            cells = [gap(row["id"]["change"]), gap(row["ood"]["change"])]
            share = "" if way == "plain" else frontier_tables.share_of(row)
            cells += [frontier_tables.worst_of(row), share]
            rows.append([name, way, *cells])
    heading = [
        "draft, aligned to",
        "way",
        "change ID",
        "all other sets",
        "worst other set",
        "share of plain's gain",
    ]
    sections = {
        f"SmolLM2, {NAMES[base]}": real_tables.changes_over_seeds(results, "way")
        for base, results in bases.items()
    }
    sections |= {
        f"Every way, {pair} pair": frontier_tables.by_method(document, "method")
        for pair, document in frontiers.items()
    }
    sections["Several domains at once, demo"] = frontier_tables.gains(several)
    return Evidence(
        name="alignment", title="alignment", table=table(heading, rows), sections=sections
    )


def how_much(results: Results) -> Evidence:
    """Return the tables of the head that was trained on shares of the data, and of the steps."""
    hot, cold = (real_tables.amounts(results, "share", at) for at in (1.0, 0.0))
    return Evidence(
        name="how-much",
        title="how much training",
        table=hot,
        sections={"T = 1": hot, "T = 0": cold},
    )


# Heads of the study of long texts.
LENGTHS = {
    "kept": "the kept head",
    "short": "then rows of 256",
    "long": "then rows of 2,048",
}


def long_texts(results: Results) -> Evidence:
    """Return the table of one head by the length of what it was trained on and of the prompt."""
    rows = []
    for domain in results.domains():
        alphas = [results.alpha(draft, domain, 1.0) for draft in LENGTHS]
        change = real_tables.gain_over_seeds(results, "long", "short", domain)
        rows.append([f"{int(domain):,}", *map(with_interval, alphas), gap(change)])
    heading = ["tokens of the prompt", *LENGTHS.values(), "long over short rows"]
    shown = table(heading, rows)
    return Evidence(
        name="long-texts",
        title="what a head loses beyond the length it was trained on",
        table=shown,
        sections={"T = 1": shown},
    )


# Optimizer and steps of the drafts of SmolLM2, in the order of the rows of a draft.
RECIPES = ("AdamW, 624", "Muon, 312", "Muon, 1,248")
# A GPU trained these on all answers. Name in its evaluation -> kind, and optimizer and steps.
LONGEST = {
    "pruned-long": ("pruned", "Muon, 751 of 16"),
    "eagle3-long": ("eagle3", "Muon, 611 of 16"),
    "eagle-long-ts3": ("eagle", "Muon, 382 of 16, three depths"),
}
ALL_ANSWERS = {
    "e3-1248": "EAGLE-3, 1,248 steps of 4, trained on a CPU",
    "eagle3-long": "EAGLE-3, 611 steps of 16",
    "e3-maths": "the same, aligned to maths, balanced",
    "eagle-long-ts3": "EAGLE-1, three depths, 382 steps of 16",
    "pruned-long": "two pruned layers, 751 steps of 16",
}
SECOND_SEED = {
    "pruned-adamw-624-2": "two pruned layers, AdamW, 624",
    "pruned-muon-312-2": "two pruned layers, Muon, 312",
    "eagle3-adamw-624-2": "EAGLE-3, AdamW, 624",
    "eagle3-muon-312-2": "EAGLE-3, Muon, 312",
    "eagle-adamw-624-2": "EAGLE-1, AdamW, 624",
    "eagle-muon-312-2": "EAGLE-1, Muon, 312",
    "eagle-muon-312-2-ts3": "EAGLE-1, Muon, 312, three depths",
    "eagle-muon-312-1": "EAGLE-1, Muon, 312, first seed",
    "eagle-muon-312-1-ts3": "EAGLE-1, Muon, 312, three depths, first seed",
    "dspark-adamw-624-2": "DSpark, AdamW, 624",
    "dspark-muon-312-2": "DSpark, Muon, 312",
}
PEER = {"eagle3-312": "draftsmith, 312 steps", "peer": "speculators 0.9.0, 305 steps"}


def recipe(
    evaluations: Sequence[Results],
    speeds: Sequence[Sequence[Document]],
    small: Mapping[str, Sequence[Document]],
    longest: Results,
    longest_speeds: Sequence[Document],
    peer: Results,
) -> Evidence:
    """Return the tables of Muon beside AdamW. evaluations: of drafts of SmolLM2, one for each of
    RECIPES. speeds: of those with Muon. small: the runs of each small pair. longest: drafts that a
    GPU trained on all answers. peer: one of them beside a peer's trainer.
    """
    rows = []
    for draft in evaluations[1].drafts:
        runs = [
            (label, results, draft)
            for label, results in zip(RECIPES, evaluations, strict=True)
            if draft in results.drafts
        ]
        for name, (kind, label) in LONGEST.items():
            if kind == draft:
                runs.append((label, longest, name))
        for label, results, name in runs:
            alphas = [results.figure("alpha", name, kind, 1.0) for kind in ("id", "ood")]
            tau = real_tables.predicted_tau(results, name, "id", 1.0)
            cells = [*map(with_interval, alphas), with_interval(tau, 2)]
            rows.append([NAMES[draft], label, *cells])
    heading = ["draft", "optimizer, steps", "alpha chat", "alpha elsewhere", "tau chat"]
    sections = {}
    for label, results, timed in zip(RECIPES[1:], evaluations[1:], speeds, strict=True):
        acceptance = real_tables.acceptance(results, "draft", 1.0)
        sections[f"SmolLM2, every set, {label} steps"] = acceptance
        title = f"SmolLM2, speed over the target alone (tokens per call), medians, {label} steps"
        sections[title] = real_tables.draft_speeds(timed)
    for at in (1.0, 0.0):
        acceptance = real_tables.acceptance(longest, "draft", at, ALL_ANSWERS)
        sections[f"SmolLM2, the longest training, T = {at:g}"] = acceptance
    title = "SmolLM2, speed over the target alone (tokens per call), medians, the longest training"
    sections[title] = real_tables.draft_speeds(longest_speeds)
    acceptance = real_tables.acceptance(peer, "trainer", 1.0, PEER)
    sections["SmolLM2, EAGLE-3 by another trainer, T = 1"] = acceptance
    second = real_tables.acceptance(longest, "draft, second seed", 1.0, SECOND_SEED)
    sections["SmolLM2, another seed, steps of four answers"] = second
    for pair, found in small.items():
        sections[f"{pair}, held-out alpha by step"] = recipe_tables.curves(found)
        sections[f"{pair}, alpha by set"] = recipe_tables.by_set(found)
    return Evidence(
        name="recipe",
        title="which optimizer",
        table=table(heading, rows),
        sections=sections,
    )


def how_fast(
    drafts: Sequence[Document],
    engines: JsonObject,
    longest: JsonObject,
    command: Results,
) -> Evidence:
    """Return the tables of speed. drafts: every draft of SmolLM2 by tree. engines: two drafts here
    and in other engines; longest: the same with the head that was trained longest. command: a head
    of SmolLM2 that `draftsmith align` aligned to maths.
    """
    sections = {"Every draft with AdamW, medians": real_tables.draft_speeds(drafts)}
    for of, found in (("", engines), (", EAGLE-3 of the longest training", longest)):
        sections[f"Beside other engines{of}"] = real_speed.speeds_table(found)
        for temperature in real_speed.TEMPERATURES:
            ledger = real_speed.ledger(found, temperature)
            sections[f"Milliseconds of a step{of}, T = {temperature:g}"] = ledger
    return Evidence(
        name="how-fast",
        title="how fast",
        table=real_speed.with_intervals([engines, longest], command),
        sections=sections,
    )


def objectives(pairs: Mapping[str, Document], longer: Mapping[str, Document]) -> Evidence:
    """Return the tables of objectives and data modes, each over `fkl`."""
    places = [(pair, "ID", "1") for pair in pairs] + [("nano", "OOD", "1")]
    places += [(pair, "ID", "0") for pair in pairs]
    rows = []
    for name in pairs["nano"]["cells"]:
        cells = []
        for pair, place, at in places:
            document = pairs[pair]
            by_place = document["figures"][at].get(name, {})
            cell = by_place.get(document["domains"][0] if place == "ID" else "ood", {})
            cells.append(objectives_tables.over_fkl(cell))
        if name != objectives_tables.ALIKE:
            rows.append([f"`{name}`", *cells])
    heading = ["alpha over `fkl`"]
    heading += [f"{pair}: {place}, T = {at}" for pair, place, at in places]
    sections = {}
    for pair, document in pairs.items():
        title = pair.capitalize()
        sections[f"{title} pair"] = objectives_tables.tables(document)
    sections |= {
        f"Longer runs: {name}": objectives_tables.in_short(document, "objective")
        for name, document in longer.items()
    }
    return Evidence(
        name="objectives",
        title="objectives",
        table=table(heading, rows),
        sections=sections,
    )


def block_drafters(which: Results, small: Mapping[str, Results]) -> Evidence:
    """Return the tables of acceptance by depth. small: heads of equal parameters, by pair."""
    hot, cold = (real_tables.by_depth(which, "token", at) for at in (1.0, 0.0))
    sections = {"SmolLM2, T = 1": hot, "SmolLM2, T = 0": cold}
    for pair, results in small.items():
        figures, depths = heads_tables.heads(results, "head")
        sections[f"Heads of equal parameters, {pair} pair"] = figures
        sections[f"Acceptance by depth, {pair} pair, T = 1"] = depths
    return Evidence(name="block-drafters", title="block drafters", table=hot, sections=sections)


def targets(document: Document) -> Evidence:
    """Return the tables of what works with each causal architecture of transformers."""
    sections = {
        "Every causal type": causal_tables.every_type(document),
        "Not run by transformers as causal models": causal_tables.not_run(document),
    }
    table_of_page = causal_tables.totals(document)
    return Evidence(
        name="targets", title="causal architectures", table=table_of_page, sections=sections
    )


def claims(verdicts: str) -> str:
    """Return the verdict of every claim by pair, of its page in docs/results/."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    pairs = ("demo", "stories", "SmolLM2")
    for line in verdicts.split("\n"):
        cells = line.strip("|").split("|")
        if len(cells) == 5:
            claim, paper, where, _, verdict = map(str.strip, cells)
            pair = where.partition(",")[0]
            if pair in pairs:
                rows.setdefault((claim, paper), {})[pair] = verdict
    lines = []
    for key, by_pair in rows.items():
        told = [by_pair.get(pair, "") for pair in pairs]
        lines.append([*key, *told])
    return table(["claim", "paper", *pairs], lines)
