"""Two evaluations side by side: every figure that both have, and by how much the second differs from the first.

Prompts are matched by the hash of their tokens. Where both evaluations measured at least two of the same prompts, the
difference is over those, paired; else over each one's own prompts, drawn independently.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from draftsmith_core.errors import InputError
from eval.bootstrap import Floats, PromptSums, Resamples, bounds, interval, pooled_ratios, resamples, signs
from eval.results import Results
from eval.schema import Difference, Estimate, SuiteKind

Figure = Literal["alpha", "tau", "speedup"]
# What a figure is the ratio of, per prompt.
SUMS: dict[Figure, tuple[str, str]] = {
    "alpha": ("sum", "count"),
    "tau": ("emitted", "target_calls"),
    "speedup": ("emitted", "decode_s"),
}
# Options that do not change what is measured, only where it goes and how it is drawn.
_ELSEWHERE = ("out", "tracker", "project", "strict", "bootstrap", "require")


@dataclass(frozen=True)
class Compared:
    """One figure in both evaluations. `sign`: 1 or -1 where they differ, Holm's correction over this figure's rows.

    `shared`: the prompts that both have; `paired` says whether the difference is over those alone.
    """

    figure: Figure
    draft: str
    domain: str
    kind: SuiteKind
    temperature: float
    tree: str | None
    verifier: str | None
    first: Estimate
    second: Estimate
    difference: Difference
    shared: int
    paired: bool
    sign: int | None


@dataclass(frozen=True)
class Comparison:
    """All rows, and what else is not the same in the two: what only one measured, models, options, timings."""

    rows: list[Compared]
    remarks: list[str]

    def summary(self) -> dict[str, Any]:
        """As `draftsmith eval --compare A B --json` prints it."""
        return {"rows": [asdict(row) for row in self.rows], "remarks": self.remarks}


def compare(first: Results, second: Results, *, bootstrap: int = 2000, seed: int = 0) -> Comparison:
    """Set two evaluations side by side. InputError when they have no draft, set and temperature in common."""
    found: list[Compared] = []
    for figure in SUMS:
        ours, theirs = _cells(first, second, figure), _cells(second, first, figure)
        rows = [_row(figure, key, ours[key], theirs[key], bootstrap, seed) for key in ours if key in theirs]
        clear = signs([bounds(row.difference) for row in rows])
        found += [replace(row, sign=sign) for row, sign in zip(rows, clear, strict=True)]
    if not found:
        have = [
            f"{', '.join(r.drafts)} on {', '.join(r.domains())} at T = {', '.join(f'{t:g}' for t in r.temperatures)}"
            for r in (first, second)
        ]
        raise InputError(
            f"--compare: nothing in common; the first has {have[0]}, the second {have[1]}; name drafts and sets alike"
        )
    return Comparison(found, _remarks(first, second, found))


@dataclass(frozen=True)
class _Cell:
    """One figure of one evaluation. `parts`: a ratio of sums per prompt, for a speedup the target's own too."""

    figure: Estimate
    kind: SuiteKind
    prompts: list[str]
    parts: list[PromptSums]


_Key = tuple[str, str, float, str | None, str | None]


def _cells(results: Results, other: Results, figure: Figure) -> dict[_Key, _Cell]:
    document = results.document
    digests = {suite["name"]: suite["digest"] for suite in other.document["suites"]}
    prompts = {}
    for suite in document["suites"]:
        # Equal sets agree prompt by prompt, also in results before schema 4, which have no hashes.
        equal = digests.get(suite["name"]) == suite["digest"] or not suite["prompt_hashes"]
        prompts[suite["name"]] = _names([suite["digest"]] * suite["done"] if equal else suite["prompt_hashes"])
    timed: list[Any] = list(document["speed"]["domains"])
    alone = {(row["domain"], row["temperature"]): row for row in timed if row["draft"] is None}
    rows: dict[Figure, Sequence[Any]] = {
        "alpha": document["alpha"],
        "tau": document["decoding"],
        "speedup": [row for row in timed if row["draft"] is not None],
    }
    cells: dict[_Key, _Cell] = {}
    for row in rows[figure]:
        sides = [row, alone[row["domain"], row["temperature"]]] if figure == "speedup" else [row]
        parts = [PromptSums.of(*(side["per_prompt"][key] for key in SUMS[figure])) for side in sides]
        # Only the first prompts of a set are timed.
        own = prompts[row["domain"]][: len(parts[0].numerator_P)]
        key = (row["draft"], row["domain"], row["temperature"], row.get("tree"), row.get("verifier"))
        cells[key] = _Cell(row[figure], row["kind"], own, parts)
    return cells


def _names(hashes: Sequence[str]) -> list[str]:
    """A name for every prompt: its hash, and its count where the same came before."""
    seen: Counter[str] = Counter()
    names = []
    for name in hashes:
        seen[name] += 1
        names.append(f"{name}/{seen[name]}")
    return names


def _row(figure: Figure, key: _Key, ours: _Cell, theirs: _Cell, bootstrap: int, seed: int) -> Compared:
    draft, domain, temperature, tree, verifier = key
    places = {name: index for index, name in enumerate(theirs.prompts)}
    shared = [(index, places[name]) for index, name in enumerate(ours.prompts) if name in places]
    paired = len(shared) > 1
    if paired:
        sides = [_taken(ours, [a for a, _ in shared]), _taken(theirs, [b for _, b in shared])]
        picks = [resamples(len(shared), bootstrap, seed)] * 2
    else:
        sides = [ours.parts, theirs.parts]
        picks = [resamples(len(cell.prompts), bootstrap, seed + n) for n, cell in enumerate((ours, theirs))]
    return Compared(
        figure=figure,
        draft=draft,
        domain=domain,
        kind=ours.kind,
        temperature=temperature,
        tree=tree,
        verifier=verifier,
        first=ours.figure,
        second=theirs.figure,
        difference=_difference(sides[0], sides[1], picks[0], picks[1]),
        shared=len(shared),
        paired=paired,
        sign=None,
    )


def _taken(cell: _Cell, indices: list[int]) -> list[PromptSums]:
    return [PromptSums(part.numerator_P[indices], part.denominator_P[indices]) for part in cell.parts]


def _difference(
    ours: list[PromptSums], theirs: list[PromptSums], picks: Resamples, other_picks: Resamples
) -> Difference:
    """Second minus first; of speedups, each a ratio to the target alone of its own evaluation."""
    values: list[float | None] = []
    drawn: list[Floats] = []
    for parts, weights in ((ours, picks), (theirs, other_picks)):
        ratios = [part.pooled for part in parts]
        value = ratios[0] if len(ratios) == 1 else ratios[0] / ratios[1] if ratios[0] and ratios[1] else None
        resampled = pooled_ratios(parts[0], weights)
        values.append(value)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn.append(resampled if len(parts) == 1 else resampled / pooled_ratios(parts[1], weights))
    if values[0] is None or values[1] is None:
        return Difference(value=None, low=None, high=None, prompts=len(ours[0].numerator_P))
    # Of prompts that both have, one set is drawn from; else two.
    sizes = picks.sizes if picks is other_picks else picks.sizes + other_picks.sizes
    low, high = interval(drawn[1] - drawn[0], Resamples(picks.weights_RP, sizes))
    return Difference(value=values[1] - values[0], low=low, high=high, prompts=len(ours[0].numerator_P))


def _remarks(first: Results, second: Results, rows: Sequence[Compared]) -> list[str]:
    """What a reader must know before the rows: what only one has, and what differs besides the figures."""
    said = []
    pairs = [("first", first, second), ("second", second, first)]
    for which, own, other in pairs:
        for what, names, others in (
            ("drafts", own.drafts, other.drafts),
            ("sets", own.domains(), other.domains()),
            ("temperatures", [f"{t:g}" for t in own.temperatures], [f"{t:g}" for t in other.temperatures]),
        ):
            only = [name for name in names if name not in others]
            if only:
                said.append(f"only the {which} has the {what} {', '.join(only)}")
    one, two = first.document, second.document
    for name in one["models"]:
        if name in two["models"] and one["models"][name]["fingerprint"] != two["models"][name]["fingerprint"]:
            who = "the target is not the same" if name == "target" else f"draft {name} has other weights"
            said.append(f"{who} ({one['models'][name]['name']}, {two['models'][name]['name']})")
    named = ("target", "draft", "id", "ood", "temperature", *_ELSEWHERE)
    options = {**one["config"], **two["config"]}
    for key in options:
        values = [document["config"].get(key) for document in (one, two)]
        if key not in named and values[0] != values[1]:
            said.append(f"--{key} was {values[0]}, then {values[1]}")
    unpaired = sum(not row.paired for row in rows)
    if unpaired:
        said.append(f"{unpaired} of {len(rows)} rows are not paired: their sets share fewer than two prompts")
    for which, own, _ in pairs:
        if any(row["busy"] for row in own.document["speed"]["conditions"]):
            said.append(f"the machine was busy while the {which} was timed")
    machines = [{k: v for k, v in document["clock"]["machine"].items() if k != "cpus"} for document in (one, two)]
    if machines[0] != machines[1] and any(row.figure == "speedup" for row in rows):
        said.append("they were timed on different machines")
    return said
