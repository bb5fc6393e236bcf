"""Decide whether a draft is worth serving: with which settings, for which prompts, how fast.

A cell is one prompt set at one temperature; a setting is a draft with a tree and a verifier. A
setting pays in a cell if the interval of its speedup lies above 1. The interval has Holm's
correction over all cells and settings, because the best of many is judged. Lossy verifiers are left
out. The setting that pays in most cells is chosen. Ties in cells and speed go to the draft that
loses least out of distribution. The setting is chosen and judged on the same prompts, so expect a
little less on others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from typing import Literal

import numpy as np

from eval.bootstrap import PromptSums, Resamples, quotient, resamples, signs
from eval.results import Results
from eval.schema import Estimate, Row

Verdict = Literal[
    "ship", "ship_for", "none_beats_none", "not_shown", "busy", "too_few", "not_timed"
]


@dataclass(frozen=True, order=True)
class Setting:
    """A draft and how to decode with it."""

    draft: str
    tree: str
    verifier: str


@dataclass(frozen=True)
class Cell:
    """One set at one temperature: the chosen setting's speedup there, and the fastest setting
    there.

    `sign` is 1 if the setting pays, -1 if it costs time, 0 if neither is shown, None without an
    interval.
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
    """The verdict, its setting (None if nothing was timed), every cell, and the speed over the base
    draft.

    `over_base`: the setting's tokens per second over those of the base draft with its own fastest
    method, all cells pooled, paired by prompt; None if the setting is the base's.
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
    """Ship, ship for some sets, or do not ship, from the timings of every lossless setting in every
    cell.
    """
    timed: dict[Setting, list[Row]] = {}
    for row in results.rows("speedup"):
        if row["domain"] in results.domains() and results.lossless(row["verifier"]):
            setting = Setting(row["draft"], row["tree"] or "", row["verifier"] or "")
            timed.setdefault(setting, []).append(row)
    if not timed:
        return Decision("not_timed", None, [], None)
    family = iter(signs([row for rows in timed.values() for row in rows], ratios=True))
    signs_of = {setting: [next(family) for _ in rows] for setting, rows in timed.items()}
    speeds = {
        setting: [max(row["value"] or 0.0, 1e-9) for row in rows] for setting, rows in timed.items()
    }
    merit = {
        setting: (signs_of[setting].count(1), geometric_mean(speeds[setting])) for setting in timed
    }
    chosen = _prefer_smaller_loss(results, timed, merit)
    cells = []
    for index, row in enumerate(timed[chosen]):
        fastest = max(timed, key=lambda setting: timed[setting][index]["value"] or 0.0)
        where = (row["domain"], row["temperature"])
        cells.append(
            Cell(
                *where,
                row,
                signs_of[chosen][index],
                fastest,
                timed[fastest][index],
                busy=results.busy(*where),
            )
        )
    over_base = None
    if chosen.draft != results.base:
        base = max(
            (setting for setting in timed if setting.draft == results.base), key=merit.__getitem__
        )
        over_base = _quotient(results, timed[chosen], timed[base])
    all_signs = [sign for cells_of in signs_of.values() for sign in cells_of]
    return Decision(_verdict(results, cells, all_signs), chosen, cells, over_base)


def _prefer_smaller_loss(
    results: Results, timed: dict[Setting, list[Row]], merit: dict[Setting, tuple[int, float]]
) -> Setting:
    """The fastest setting, or that of another draft if it is not measurably slower and loses less
    OOD.
    """
    fastest = max(timed, key=merit.__getitem__)
    if not results.domains("ood"):
        return fastest

    def gain(setting: Setting) -> float:
        row = results.gain(setting.draft, "ood")
        return (row["value"] or 0.0) if row else 0.0

    def as_fast(setting: Setting) -> bool:
        low = _quotient(results, timed[fastest], timed[setting])["low"]
        return merit[setting][0] == merit[fastest][0] and low is not None and low <= 1

    best_of = {setting.draft: setting for setting in sorted(timed, key=merit.__getitem__)}
    alike = [setting for setting in best_of.values() if setting == fastest or as_fast(setting)]
    return max(alike, key=lambda setting: (gain(setting), merit[setting]))


def _verdict(results: Results, cells: Sequence[Cell], all_signs: Sequence[int | None]) -> Verdict:
    chosen_signs = {cell.sign for cell in cells}
    if 1 in chosen_signs:
        timed = {(cell.domain, cell.temperature) for cell in cells}
        everywhere = chosen_signs == {1} and timed == set(
            product(results.domains(), results.temperatures)
        )
        return "ship" if everywhere else "ship_for"
    if chosen_signs == {None}:
        return "too_few"
    if set(all_signs) == {-1}:
        return "none_beats_none"
    return "busy" if any(cell.busy for cell in cells) else "not_shown"


def _quotient(results: Results, new: Sequence[Row], base: Sequence[Row]) -> Estimate:
    """Tokens per second of one setting over another's, cells pooled; all temperatures resample the
    same prompts.
    """
    config, counts = results.document["config"], results.counts("speed")
    picks: dict[str, Resamples] = {}
    for row in new:
        picks.setdefault(
            row["domain"], resamples(row["n"], config["bootstrap"], config["seed"] + len(picks))
        )
    sizes = tuple(size for domain_picks in picks.values() for size in domain_picks.sizes)
    weights = Resamples(
        np.concatenate([picks[row["domain"]].weights_RP for row in new], axis=1), sizes
    )

    def rates(rows: Sequence[Row]) -> PromptSums:
        cells = [
            (row["draft"], row["domain"], row["temperature"], row["tree"], row["verifier"])
            for row in rows
        ]
        columns = (
            [x for cell in cells for x in counts[cell]["per_prompt"][key]]
            for key in ("emitted", "decode_s")
        )
        return PromptSums.of(*columns)

    return quotient(rates(new), rates(base), weights)
