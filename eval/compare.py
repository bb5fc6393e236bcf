"""Compare two evaluations: every figure that both have, and the second minus the first.

Prompts are matched by the hash of their tokens. If both measured at least two of the same prompts, the difference is
over those, paired; else over each one's own prompts, drawn independently.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from draftsmith_core.errors import InputError
from eval.bootstrap import Floats, PromptSums, Resamples, bounds, interval, pooled_ratios, resamples, signs
from eval.results import Cell, Results
from eval.schema import TARGET, Estimate, Row

Figure = Literal["alpha", "tau", "speedup"]
# The measurement behind a figure, and its ratio of per-prompt sums.
SUMS: dict[Figure, tuple[str, str, str]] = {
    "alpha": ("alpha", "sum", "count"),
    "tau": ("decoding", "emitted", "target_calls"),
    "speedup": ("speed", "emitted", "decode_s"),
}
# Options that are compared elsewhere, or that do not change what is measured.
_NOT_COMPARED = ("target", "draft", "id", "ood", "temperature", "out", "tracker", "project", "strict", "bootstrap")


@dataclass(frozen=True)
class Compared:
    """One figure in both evaluations. `sign`: 1 or -1 if they differ, under Holm's correction over the figure's rows.

    `shared`: number of prompts that both have; `paired` says whether the difference is over those alone.
    """

    figure: Figure
    first: Row
    second: Row
    difference: Estimate
    shared: int
    paired: bool
    sign: int | None


@dataclass(frozen=True)
class Comparison:
    """All rows, and what else differs: what only one measured, models, options, timings."""

    rows: list[Compared]
    remarks: list[str]

    def summary(self) -> dict[str, Any]:
        """As `draftsmith eval --compare A B --json` prints it."""
        names = ("draft", "domain", "kind", "temperature", "tree", "verifier")
        places = [dict(zip(names, itemgetter(*names)(row.first), strict=True)) for row in self.rows]
        rows = [{**place, **asdict(row)} for place, row in zip(places, self.rows, strict=True)]
        return {"rows": rows, "remarks": self.remarks}


def compare(first: Results, second: Results, *, bootstrap: int = 2000, seed: int = 0) -> Comparison:
    """Compare two evaluations. InputError if they have no draft, set and temperature in common."""
    compared: list[Compared] = []
    for figure in SUMS:
        ours, theirs = _cells(first, second, figure), _cells(second, first, figure)
        rows = [_compared(figure, ours[key], theirs[key], bootstrap, seed) for key in ours if key in theirs]
        clear = signs([bounds(row.difference) for row in rows])
        compared += [replace(row, sign=sign) for row, sign in zip(rows, clear, strict=True)]
    if not compared:
        have = [
            f"{', '.join(r.drafts)} on {', '.join(r.domains())} at T = {', '.join(f'{t:g}' for t in r.temperatures)}"
            for r in (first, second)
        ]
        raise InputError(
            f"--compare: nothing in common; the first has {have[0]}, the second {have[1]}; name drafts and sets alike"
        )
    return Comparison(compared, _remarks(first, second, compared))


@dataclass(frozen=True)
class _Figure:
    """One figure of one evaluation. `parts`: its per-prompt ratio, and the target's own for a speedup."""

    row: Row
    prompts: list[str]
    parts: list[PromptSums]


def _cells(results: Results, other: Results, figure: Figure) -> dict[Cell, _Figure]:
    digests = {suite["name"]: suite["digest"] for suite in other.document["suites"]}
    prompts = {}
    for suite in results.document["suites"]:
        equal = digests.get(suite["name"]) == suite["digest"]
        prompts[suite["name"]] = _unique([suite["digest"]] * suite["done"] if equal else suite["prompt_hashes"])
    of, above, below = SUMS[figure]
    counts = results.counts(of)
    cells: dict[Cell, _Figure] = {}
    for row in results.rows(figure):
        if row["domain"] not in prompts:
            continue
        domain, temperature = row["domain"], row["temperature"]
        key = (row["draft"], domain, temperature, row["tree"], row["verifier"])
        sides = [key, (TARGET, domain, temperature, None, None)] if figure == "speedup" else [key]
        parts = [PromptSums.of(*(counts[side]["per_prompt"][name] for name in (above, below))) for side in sides]
        # Only the first prompts of a set are timed.
        cells[key] = _Figure(row, prompts[domain][: len(parts[0].numerator_P)], parts)
    return cells


def _unique(hashes: Sequence[str]) -> list[str]:
    """A name for every prompt: its hash, and how often the same hash came so far."""
    seen: Counter[str] = Counter()
    names = []
    for name in hashes:
        seen[name] += 1
        names.append(f"{name}/{seen[name]}")
    return names


def _compared(figure: Figure, ours: _Figure, theirs: _Figure, bootstrap: int, seed: int) -> Compared:
    places = {name: index for index, name in enumerate(theirs.prompts)}
    shared = [(index, places[name]) for index, name in enumerate(ours.prompts) if name in places]
    paired = len(shared) > 1
    if paired:
        sides = [_taken(ours, [a for a, _ in shared]), _taken(theirs, [b for _, b in shared])]
        picks = [resamples(len(shared), bootstrap, seed)] * 2
    else:
        sides = [ours.parts, theirs.parts]
        picks = [resamples(len(cell.prompts), bootstrap, seed + n) for n, cell in enumerate((ours, theirs))]
    return Compared(figure, ours.row, theirs.row, _difference(sides, picks), len(shared), paired, sign=None)


def _taken(cell: _Figure, indices: list[int]) -> list[PromptSums]:
    return [PromptSums(part.numerator_P[indices], part.denominator_P[indices]) for part in cell.parts]


def _difference(sides: Sequence[list[PromptSums]], picks: Sequence[Resamples]) -> Estimate:
    """Second minus first; a speedup is a ratio to the target alone of its own evaluation."""
    values: list[float | None] = []
    drawn: list[Floats] = []
    for parts, weights in zip(sides, picks, strict=True):
        ratios = [part.pooled for part in parts]
        values.append(ratios[0] if len(ratios) == 1 else ratios[0] / ratios[1] if ratios[0] and ratios[1] else None)
        resampled = pooled_ratios(parts[0], weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn.append(resampled if len(parts) == 1 else resampled / pooled_ratios(parts[1], weights))
    prompts = len(sides[0][0].numerator_P)
    if values[0] is None or values[1] is None:
        return Estimate(value=None, low=None, high=None, n=prompts)
    # Paired prompts are one sample, else there are two.
    sizes = picks[0].sizes if picks[0] is picks[1] else picks[0].sizes + picks[1].sizes
    low, high = interval(drawn[1] - drawn[0], Resamples(picks[0].weights_RP, sizes))
    return Estimate(value=values[1] - values[0], low=low, high=high, n=prompts)


def _remarks(first: Results, second: Results, rows: Sequence[Compared]) -> list[str]:
    """What only one evaluation has, and what differs besides the figures."""
    remarks = []
    pairs = [("first", first, second), ("second", second, first)]
    for which, one, other in pairs:
        for what, names, others in (
            ("drafts", one.drafts, other.drafts),
            ("sets", one.domains(), other.domains()),
            ("temperatures", [f"{t:g}" for t in one.temperatures], [f"{t:g}" for t in other.temperatures]),
        ):
            only = [name for name in names if name not in others]
            if only:
                remarks.append(f"only the {which} has the {what} {', '.join(only)}")
    before, after = first.document, second.document
    for name, model in before["models"].items():
        new = after["models"].get(name, model)
        if new["fingerprint"] != model["fingerprint"]:
            who = "the target is not the same" if name == "target" else f"draft {name} has other weights"
            remarks.append(f"{who} ({model['name']}, {new['name']})")
    for key in {**before["config"], **after["config"]}:
        values = [document["config"].get(key) for document in (before, after)]
        if key not in (*_NOT_COMPARED, "require") and values[0] != values[1]:
            remarks.append(f"--{key} was {values[0]}, then {values[1]}")
    unpaired = sum(not row.paired for row in rows)
    if unpaired:
        remarks.append(f"{unpaired} of {len(rows)} rows are not paired: their sets share fewer than two prompts")
    for which, one, _ in pairs:
        if any(row["busy"] for row in one.document["conditions"]):
            remarks.append(f"the machine was busy while the {which} was timed")
    machines = [{k: v for k, v in each["clock"]["machine"].items() if k != "cpus"} for each in (before, after)]
    if machines[0] != machines[1] and any(row.figure == "speedup" for row in rows):
        remarks.append("they were timed on different machines")
    return remarks
