"""Decide whether a draft is worth serving: with which setting, for which prompts.

A setting is a draft with a tree and a lossless verifier, a cell one prompt set at one temperature.
A setting pays in a cell if the interval of its speedup lies above 1, with Holm's correction over
all settings and cells, because the best of many is judged: the one that pays in most cells, and of
these the one with the highest lower bound. A setting that surely has fewer tokens per target call
than its step costs cannot pay, whatever the clock says. Times of a busy machine are far from a
normal distribution, so that they are judged at a stricter level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from draftsmith.eval.bootstrap import LEVEL, half_width, signs
from draftsmith.eval.formats import listed, sign
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

    `sign` is 1 if it pays, -1 if it cannot, 0 if neither is shown, None without an interval.
    """

    tau: FigureRow
    likely: FigureRow
    cost: FigureRow | None = None
    speedup: FigureRow | None = None
    sign: int | None = None

    @property
    def tokens(self) -> float:
        """Tokens per target call."""
        return float(self.tau["value"] or 1.0)

    @property
    def low(self) -> float:
        """The lower bound of the speedup; 0 without one."""
        return float((self.speedup or {}).get("low") or 0.0)

    @property
    def high(self) -> float:
        """The upper bound of the speedup."""
        return float((self.speedup or {}).get("high") or math.inf)

    @property
    def needed(self) -> float:
        """The tokens that a step takes if they are surely more than every draft needs, else
        those.
        """
        clear = sign(self.cost, SAVES_NOTHING) == 1
        return float(self.cost["value"]) if self.cost and clear else SAVES_NOTHING


@dataclass(frozen=True)
class Decision:
    """The verdict, with the row that decides it; None if nothing was decoded.

    setting: what is judged; None if nothing was timed. cells: those of the setting. needed: tokens
    per target call that pay, if too few of them decide. comparisons: the speedups that were
    compared. busy: whether the machine was, in an undecided cell. robust: another draft that may be
    as fast and is accepted more out of distribution.
    """

    verdict: Outcome
    row: FigureRow | None = None
    setting: Setting | None = None
    cells: Sequence[Cell] = ()
    needed: float | None = None
    comparisons: int = 0
    busy: bool = False
    robust: str = ""

    @property
    def paying(self) -> list[FigureRow]:
        """The speedups of the cells in which the setting pays."""
        return [cell.speedup for cell in self.cells if cell.speedup and cell.sign == 1]

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
    settings = _settings(results)
    able = {one: cells for one, cells in settings.items() if not _saves_nothing(cells)}
    every = list(chain.from_iterable(settings.values()))
    if every and not able:
        nearest = max(every, key=lambda cell: cell.tokens / cell.needed)
        return Decision("reject", nearest.tau, needed=nearest.needed)
    timed = {one: _timed(cells) for one, cells in able.items() if _timed(cells)}
    if not timed:
        taus = [cell.tau for cell in every]
        return Decision("cannot_tell", max(taus, key=lambda row: row["value"], default=None))
    best = max(timed, key=lambda setting: _merit(timed[setting]))
    cells = timed[best]
    signs_here = {cell.sign for cell in cells}
    verdict: Outcome = "cannot_tell"
    if 1 in signs_here:
        everywhere = len(cells) == len(results.domains()) * len(results.temperatures)
        verdict = "ship" if everywhere and signs_here == {1} else "ship_for"
    elif {cell.sign for cell in chain.from_iterable(timed.values())} == {-1}:
        verdict = "reject"
    # What ships is as sure as its weakest cell; what does not came nearest in its strongest.
    paying = [cell for cell in cells if cell.sign == 1]
    ordered = sorted(paying or cells, key=lambda cell: cell.low)
    return Decision(
        verdict=verdict,
        row=ordered[0 if paying else -1].speedup,
        setting=best,
        cells=cells,
        comparisons=sum(cell.speedup is not None for cell in every),
        busy=any(_is_busy(results, cell) for cell in cells if not cell.sign),
        robust=_more_robust(results, best, timed),
    )


def _settings(results: ResultsTable) -> dict[Setting, list[Cell]]:
    """Every lossless setting that was decoded, and what is predicted of drafts that were not."""
    found: dict[tuple[Setting, str, float], dict[str, FigureRow]] = {}
    for row in results.select("tau", "tau_predicted", "tau_needed", "speedup"):
        if row["set"] is not None:
            setting = Setting(row["draft"], row["tree"], row["rule"])
            figures = found.setdefault((setting, row["set"], row["temperature"]), {})
            figures[row["figure"]] = row
    decoded = {setting.draft for (setting, *_), figures in found.items() if "tau" in figures}
    judged = {}
    busy = False
    for (setting, domain, temperature), figures in found.items():
        lossless = "tau" in figures and results.lossless(setting.rule)
        if lossless or setting.draft not in decoded:
            judged[setting, domain, temperature] = figures
            busy = busy or results.busy(domain, temperature)
    speedups = [figures.get("speedup") for figures in judged.values()]
    found_signs = signs(speedups, level=BUSY_LEVEL if busy else LEVEL)
    settings: dict[Setting, list[Cell]] = {}
    for (setting, *_), figures, found_sign in zip(
        judged, judged.values(), found_signs, strict=True
    ):
        tau = figures.get("tau") or figures["tau_predicted"]
        cell = Cell(
            tau=tau,
            likely=figures.get("tau_predicted", tau),
            cost=figures.get("tau_needed"),
            speedup=figures.get("speedup"),
            sign=found_sign,
        )
        settings.setdefault(setting, []).append(cell)
    return settings


def _is_busy(results: ResultsTable, cell: Cell) -> bool:
    return results.busy(cell.tau["set"], cell.tau["temperature"])


def _timed(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.speedup is not None]


def _saves_nothing(cells: Sequence[Cell]) -> bool:
    """Whether a setting has too few tokens per target call: in every cell by its value, and in all
    together at 95 %, by the clock or by what every draft needs.
    """
    if any(cell.tokens >= cell.needed for cell in cells):
        return False
    most = _mean_bound([cell.likely for cell in cells], "high")
    cost = _mean_bound([cell.cost for cell in cells if cell.cost], "low")
    return most is not None and most < max(SAVES_NOTHING, cost or 0.0)


def _mean_bound(rows: Sequence[FigureRow], end: Literal["low", "high"]) -> float | None:
    """An end of the interval of the mean of independent figures."""
    rows = [row for row in rows if row[end] is not None]
    if not rows:
        return None
    mean = sum(row["value"] for row in rows) / len(rows)
    errors = [(row[end] - row["value"]) / half_width(row["n"] - 1) for row in rows]
    freedom = sum(row["n"] - 1 for row in rows)
    error = math.sqrt(sum(error**2 for error in errors))
    away = half_width(freedom) * error / len(rows)
    return mean + away if end == "high" else mean - away


def _merit(cells: Sequence[Cell]) -> tuple[int, float]:
    """The cells in which a setting pays, then the logarithm of its mean lower bound."""
    pays = sum(cell.sign == 1 for cell in cells)
    lows = [max(cell.low, 1e-9) for cell in cells]
    return pays, sum(map(math.log, lows)) / len(cells)


def _more_robust(
    results: ResultsTable, best: Setting, timed: Mapping[Setting, Sequence[Cell]]
) -> str:
    """Of the drafts whose speedups overlap the best ones in every cell, the one with the highest
    alpha out of distribution, if that is not the best; empty if it is.
    """
    if "ood" not in results.kinds:
        return ""
    alike = {best.draft}
    for setting, cells in timed.items():
        pairs = zip(cells, timed[best], strict=False)
        if all(one.high >= other.low for one, other in pairs):
            alike.add(setting.draft)
    alphas = {}
    for draft in alike:
        row = results.figure("alpha", draft, "ood")
        alphas[draft] = (row["value"] if row else None) or 0.0
    first = max(alphas, key=lambda draft: (alphas[draft], draft == best.draft))
    return "" if first == best.draft else first
