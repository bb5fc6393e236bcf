"""Decide whether a draft is worth serving: with which settings, for which prompts, how fast.

A cell is one prompt set at one temperature; a setting is a draft with a tree and a verifier. A
setting pays in a cell if the interval of its speedup lies above 1. The interval has Holm's
correction over all cells and settings, because the best of many is judged. Lossy verifiers are left
out. Noise of a busy machine widens intervals: one beside 1 decides, at a stricter level, and one
that spans 1 may be told on a quiet machine.
A setting that surely has fewer tokens per target call than its step costs cannot pay, whatever the
clock says of its speed. The setting that pays in most cells is chosen. Ties in cells and speed go
to the draft that loses least out of distribution, then, of models of one size, to the one that
gains most in distribution. The setting is chosen and judged on the same prompts, so expect a little
less on others.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import geometric_mean
from typing import Literal

import numpy as np

from draftsmith.core.records import still_rising
from draftsmith.eval.bootstrap import (
    LEVEL,
    PromptSums,
    Resamples,
    half_width,
    quotient,
    ratio,
    resamples,
    signs,
)
from draftsmith.eval.formats import sign
from draftsmith.eval.results_table import ResultsTable, key_of
from draftsmith.eval.schema import Estimate, Row, SuiteKind
from draftsmith.eval.seeds import draft_of

Advice = Literal[
    "ship", "ship_for", "none_beats_none", "rejected", "not_shown", "busy", "too_few", "not_timed"
]
# A draft whose tokens per target call are surely below this saves no time, whatever the clock says.
SAVES_NOTHING = 1.05
# What the best of many must hold on a busy machine, whose times are far from a normal distribution.
BUSY_LEVEL = 0.98
# A curve of training is continued for at most so many times the steps that it has.
PROJECTED = 10


def least_that_pays(pays_from: float | None) -> float:
    """Tokens per target call that every draft needs, by what is known before timing."""
    return max(SAVES_NOTHING, pays_from or 0.0)


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

    `sign` is 1 if the setting pays, -1 if it cannot, 0 if neither is shown, None without an
    interval. `slower` goes by each draft's interval alone. `busy`: whether the interval spans 1 on
    a busy machine. `short`: whether tokens per target call decide.
    """

    domain: str
    temperature: float
    speedup: Row
    sign: int | None
    fastest: Row
    slower: list[Row]
    busy: bool
    short: bool = False


@dataclass(frozen=True)
class Tokens:
    """Tokens per target call of a setting in a cell, and those that it needs to pay there.

    likely: as predicted, which is less noisy, or as measured. cost: what a step takes by the clock,
    in steps of the target alone; None if it was not timed. least: what every draft needs.
    """

    tau: Row
    likely: Row
    cost: Row | None
    least: float = SAVES_NOTHING

    @classmethod
    def of(cls, results: ResultsTable, tau: Row) -> "Tokens":
        """Read what stands beside a tau."""
        likely = results.beside(tau, "tau_predicted") or tau
        cost = results.beside(tau, "tau_needed")
        return cls(tau, likely, cost, least_that_pays(results.document["config"].get("pays_from")))

    @property
    def needed(self) -> float:
        """What a step takes if that is surely more than a draft needs anywhere, else that."""
        clear = sign(self.cost, self.least) == 1
        return (self.cost["value"] if self.cost and clear else None) or self.least

    @property
    def lacks(self) -> float:
        """The part of what it needs that is missing; negative if nothing is."""
        return 1 - (self.tau["value"] or 1.0) / self.needed


@dataclass(frozen=True)
class Shortfall:
    """A draft that cannot pay, by the setting and cell where it comes nearest, and the steps of
    training that would do by the pace at which its held-out alpha rose last; None if unknown.
    """

    draft: str
    nearest: Tokens
    steps: int | None


@dataclass(frozen=True)
class Decision:
    """The verdict, its setting (None if nothing was timed), every cell, and the speed over the base
    draft.

    `over_base`: the setting's tokens per second over those of the base draft with its own fastest
    method, all cells pooled, paired by prompt; None if the setting is the base's, and if the
    machine was busy. `comparisons`: speedups that Holm's correction counts. `hopeless`: the drafts
    that cannot pay. `rivals`: the best setting of each other draft that may.
    """

    verdict: Advice
    setting: Setting | None
    cells: list[Cell]
    over_base: Estimate | None
    comparisons: int = 0
    hopeless: Sequence[Shortfall] = ()
    rivals: Sequence[Tokens] = ()

    @property
    def paying(self) -> list[Cell]:
        """The cells in which the setting pays."""
        return [cell for cell in self.cells if cell.sign == 1]

    @property
    def busy(self) -> list[Cell]:
        """The cells that a busy machine left open."""
        return [cell for cell in self.cells if cell.busy]

    @property
    def temperature(self) -> float | None:
        """The highest temperature at which the setting pays; None if it pays nowhere."""
        return max((cell.temperature for cell in self.paying), default=None)

    @property
    def unclear(self) -> list[Cell]:
        """The cells in which the setting may yet be faster: its interval reaches beyond 1."""
        undecided = [cell for cell in self.cells if not cell.sign]
        return [cell for cell in undecided if (cell.speedup["high"] or math.inf) > 1]

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
                shown = [f"{each:g}" for each in temperatures]
                text += f" at T = {listed(shown)}"
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
    """A setting with its speedup in every cell, the sign of each, and whether it has too few tokens
    there.

    All settings have the same cells in the same order, as the evaluation times them.
    """

    setting: Setting
    speedups: list[Row]
    signs: list[int | None]
    short: list[bool]

    @property
    def merit(self) -> tuple[int, bool, float]:
        """Cells in which the setting pays, whether it can in some, then its mean speedup."""
        speeds = [max(row["value"] or 0.0, 1e-9) for row in self.speedups]
        return self.signs.count(1), not all(self.short), geometric_mean(speeds)


def decide(results: ResultsTable) -> Decision:
    """Ship, ship for some sets, or do not ship, from the timings of every lossless setting in every
    cell. Raise nothing: results without timings are undecided.
    """
    hopeless = _hopeless(results)
    rejected = {one.draft for one in hopeless}
    timed = _timed(results, rejected)
    models = [draft for draft in results.drafts if not results.copies_first(draft)]
    no_model_pays = rejected >= set(models or results.drafts)
    if not timed:
        verdict: Advice = "rejected" if no_model_pays else "not_timed"
        return Decision(verdict, None, [], None, hopeless=hopeless)
    chosen = _prefer_measured_gains(results, timed)
    decision = Decision(
        verdict="rejected",
        setting=chosen.setting,
        cells=_cells(results, timed, chosen),
        over_base=_over_base(results, timed, chosen),
        comparisons=sum(len(one.speedups) for one in timed),
        hopeless=hopeless,
        rivals=_rivals(results, timed, rejected),
    )
    if no_model_pays and not decision.paying:
        return decision
    return replace(decision, verdict=_verdict(results, decision))


def _timed(results: ResultsTable, rejected: Collection[str]) -> list[_Timed]:
    """Every lossless setting that was timed, judged together."""
    speedups: dict[Setting, list[Row]] = {}
    for row in results.by_set("speedup"):
        if results.lossless(row["verifier"]) and row["draft"] in results.drafts:
            speedups.setdefault(Setting.of(row), []).append(row)
    judged = list(chain.from_iterable(speedups.values()))
    busy = any(results.busy(row["domain"], row["temperature"]) for row in judged)
    found = iter(signs(judged, ratios=True, level=BUSY_LEVEL if busy else LEVEL))
    timed = []
    for setting, rows in speedups.items():
        of_setting: list[int | None] = []
        short = []
        for row, side in zip(rows, found, strict=False):
            tau = results.beside(row, "tau")
            few = tau is not None and _too_few([Tokens.of(results, tau)])
            short.append(side != 1 and (few or setting.draft in rejected))
            of_setting.append(-1 if short[-1] else side)
        timed.append(_Timed(setting, rows, of_setting, short))
    return timed


def _cells(results: ResultsTable, timed: Sequence[_Timed], chosen: _Timed) -> list[Cell]:
    cells = []
    for index, row in enumerate(chosen.speedups):
        busy = results.busy(row["domain"], row["temperature"])
        cell = Cell(
            domain=row["domain"],
            temperature=row["temperature"],
            speedup=row,
            sign=chosen.signs[index],
            fastest=_fastest(timed, index),
            slower=_slower(timed, index, chosen.setting.draft),
            busy=busy and not sign(row, 1.0) and not chosen.short[index],
            short=chosen.short[index],
        )
        cells.append(cell)
    return cells


def _over_base(results: ResultsTable, timed: Sequence[_Timed], chosen: _Timed) -> Estimate | None:
    of_base = [other for other in timed if draft_of(other.setting.draft) == results.base]
    busy = any(results.busy(row["domain"], row["temperature"]) for row in chosen.speedups)
    if chosen in of_base or busy or not of_base:
        return None
    base = max(of_base, key=lambda other: other.merit)
    return _quotient(results, chosen.speedups, base.speedups)


def _hopeless(results: ResultsTable) -> list[Shortfall]:
    """The drafts that have too few tokens per target call with every setting."""
    found = []
    for draft in results.drafts:
        decoded = results.methods_of(draft)
        settings: dict[tuple[object, ...], list[Tokens]] = {}
        for row in results.by_set("tau" if decoded else "tau_predicted"):
            if row["draft"] == draft and (not decoded or results.lossless(row["verifier"])):
                how = (row["tree"], row["verifier"], row["temperature"])
                settings.setdefault(how, []).append(Tokens.of(results, row))
        if settings and all(map(_too_few, settings.values())):
            nearest = min(chain.from_iterable(settings.values()), key=lambda each: each.lacks)
            steps = steps_for(results.heldout(draft), nearest)
            if nearest.needed > results.most_tokens(nearest.tau["tree"]):
                steps = None
            found.append(Shortfall(draft, nearest, steps))
    return found


def _too_few(cells: Sequence[Tokens]) -> bool:
    """Whether a setting has too few tokens per target call to pay: in each cell by its value, and
    in all together at 95 %, by the clock or, since that may be noisy, by what every draft needs.

    Cells of one temperature have prompts of their own.
    """
    if any(each.lacks <= 0 for each in cells):
        return False
    sure = [each for each in cells if each.likely["high"] is not None]
    taus = [each.likely for each in sure]
    costs = [each.cost for each in sure if each.cost and each.cost["low"] is not None]
    if not sure:
        return False
    most = _mean(taus) + _half_width(taus, "high")
    least = sure[0].least
    if most < least or not costs:
        return most < least
    either = math.hypot(_half_width(taus, "high"), _half_width(costs, "low"))
    return _mean(costs) - _mean(taus) > either


def _mean(rows: Sequence[Row]) -> float:
    return sum(row["value"] or 0.0 for row in rows) / len(rows)


def _half_width(rows: Sequence[Row], end: Literal["low", "high"]) -> float:
    """The distance from the mean of independent figures to an end of its interval."""
    freedom = sum(row["n"] - 1 for row in rows)
    errors = []
    for row in rows:
        distance = (row[end] or 0.0) - (row["value"] or 0.0)
        errors.append(distance / half_width(row["n"] - 1))
    return half_width(freedom) * math.hypot(*errors) / len(rows)


def steps_for(curve: Sequence[tuple[int, float]], tokens: Tokens) -> int | None:
    """Steps of training until there are tokens enough, at the pace at which held-out alpha rose in
    the last fifth of its curve; None if the curve does not reach so far.

    With alpha a, no chain has more than 1 / (1 - a) tokens per call.
    """
    rise = still_rising(curve)
    if rise is None:
        return None
    done = curve[-1][0]
    missing = 1 / (tokens.tau["value"] or 1.0) - 1 / tokens.needed
    steps = round(missing / rise * done / 5)
    return steps if steps <= PROJECTED * done else None


def _rivals(
    results: ResultsTable, timed: Sequence[_Timed], rejected: Collection[str]
) -> list[Tokens]:
    """The fastest setting of each draft that is not rejected, where it is fastest, unless the clock
    shows that it is slower everywhere.
    """
    found: dict[str, Tokens] = {}
    for one in sorted(timed, key=lambda other: other.merit):
        fastest = max(one.speedups, key=lambda row: row["value"] or 0.0)
        tau = results.beside(fastest, "tau")
        if tau is not None and one.setting.draft not in rejected and set(one.signs) != {-1}:
            found[one.setting.draft] = Tokens.of(results, tau)
    return list(found.values())


def _fastest(timed: Sequence[_Timed], index: int) -> Row:
    return max((one.speedups[index] for one in timed), key=lambda row: row["value"] or 0.0)


def _slower(timed: Sequence[_Timed], index: int, chosen: str) -> list[Row]:
    found = []
    for draft in dict.fromkeys(other.setting.draft for other in timed):
        best = _fastest([other for other in timed if other.setting.draft == draft], index)
        if draft != chosen and sign(best, 1.0) == -1:
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
        return one.merit[:2] >= (needed, fastest.merit[1]) and low is not None and low <= 1

    def gain(one: _Timed, kind: SuiteKind) -> float:
        """Of alpha over the base's; 0 if it may be none, or was not measured."""
        row = results.gain(one.setting.draft, kind) if kind in results.kinds else None
        return (row["value"] or 0.0) if row and sign(row) else 0.0

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


def _verdict(results: ResultsTable, decision: Decision) -> Advice:
    cells = decision.cells
    chosen_signs = {cell.sign for cell in cells}
    if 1 in chosen_signs:
        every_cell = len(cells) == len(results.domains()) * len(results.temperatures)
        return "ship" if every_cell and chosen_signs == {1} else "ship_for"
    if chosen_signs == {None}:
        return "too_few"
    if chosen_signs == {-1}:
        promising = any((cell.fastest["value"] or 0.0) > 1 for cell in cells)
        return "not_shown" if promising else "none_beats_none"
    return "busy" if any(cell.busy for cell in decision.unclear) else "not_shown"


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
