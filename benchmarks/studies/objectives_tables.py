"""The figures of `objectives.py` with intervals, and their tables in Markdown."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.lib.pages import gap, table
from benchmarks.lib.seeds import pool_sums
from benchmarks.studies.objectives_data import ALIKE
from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import (
    PromptSums,
    Resamples,
    difference,
    estimate,
    pool_resamples,
    resamples,
)
from draftsmith.eval.report.formats import with_interval

# Of one draft: temperature, then domain, then per-prompt sums and counts.
Alphas = dict[str, dict[str, PromptSums]]


def mean_of(seeds: Sequence[PromptSums]) -> PromptSums:
    """Per prompt, the mean over seeds; they share the prompts and the counts."""
    return PromptSums(np.mean([each.numerator_P for each in seeds], axis=0), seeds[0].denominator_P)


def figures(domains: Sequence[str], alphas: dict[str, list[Alphas]], count: int) -> dict[str, Any]:
    """By temperature, variant and place (a domain; `ood`: all but the first): alpha, and what it is
    above fkl and above the base draft; with seeds apart, where they are several.
    """
    picks = {
        domain: resamples(
            len(alphas["base"][0]["1"][domain].numerator_P), count, row_seed(0, domain) % 2**32
        )
        for domain in domains
    }
    others = domains[1:]
    picks["ood"] = pool_resamples([picks[domain] for domain in others])

    def sums(alpha: Alphas, temperature: str, place: str) -> PromptSums:
        there = alpha[temperature]
        return pool_sums([there[domain] for domain in others]) if place == "ood" else there[place]

    found: dict[str, Any] = {}
    for temperature in alphas["base"][0]:
        found[temperature] = {}
        for name, seeds in alphas.items():
            found[temperature][name] = {}
            for place, pick in picks.items():
                each = [sums(alpha, temperature, place) for alpha in seeds]
                row: dict[str, Any] = {
                    "alpha": estimate(mean_of(each), pick),
                    "seeds": [one.pooled for one in each],
                }
                for other in ("base", ALIKE):
                    if other in alphas and other != name:
                        there = [sums(alpha, temperature, place) for alpha in alphas[other]]
                        row[f"above_{other}"] = above(each, there, pick)
                found[temperature][name][place] = row
    return found


def places(domains: Sequence[str], alpha: Alphas) -> dict[str, float | None]:
    """alpha of one draft at temperature 1, by domain and, all but the first pooled, `ood`."""
    there = alpha["1"]
    pooled = {domain: there[domain].pooled for domain in domains}
    return pooled | {"ood": pool_sums([there[domain] for domain in domains[1:]]).pooled}


def above(new: Sequence[PromptSums], old: Sequence[PromptSums], picks: Resamples) -> dict[str, Any]:
    """The difference of the means over seeds, and `told_apart`: the interval has no zero and all
    seeds agree.

    Seeds are compared with the same seed, or all with the one draft there is.
    """
    gap = difference(mean_of(new), mean_of(old), picks)
    count = max(len(new), len(old))
    pooled = [[one.pooled or 0.0 for one in each] * (count // len(each)) for each in (new, old)]
    apart = [a - b for a, b in zip(*pooled, strict=True)]
    low, high = gap["low"], gap["high"]
    clear = (
        low is not None
        and high is not None
        and low * high > 0
        and (min(apart) > 0 or max(apart) < 0)
    )
    return {**gap, "seeds": apart, "told_apart": clear}


def tables(results: dict[str, Any]) -> str:
    """All tables of a pair, in Markdown."""
    own, *others = results["domains"]
    parts = []
    objectives = list(results["by_rate"])
    modes = [name for name in results["cells"] if name not in objectives]
    for temperature, at in results["figures"].items():
        kinds = {"objectives": ["base", *objectives]} | (
            {"data modes": [ALIKE, *modes]} if modes else {}
        )
        for title, names in kinds.items():
            heading = [
                "draft",
                f"{own} (ID)",
                f"over {ALIKE}",
                "OOD",
                f"over {ALIKE}",
                "over base",
                *others,
            ]
            rows = []
            for name in names:
                words = [name]
                for place in (own, "ood"):
                    apart = None if name == "base" else at[name][place].get(f"above_{ALIKE}")
                    words += [with_interval(at[name][place]["alpha"]), _above(apart)]
                words.append(_above(at[name]["ood"].get("above_base")))
                rows.append(
                    [*words, *(f"{at[name][place]['alpha']['value']:.3f}" for place in others)]
                )
            parts.append(f"**T = {temperature}: {title}**\n\n{table(heading, rows)}")
    rates = [f"{rate:g}" for rate in results["options"]["rates"]]
    heading = [
        "objective",
        *(f"{rate}: {own}" for rate in rates),
        *(f"{rate}: OOD" for rate in rates),
        "chosen",
    ]
    rows = []
    for name, tried in results["by_rate"].items():
        values = [f"{tried[rate][place]:.3f}" for place in (own, "ood") for rate in rates]
        rows.append([name, *values, f"{results['cells'][name]['rate']:g}"])
    parts.append(f"**T = 1: by learning rate, one seed**\n\n{table(heading, rows)}")
    heading = [
        "draft",
        f"{own}, seed by seed",
        "OOD, seed by seed",
        "step of the kept weights",
        "processor s a step",
    ]
    rows = []
    for name, variant in results["cells"].items():
        at = results["figures"]["1"][name]
        each = [" ".join(f"{value:.3f}" for value in at[place]["seeds"]) for place in (own, "ood")]
        steps = " ".join(str(run["best_step"]) for run in variant["runs"])
        seconds = (
            min(run["processor_seconds"] for run in variant["runs"]) / results["options"]["steps"]
        )
        rows.append([name, *each, steps, f"{seconds:.2f}"])
    return "\n\n".join([*parts, f"**T = 1: seeds**\n\n{table(heading, rows)}"]) + "\n"


def in_short(results: dict[str, Any], first: str) -> str:
    """alpha ID and OOD at T = 1, and ID at T = 0, by objective, each over fkl."""
    own, rows = results["domains"][0], []
    for name in results["by_rate"]:
        cells = [
            results["figures"][at][name][place]
            for at, place in (("1", own), ("1", "ood"), ("0", own))
        ]
        words = [
            (with_interval(cell["alpha"]), _above(cell.get(f"above_{ALIKE}"))) for cell in cells
        ]
        rows.append([name, *(word for pair in words for word in pair)])
    over = f"over {ALIKE}"
    return table([first, "ID", over, "OOD", over, "ID, T = 0", over], rows)


def over_fkl(cell: dict[str, Any]) -> str:
    """A figure over that of fkl; empty if there is none."""
    return _above(cell.get(f"above_{ALIKE}"))


def _above(change: dict[str, Any] | None) -> str:
    return gap(change, clear=change is not None and change["told_apart"])
