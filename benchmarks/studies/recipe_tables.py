"""Tables of the study of optimizers on small pairs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.lib.pages import table
from benchmarks.studies.real_tables import NAMES
from draftsmith.eval.report.formats import number, with_interval

Run = Mapping[str, Any]
_NAMES = NAMES | {"lm": "the pair's language model"}


def curves(runs: Sequence[Run]) -> str:
    """Return held-out alpha by step, means over training seeds, and processor seconds of the whole
    run.
    """
    longest = max(runs, key=lambda run: run["steps"])
    steps = [step for step, _ in longest["curve"]]
    rows = []
    for same in _over_seeds(runs):
        alphas: dict[int, list[float]] = {}
        for run in same:
            for step, alpha in run["curve"]:
                alphas.setdefault(step, []).append(alpha)
        cells = [number(fmean(alphas[step]) if step in alphas else None) for step in steps]
        seconds = number(fmean(run["seconds"] for run in same), 0)
        rows.append([_NAMES[same[0]["kind"]], _label(same[0]), *cells, seconds])
    return table(["draft", "optimizer", *(f"step {step}" for step in steps), "seconds"], rows)


def by_set(runs: Sequence[Run]) -> str:
    """Return alpha of every run in and out of distribution, temperature 1."""
    rows = []
    for run in runs:
        alphas = [with_interval(run[place]) for place in ("id", "ood")]
        rows.append([_NAMES[run["kind"]], f"{_label(run)}, seed {run['seed']}", *alphas])
    return table(["draft", "run", "alpha ID", "alpha OOD"], rows)


def _over_seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs that differ in their seed only, together."""
    together: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        together.setdefault((run["kind"], _label(run)), []).append(run)
    return list(together.values())


def _label(run: Run) -> str:
    return f"{run['recipe']}, {run['steps']} steps"
