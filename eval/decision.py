"""Decide whether a draft is worth serving: with which settings, for which prompts, how fast.

A cell is one prompt set at one temperature; a setting is a draft with a tree and a verifier. A setting pays in a cell
if it is faster there than the target alone beyond chance: the interval of its speedup lies above 1, also under Holm's
correction over all cells of the setting. The setting that pays in most cells is judged; lossy verifiers are not. It was
chosen on the prompts it is judged on, so expect a little less of it on others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eval.bootstrap import PromptSums, Resamples, pool_sums, quotient, resamples
from eval.bootstrap import signs as signs_of
from eval.results import Results
from eval.schema import Estimate, Row

Verdict = Literal["ship", "ship_for", "none_beats_none", "not_shown", "too_few", "not_timed"]


@dataclass(frozen=True, order=True)
class Setting:
    """A draft and how to decode with it."""

    draft: str
    tree: str
    verifier: str


@dataclass(frozen=True)
class Cell:
    """One set at one temperature: the speed of the decided setting there, and the fastest setting there.

    `sign` is 1 if the setting pays, -1 if it costs time, 0 if neither is shown, None without an interval.
    """

    domain: str
    temperature: float
    speedup: Row
    sign: int | None
    fastest: Setting
    fastest_speedup: Row
    busy: bool


@dataclass(frozen=True)
class Decision:
    """The verdict, its setting (None if nothing was timed), every cell, and the speed over the base draft.

    `over_base`: the setting's tokens per second over those of the base draft with its own fastest method, all cells
    pooled, paired by prompt; None if the setting is the base's.
    """

    verdict: Verdict
    setting: Setting | None
    cells: list[Cell]
    over_base: Estimate | None

    @property
    def paying(self) -> list[Cell]:
        """The cells in which the setting pays."""
        return [cell for cell in self.cells if cell.sign == 1]


def decide(results: Results) -> Decision:
    """Ship, ship for some sets, or do not ship, from the timings of every lossless setting in every cell."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in results.rows("speedup"):
        if row["domain"] in results.domains() and results.lossless(row["verifier"]):
            setting = Setting(row["draft"], row["tree"] or "", row["verifier"] or "")
            by_setting.setdefault(setting, []).append(row)
    if not by_setting:
        return Decision("not_timed", None, [], None)
    signs = {setting: signs_of(rows, ratios=True) for setting, rows in by_setting.items()}
    means = {setting: _mean_speed(rows) for setting, rows in by_setting.items()}
    chosen = max(by_setting, key=lambda setting: (signs[setting].count(1), means[setting]))
    cells = []
    for index, row in enumerate(by_setting[chosen]):
        fastest = max(by_setting, key=lambda setting: by_setting[setting][index]["value"] or 0.0)
        cells.append(
            Cell(
                domain=row["domain"],
                temperature=row["temperature"],
                speedup=row,
                sign=signs[chosen][index],
                fastest=fastest,
                fastest_speedup=by_setting[fastest][index],
                busy=results.busy(row["domain"], row["temperature"]),
            )
        )
    over_base = None
    if chosen.draft != results.base:
        base = max((each for each in by_setting if each.draft == results.base), key=lambda setting: means[setting])
        over_base = _quotient(results, by_setting[chosen], by_setting[base])
    return Decision(_verdict(signs, chosen), chosen, cells, over_base)


def _verdict(signs: dict[Setting, list[int | None]], chosen: Setting) -> Verdict:
    cells = signs[chosen]
    if 1 in cells:
        return "ship" if cells.count(1) == len(cells) else "ship_for"
    if all(sign is None for sign in cells):
        return "too_few"
    return "none_beats_none" if all(sign == -1 for every in signs.values() for sign in every) else "not_shown"


def _mean_speed(rows: Sequence[Row]) -> float:
    """The geometric mean of the speedups of a setting over its cells."""
    return math.exp(sum(math.log(max(row["value"] or 0.0, 1e-9)) for row in rows) / len(rows))


def _quotient(results: Results, new: Sequence[Row], base: Sequence[Row]) -> Estimate:
    """Tokens per second of one setting over another's, cells pooled; a prompt is drawn alike at all temperatures."""
    config = results.document["config"]
    picks: dict[str, Resamples] = {}
    for row in new:
        picks.setdefault(row["domain"], resamples(row["n"], config["bootstrap"], config["seed"] + len(picks)))
    drawn = [picks[row["domain"]] for row in new]
    sizes = tuple(size for each in picks.values() for size in each.sizes)
    weights = Resamples(np.concatenate([each.weights_RP for each in drawn], axis=1), sizes)
    return quotient(_rates(results, new), _rates(results, base), weights)


def _rates(results: Results, rows: Sequence[Row]) -> PromptSums:
    counts = results.counts("speed")
    parts = [
        counts[row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"]]["per_prompt"]
        for row in rows
    ]
    return pool_sums([PromptSums.of(part["emitted"], part["decode_s"]) for part in parts])
