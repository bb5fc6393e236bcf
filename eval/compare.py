"""Compare two evaluations: every figure that both have, and the second minus the first.

Prompts are matched by the hash of their tokens. If both measured at least two of the same prompts, the difference is
over those, paired; else over each evaluation's own prompts, drawn independently.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from draftsmith_core.errors import InputError, counted
from eval.bootstrap import PromptSums, Resamples, interval, pooled_ratios, resamples, signs
from eval.report.formats import CLEAR, NONE, named_set, number, text_table, tree_name, with_interval
from eval.results import Cell, Results
from eval.schema import TARGET, Estimate, Row

Figure = Literal["alpha", "tau", "speedup"]
# By figure: its title, the measurement behind it, and its ratio of per-prompt sums.
FIGURES: dict[Figure, tuple[str, str, str, str]] = {
    "alpha": ("Expected acceptance α", "alpha", "sum", "count"),
    "tau": ("Tokens per target call τ", "decoding", "emitted", "target_calls"),
    "speedup": ("Speedup over the target alone", "speed", "emitted", "decode_s"),
}
# Options that are compared elsewhere, or that do not change what is measured.
_NOT_COMPARED = {"target", "draft", "id", "ood", "temperature", "out", "tracker", "project", "strict", "bootstrap"}
_NOT_COMPARED |= {"require"}


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
    sign: int | None = None


@dataclass(frozen=True)
class Comparison:
    """All rows, and what else differs: what only one measured, models, options, timings."""

    rows: list[Compared]
    remarks: list[str]

    def summary(self) -> dict[str, Any]:
        """As `draftsmith eval --compare A B --json` prints it."""
        names = ("draft", "domain", "kind", "temperature", "tree", "verifier")
        places = [dict(zip(names, itemgetter(*names)(row.first), strict=True)) for row in self.rows]
        rows = [place | asdict(row) for place, row in zip(places, self.rows, strict=True)]
        return {"rows": rows, "remarks": self.remarks}

    def lines(self) -> list[str]:
        """Remarks, then a table for each figure, as wide as its text."""
        lines = [f"remark: {text}" for text in self.remarks]
        for figure, (title, *_) in FIGURES.items():
            table = [
                {"draft": row.first["draft"], "set": named_set(row.first), "T": f"{row.first['temperature']:g}"}
                | ({"method": _method(row.first)} if figure != "alpha" else {})
                | {"first": number(row.first["value"]), "second": number(row.second["value"])}
                | {"second - first [95 %]": with_interval(row.difference, sign=True)}
                | {"over": counted(row.shared, "shared prompt") if row.paired else "each one's own prompts"}
                | {"": CLEAR[row.sign]}
                for row in self.rows
                if row.figure == figure
            ]
            if table:
                lines += ["", *text_table(title, table)]
        return [*lines, "", "Higher and lower hold at 95 % under Holm's correction over the rows of a table."]


def _method(row: Row) -> str:
    return f"{tree_name(row['tree'])} {row['verifier']}" if row["tree"] else NONE


def compare(first: Results, second: Results, *, bootstrap: int = 2000, seed: int = 0) -> Comparison:
    """Compare two evaluations. InputError if they have no draft, set and temperature in common."""
    compared: list[Compared] = []
    for figure in FIGURES:
        ours, theirs = _cells(first, figure), _cells(second, figure)
        rows = [_compared(figure, ours[key], theirs[key], bootstrap, seed) for key in ours if key in theirs]
        clear = signs([row.difference for row in rows])
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


# A row, the names of its prompts, and its per-prompt ratio over that of the target alone (of a speedup; else 1 / 1).
_Side = tuple[Row, list[str], tuple[PromptSums, PromptSums]]


def _cells(results: Results, figure: Figure) -> dict[Cell, _Side]:
    _, of, above, below = FIGURES[figure]
    hashes = {suite["name"]: suite["prompt_hashes"] for suite in results.document["suites"]}
    # A prompt goes by its hash and how often the same hash came before it.
    names = {
        name: [f"{each}/{known[:i].count(each)}" for i, each in enumerate(known)] for name, known in hashes.items()
    }
    sums = {
        cell: PromptSums.of(counts["per_prompt"][above], counts["per_prompt"][below])
        for cell, counts in results.counts(of).items()
    }
    cells: dict[Cell, _Side] = {}
    for row in results.rows(figure):
        if row["domain"] in names:
            cell = (row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"])
            ones = np.ones(len(sums[cell].numerator_P))
            alone = sums[TARGET, *cell[1:3], None, None] if figure == "speedup" else PromptSums(ones, ones)
            # Only the first prompts of a set are timed.
            cells[cell] = row, names[row["domain"]][: len(ones)], (sums[cell], alone)
    return cells


def _compared(figure: Figure, ours: _Side, theirs: _Side, bootstrap: int, seed: int) -> Compared:
    others = set(theirs[1])
    shared = [name for name in ours[1] if name in others]
    sides = []
    for turn, (_, names, parts) in enumerate((ours, theirs)):
        if len(shared) > 1:  # paired: the same prompts in the same order, resampled alike
            indices = [names.index(name) for name in shared]
            parts = tuple(PromptSums(part.numerator_P[indices], part.denominator_P[indices]) for part in parts)  # type: ignore[assignment]
            turn = 0
        picks = resamples(len(parts[0].numerator_P), bootstrap, seed + turn)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn_R = pooled_ratios(parts[0], picks) / pooled_ratios(parts[1], picks)
        pooled, alone = (part.pooled for part in parts)
        sides.append((pooled / alone if pooled is not None and alone else None, drawn_R, picks))
    (before, before_R, picks), (after, after_R, other_picks) = sides
    difference = Estimate(value=None, low=None, high=None, n=len(sides[0][2].weights_RP[0]))
    if before is not None and after is not None:
        # Paired prompts are one sample, else there are two.
        sizes = picks.sizes if len(shared) > 1 else picks.sizes + other_picks.sizes
        low, high = interval(after_R - before_R, Resamples(picks.weights_RP, sizes))
        difference |= {"value": after - before, "low": low, "high": high}
    return Compared(figure, ours[0], theirs[0], difference, len(shared), paired=len(shared) > 1)


def _remarks(first: Results, second: Results, rows: Sequence[Compared]) -> list[str]:
    """What only one evaluation has, and what differs besides the figures."""
    remarks = []
    for which, one, other in (pairs := [("first", first, second), ("second", second, first)]):
        for what, names, others in (
            ("drafts", one.drafts, other.drafts),
            ("sets", one.domains(), other.domains()),
            ("temperatures", [f"{t:g}" for t in one.temperatures], [f"{t:g}" for t in other.temperatures]),
        ):
            if only := [name for name in names if name not in others]:
                remarks.append(f"only the {which} has the {what} {', '.join(only)}")
    before, after = first.document, second.document
    for name, model in before["models"].items():
        new = after["models"].get(name, model)
        if new["fingerprint"] != model["fingerprint"]:
            who = "the target is not the same" if name == "target" else f"draft {name} has other weights"
            remarks.append(f"{who} ({model['name']}, {new['name']})")
    for key in {**before["config"], **after["config"]}:
        values = [document["config"].get(key) for document in (before, after)]
        if key not in _NOT_COMPARED and values[0] != values[1]:
            remarks.append(f"--{key} was {values[0]}, then {values[1]}")
    if unpaired := sum(not row.paired for row in rows):
        remarks.append(f"{unpaired} of {len(rows)} rows are not paired: their sets share fewer than two prompts")
    for which, one, _ in pairs:
        if any(row["busy"] for row in one.document["conditions"]):
            remarks.append(f"the machine was busy while the {which} was timed")
    machines = [{k: v for k, v in each["clock"]["machine"].items() if k != "cpus"} for each in (before, after)]
    if machines[0] != machines[1] and any(row.figure == "speedup" for row in rows):
        remarks.append("they were timed on different machines")
    return remarks
