"""Decide whether a draft is worth serving: with which setting, for which prompts.

A setting is a draft with a tree and a lossless verifier, a cell one prompt set at one temperature.
A setting pays in a cell if the interval of its speedup lies above 1, with Holm's correction over
all settings and cells, because the best of many is judged: the one that pays in most cells, and of
these the one with the highest lower bound. A setting that surely has fewer tokens per target call
than its step costs cannot pay, whatever the clock says. Times of a busy machine are far from a
normal distribution, so that they are judged at a stricter level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from draftsmith.eval.bootstrap import LEVEL, half_width, signs
from draftsmith.eval.formats import listed
from draftsmith.eval.results_table import FigureRow, ResultsTable

Outcome = Literal["ship", "ship_for", "reject", "cannot_tell"]
# A draft whose tokens per target call are surely below this saves no time, whatever the clock says.
SAVES_NOTHING = 1.05
BUSY_LEVEL = 0.98


class Setting(NamedTuple):
    """A draft and how to decode with it."""

    draft: str
    tree: str
    rule: str


@dataclass(frozen=True)
class Cell:
    """A setting on one set at one temperature: tokens per target call, as measured and as predicted
    (less noisy), and by the clock what a step costs, in tokens, and the speedup.

    `sign` is 1 if it pays, -1 if it is slower, 0 if neither is shown, None without an interval.
    """

    tau: FigureRow
    likely: FigureRow
    cost: FigureRow | None
    speedup: FigureRow | None
    sign: int | None

    @property
    def tokens(self) -> float:
        """Tokens per target call."""
        return float(self.tau["value"] or 1.0)

    @property
    def needed(self) -> float:
        """The tokens that a step takes if they are surely more than every draft needs, else
        those.
        """
        cost = self.cost
        if cost and (cost["low"] or 0.0) > SAVES_NOTHING:
            return float(cost["value"])
        return SAVES_NOTHING

    @property
    def low(self) -> float:
        """The lower bound of the speedup; 0 without one."""
        return float(self.speedup["low"] or 0.0) if self.speedup else 0.0

    @property
    def high(self) -> float:
        """The upper bound of the speedup."""
        return float(self.speedup["high"] or math.inf) if self.speedup else math.inf


@dataclass(frozen=True)
class Judged:
    """A setting with its cells."""

    setting: Setting
    cells: list[Cell]

    @property
    def timed(self) -> list[Cell]:
        """The cells that were timed."""
        return [cell for cell in self.cells if cell.speedup]

    @property
    def slower(self) -> bool:
        """Whether it is slower in every cell."""
        return all(cell.sign == -1 for cell in self.timed)

    @property
    def saves_nothing(self) -> bool:
        """Whether it has too few tokens per target call: in every cell by its value, and in all
        of a temperature together at 95 %, by the clock or by what every draft needs.
        """
        if any(cell.tokens >= cell.needed for cell in self.cells):
            return False
        # Temperatures have the same prompts, so that their figures are not independent.
        by_temperature: dict[float, list[Cell]] = {}
        for cell in self.cells:
            by_temperature.setdefault(cell.tau["temperature"], []).append(cell)
        for cells in by_temperature.values():
            most = _mean_bound([cell.likely for cell in cells], "high")
            cost = _mean_bound([cell.cost for cell in cells if cell.cost], "low")
            if most is None or most >= max(SAVES_NOTHING, cost or 0.0):
                return False
        return True

    @property
    def merit(self) -> tuple[int, float]:
        """The cells in which it pays, then the logarithm of its mean lower bound."""
        pays = sum(cell.sign == 1 for cell in self.cells)
        lows = [math.log(cell.low or 1e-9) for cell in self.timed]
        return pays, sum(lows) / len(lows)

    def reaches(self, other: "Judged") -> bool:
        """Whether its speedups overlap another one's in every cell."""
        pairs = zip(self.timed, other.timed, strict=False)
        return all(one.high >= two.low for one, two in pairs)


@dataclass(frozen=True)
class Decision:
    """The verdict, with the row that decides it; None if nothing was decoded.

    setting: what is judged; None if nothing was timed. cells: those of the setting. needed: tokens
    per target call that pay, if too few of them decide. comparisons: the speedups that were
    compared. busy: whether the machine was, in an undecided cell. served: the best setting that
    pays and that an engine has. robust: see `_more_robust`.
    """

    verdict: Outcome
    row: FigureRow | None = None
    setting: Setting | None = None
    cells: Sequence[Cell] = ()
    needed: float | None = None
    comparisons: int = 0
    busy: bool = False
    served: Setting | None = None
    robust: FigureRow | None = None

    @property
    def paying(self) -> list[FigureRow]:
        """The speedups of the cells in which the setting pays."""
        paying = [cell for cell in self.cells if cell.sign == 1]
        return [cell.speedup for cell in paying if cell.speedup]

    @property
    def temperature(self) -> float | None:
        """The highest temperature at which the setting pays; None if it pays nowhere."""
        return max((row["temperature"] for row in self.paying), default=None)

    @property
    def where(self) -> str:
        """The sets on which the setting pays, with their temperatures unless these are all."""
        every = {cell.tau["temperature"] for cell in self.cells}
        temperatures: dict[str, list[str]] = {}
        for row in self.paying:
            temperatures.setdefault(row["set"], []).append(f"{row['temperature']:g}")
        names = []
        for name, at in temperatures.items():
            names.append(name if len(at) == len(every) else f"{name} at T = {listed(at)}")
        return listed(names)


def decide(results: ResultsTable) -> Decision:
    """Ship the best setting, for all sets or some, reject every draft, or tell neither. Without
    timings only tokens per call can decide. Raise nothing.
    """
    judged = _judged(results)
    every = list(chain.from_iterable(one.cells for one in judged))
    able = [one for one in judged if not one.saves_nothing]
    timed = [one for one in able if one.timed]
    if every and not able:
        nearest = max(every, key=lambda cell: cell.tokens / cell.needed)
        return Decision("reject", nearest.tau, needed=nearest.needed)
    if not timed:
        taus = sorted((cell.tau for cell in every), key=lambda row: row["value"] or 0.0)
        return Decision("cannot_tell", taus[-1] if taus else None)
    best = max(timed, key=lambda one: one.merit)
    cells = best.timed
    paying = [cell for cell in cells if cell.sign == 1]
    verdict: Outcome = "cannot_tell"
    if paying:
        all_cells = len(results.domains()) * len(results.temperatures)
        verdict = "ship" if len(paying) == all_cells else "ship_for"
    elif all(one.slower for one in timed):
        verdict = "reject"
    # What ships is as sure as its weakest cell; what does not came nearest in its strongest.
    ordered = sorted(paying or cells, key=lambda cell: cell.low)
    open_taus = [cell.tau for cell in cells if not cell.sign]
    return Decision(
        verdict=verdict,
        row=ordered[0 if paying else -1].speedup,
        setting=best.setting,
        cells=cells,
        comparisons=sum(len(one.timed) for one in judged),
        busy=any(results.busy(tau["set"], tau["temperature"]) for tau in open_taus),
        served=_served(results, timed),
        robust=_more_robust(results, best, timed) if paying else None,
    )


def _judged(results: ResultsTable) -> list[Judged]:
    """Every lossless setting that was decoded, and what is predicted of drafts that were not."""
    found: dict[tuple[Setting, str, float], dict[str, FigureRow]] = {}
    for row in results.select("tau", "tau_predicted", "tau_needed", "speedup"):
        if row["set"] is not None:
            setting = Setting(row["draft"], row["tree"], row["rule"])
            figures = found.setdefault((setting, row["set"], row["temperature"]), {})
            figures[row["figure"]] = row
    decoded = {row["draft"] for row in results.select("tau")}
    kept = {}
    for (setting, domain, temperature), figures in found.items():
        lossless = "tau" in figures and results.lossless(setting.rule)
        if lossless or setting.draft not in decoded:
            kept[setting, domain, temperature] = figures
    busy = any(results.busy(domain, temperature) for _, domain, temperature in kept)
    speedups = [figures.get("speedup") for figures in kept.values()]
    found_signs = signs(speedups, level=BUSY_LEVEL if busy else LEVEL)
    settings: dict[Setting, list[Cell]] = {}
    for (setting, *_), figures, found_sign in zip(kept, kept.values(), found_signs, strict=True):
        tau = figures.get("tau") or figures["tau_predicted"]
        cell = Cell(
            tau=tau,
            likely=figures.get("tau_predicted", tau),
            cost=figures.get("tau_needed"),
            speedup=figures.get("speedup"),
            sign=found_sign,
        )
        settings.setdefault(setting, []).append(cell)
    return [Judged(setting, cells) for setting, cells in settings.items()]


def _mean_bound(rows: Sequence[FigureRow], end: Literal["low", "high"]) -> float | None:
    """An end of the interval of the mean of independent figures."""
    rows = [row for row in rows if row[end] is not None]
    if not rows:
        return None
    mean = freedom = squares = 0.0
    for row in rows:
        mean += row["value"] / len(rows)
        freedom += row["n"] - 1
        squares += ((row[end] - row["value"]) / half_width(row["n"] - 1)) ** 2
    away = half_width(int(freedom)) * math.sqrt(squares) / len(rows)
    return mean + away if end == "high" else mean - away


def _more_robust(results: ResultsTable, best: Judged, timed: Sequence[Judged]) -> FigureRow | None:
    """The highest alpha out of distribution of a draft that may be as fast as the best one, if it
    surely lies above that one's; else None.
    """
    fast = {one.setting.draft for one in timed if one.reaches(best)}
    highest = results.top_temperature
    rows = results.where(figure="alpha", set=None, kind="ood", part=None, temperature=highest)
    own = {row["draft"]: row["high"] for row in rows}.get(best.setting.draft) or 1.0
    above = [row for row in rows if row["draft"] in fast and (row["low"] or 0.0) > own]
    return max(above, key=lambda row: row["value"] or 0.0, default=None)


def _served(results: ResultsTable, timed: Sequence[Judged]) -> Setting | None:
    """The best setting that pays and that an engine has: a chain of a draft that it serves."""
    able = []
    for one in timed:
        chain = one.setting.tree.removeprefix("chain:").isdecimal()
        pays, _ = one.merit
        if chain and pays and results.models[one.setting.draft].get("engine"):
            able.append(one)
    best = max(able, key=lambda one: one.merit, default=None)
    return best.setting if best else None
