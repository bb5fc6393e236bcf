"""Decide whether a draft is worth serving: with which settings, for which prompts, how fast.

A cell is one prompt set at one temperature; a setting is a draft with a tree and a verifier. A
setting pays in a cell if the interval of its speedup lies above 1. The interval has Holm's
correction over all cells and settings, because the best of many is judged. Lossy verifiers are left
out. Timings of a busy machine decide nothing, neither for a setting nor against it. The setting
that pays in most cells is chosen. Ties in cells and speed go to the draft that loses least out of
distribution, then, of models of one size, to the one that gains most in distribution. The setting
is chosen and judged on the same prompts, so expect a little less on others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import geometric_mean
from typing import Literal

import numpy as np

from draftsmith.eval.bootstrap import PromptSums, Resamples, quotient, ratio, resamples, signs
from draftsmith.eval.results_table import ResultsTable, key_of
from draftsmith.eval.schema import Estimate, Row, SuiteKind

Advice = Literal[
    "ship", "ship_for", "none_beats_none", "rejected", "not_shown", "busy", "too_few", "not_timed"
]
# A draft whose tokens per target call are surely below this saves no time, whatever the clock says.
SAVES_NOTHING = 1.05


@dataclass(frozen=True, order=True)
class Setting:
    """A draft and how to decode with it."""

    draft: str
    tree: str
    verifier: str

    @classmethod
    def of(cls, row: Row) -> "Setting":
        """The setting that a speedup is of."""
        return cls(row["draft"], row["tree"] or "", row["verifier"] or "")


@dataclass(frozen=True)
class Cell:
    """One set at one temperature: the chosen setting's speedup there, the fastest setting's, and
    the fastest ones of the other drafts that are slower than the target alone there.

    `sign` is 1 if the setting pays, -1 if it costs time, 0 if neither is shown, as on a busy
    machine, None without an interval. `slower` goes by each draft's interval alone.
    """

    domain: str
    temperature: float
    speedup: Row
    sign: int | None
    fastest: Row
    slower: list[Row]
    busy: bool


@dataclass(frozen=True)
class Decision:
    """The verdict, its setting (None if nothing was timed), every cell, and the speed over the base
    draft.

    `over_base`: the setting's tokens per second over those of the base draft with its own fastest
    method, all cells pooled, paired by prompt; None if the setting is the base's, and if the
    machine was busy. `comparisons`: speedups that Holm's correction counts.
    """

    verdict: Advice
    setting: Setting | None
    cells: list[Cell]
    over_base: Estimate | None
    comparisons: int = 0

    @property
    def paying(self) -> list[Cell]:
        """The cells in which the setting pays."""
        return [cell for cell in self.cells if cell.sign == 1]

    @property
    def busy(self) -> list[Cell]:
        """The cells that were timed on a busy machine."""
        return [cell for cell in self.cells if cell.busy]

    @property
    def temperature(self) -> float | None:
        """The highest temperature at which the setting pays; None if it pays nowhere."""
        return max((cell.temperature for cell in self.paying), default=None)

    @property
    def unclear(self) -> list[Cell]:
        """The cells in which the setting may yet be faster: its interval reaches beyond 1, or is
        not to be relied on.
        """
        undecided = [cell for cell in self.cells if cell.sign not in (1, -1)]
        return [cell for cell in undecided if cell.busy or (cell.speedup["high"] or math.inf) > 1]

    def where(self, fits: Sequence[Cell]) -> str:
        """The sets of some cells, with their temperatures unless these are all."""
        names_at: dict[tuple[float, ...], list[str]] = {}
        for name in dict.fromkeys(cell.domain for cell in self.cells):
            fit = tuple(cell.temperature for cell in fits if cell.domain == name)
            if fit:
                names_at.setdefault(fit, []).append(name)
        every = tuple(dict.fromkeys(cell.temperature for cell in self.cells))
        parts = []
        for temperatures, names in names_at.items():
            text = listed(names)
            if temperatures != every:
                text += f" at T = {listed([f'{each:g}' for each in temperatures])}"
            elif len(names_at) > 1:
                text += " at every temperature"
            parts.append(text)
        return listed(parts)


def listed(words: Sequence[str]) -> str:
    """Words with commas and "and" between them."""
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class _Timed:
    """A setting with its speedup in every cell, and the sign of each speedup.

    All settings have the same cells in the same order, as the evaluation times them.
    """

    setting: Setting
    speedups: list[Row]
    signs: list[int | None]

    @property
    def merit(self) -> tuple[int, float]:
        """Cells in which the setting pays, then its mean speedup."""
        speeds = [max(row["value"] or 0.0, 1e-9) for row in self.speedups]
        return self.signs.count(1), geometric_mean(speeds)


def decide(results: ResultsTable) -> Decision:
    """Ship, ship for some sets, or do not ship, from the timings of every lossless setting in every
    cell.
    """
    speedups: dict[Setting, list[Row]] = {}
    for row in results.by_set("speedup"):
        if results.lossless(row["verifier"]):
            speedups.setdefault(Setting.of(row), []).append(row)
    if not speedups:
        return Decision("not_timed", None, [], None)

    def busy(row: Row) -> bool:
        return results.busy(row["domain"], row["temperature"])

    judged = [None if busy(row) else row for row in chain.from_iterable(speedups.values())]
    found = iter(signs(judged, ratios=True))
    timed = []
    for setting, rows in speedups.items():
        of_setting: list[int | None] = []
        for row, sign in zip(rows, found, strict=False):
            of_setting.append(0 if busy(row) and row["low"] is not None else sign)
        timed.append(_Timed(setting, rows, of_setting))
    chosen = _prefer_measured_gains(results, timed)
    cells = []
    for index, row in enumerate(chosen.speedups):
        cell = Cell(
            domain=row["domain"],
            temperature=row["temperature"],
            speedup=row,
            sign=chosen.signs[index],
            fastest=_fastest(timed, index),
            slower=_slower(timed, index, chosen.setting.draft),
            busy=busy(row),
        )
        cells.append(cell)
    over_base = None
    if chosen.setting.draft != results.base and not any(map(busy, chosen.speedups)):
        of_base = (other for other in timed if other.setting.draft == results.base)
        base = max(of_base, key=lambda other: other.merit)
        over_base = _quotient(results, chosen.speedups, base.speedups)
    decision = Decision(
        "not_shown", chosen.setting, cells, over_base, len(judged) - judged.count(None)
    )
    return replace(decision, verdict=_verdict(results, decision))


def _fastest(timed: Sequence[_Timed], index: int) -> Row:
    return max((one.speedups[index] for one in timed), key=lambda row: row["value"] or 0.0)


def _slower(timed: Sequence[_Timed], index: int, chosen: str) -> list[Row]:
    found = []
    for draft in dict.fromkeys(other.setting.draft for other in timed):
        best = _fastest([other for other in timed if other.setting.draft == draft], index)
        if draft != chosen and best["high"] is not None and best["high"] < 1:
            found.append(best)
    return found


def _prefer_measured_gains(results: ResultsTable, timed: Sequence[_Timed]) -> _Timed:
    """Return the setting of highest merit, or another draft's that is not measurably slower and
    whose alpha is measurably better: out of distribution, or, of equal models, in distribution.

    Equal models take as long for a step, and alpha, of more tokens than are timed and without a
    clock, tells them apart better than speeds do.
    """
    ordered = sorted(timed, key=lambda other: other.merit)
    fastest = ordered[-1]

    def as_fast(one: _Timed) -> bool:
        paying = fastest.merit[0]
        needed = min(paying, 1) if _same_cost(results, one, fastest) else paying
        low = _quotient(results, fastest.speedups, one.speedups)["low"]
        return one.merit[0] >= needed and low is not None and low <= 1

    def gain(one: _Timed, kind: SuiteKind) -> float:
        return _measurable_gain(results, one.setting.draft, kind)

    # By merit, so that the last entry of each draft is its best setting.
    best_of = {one.setting.draft: one for one in ordered}
    alike = [one for one in best_of.values() if one == fastest or as_fast(one)]
    most = max(gain(one, "ood") for one in alike)
    alike = [one for one in alike if gain(one, "ood") == most]
    best = max(alike, key=lambda one: one.merit)
    equals = [one for one in alike if _same_cost(results, one, best)]
    return max(equals, key=lambda one: (gain(one, "id"), one.merit))


def _same_cost(results: ResultsTable, one: _Timed, other: _Timed) -> bool:
    """Whether two drafts are models of one kind and size, which draft without copying."""
    drafts = (one.setting.draft, other.setting.draft)
    if drafts[0] == drafts[1]:
        return True
    if any(results.copies_first(draft) for draft in drafts):
        return False
    models = [results.models[draft] for draft in drafts]
    return len({(row["kind"], row["model_type"], row["memory_bytes"]) for row in models}) == 1


def _measurable_gain(results: ResultsTable, draft: str, kind: SuiteKind) -> float:
    """The gain of alpha over the base's; 0 if it may be none, or was not measured."""
    row = results.gain(draft, kind) if kind in results.kinds else None
    if row is None or row["low"] is None or row["high"] is None:
        return 0.0
    return 0.0 if row["low"] <= 0 <= row["high"] else row["value"] or 0.0


def _verdict(results: ResultsTable, decision: Decision) -> Advice:
    cells = decision.cells
    chosen_signs = {cell.sign for cell in cells}
    if 1 in chosen_signs:
        every_cell = len(cells) == len(results.domains()) * len(results.temperatures)
        return "ship" if every_cell and chosen_signs == {1} else "ship_for"
    if _all_rejected(results):
        return "rejected"
    if chosen_signs == {None}:
        return "too_few"
    if chosen_signs == {-1}:
        promising = any((cell.fastest["value"] or 0.0) > 1 for cell in cells)
        return "not_shown" if promising else "none_beats_none"
    return "busy" if any(cell.busy for cell in decision.unclear) else "not_shown"


def _all_rejected(results: ResultsTable) -> bool:
    """Whether no lossless setting saves target calls on any set, by the intervals of tau."""
    taus = lossless_taus(results)
    highs = [row["high"] or math.inf for row in taus]
    return bool(highs) and max(highs) < SAVES_NOTHING


def lossless_taus(results: ResultsTable) -> list[Row]:
    """Tokens per target call of every lossless setting on every set."""
    return [row for row in results.by_set("tau") if results.lossless(row["verifier"])]


def _quotient(results: ResultsTable, new: Sequence[Row], base: Sequence[Row]) -> Estimate:
    """Tokens per second of one setting over another's, cells pooled; all temperatures resample the
    same prompts.
    """
    config = results.document["config"]
    counts = results.counts("speed")
    picks: dict[str, Resamples] = {}
    for row in new:
        if row["domain"] not in picks:
            seed = config["seed"] + len(picks)
            timed = len(counts[key_of(row)]["per_prompt"]["emitted"])
            groups = results.prompt_groups(row["domain"])[:timed]
            picks[row["domain"]] = resamples(groups, config["bootstrap"], seed)
    weights = [picks[row["domain"]].weights_RP for row in new]
    sizes = tuple(part.groups for part in picks.values())
    pooled = Resamples(np.concatenate(weights, axis=1), sizes)

    def rates(rows: Sequence[Row]) -> PromptSums:
        timed = [counts[key_of(row)]["per_prompt"] for row in rows]
        return ratio(timed, "emitted", "decode_s")

    return quotient(rates(new), rates(base), pooled)
