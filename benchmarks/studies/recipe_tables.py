"""Tables of the study of optimizers on small pairs."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.lib.pages import table
from benchmarks.studies.real_tables import NAMES
from draftsmith.core.io import JsonObject
from draftsmith.eval.formats import number, with_interval

_NAMES = NAMES | {"lm": "the pair's language model"}


def curves(runs: Sequence[JsonObject]) -> str:
    """Return held-out alpha by step, means over training seeds, and processor seconds of the whole
    run.
    """
    longest = max(runs, key=lambda run: run["steps"])
    steps = [step for step, _ in longest["curve"]]
    together: dict[tuple[str, str], list[JsonObject]] = {}
    for run in runs:
        draft = (_NAMES[run["kind"]], _label(run))
        together.setdefault(draft, []).append(run)
    rows = []
    for draft, same in together.items():
        alphas: dict[int, list[float]] = {}
        for run in same:
            for step, alpha in run["curve"]:
                alphas.setdefault(step, []).append(alpha)
        means = {step: fmean(found) for step, found in alphas.items()}
        cells = [number(means.get(step)) for step in steps]
        seconds = number(fmean(run["seconds"] for run in same), 0)
        rows.append([*draft, *cells, seconds])
    heading = [f"step {step}" for step in steps]
    return table(["draft", "optimizer", *heading, "seconds"], rows)


def by_set(runs: Sequence[JsonObject]) -> str:
    """Return alpha of every run in and out of distribution, temperature 1."""
    rows = []
    for run in runs:
        alphas = [with_interval(run[place]) for place in ("id", "ood")]
        label = f"{_label(run)}, seed {run['seed']}"
        rows.append([_NAMES[run["kind"]], label, *alphas])
    return table(["draft", "run", "alpha ID", "alpha OOD"], rows)


def _label(run: JsonObject) -> str:
    return f"{run['recipe']}, {run['steps']} steps"
