"""Add up what was measured of the runs of a draft with several training seeds."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from draftsmith.eval.decoding import SpeedMeasurement
from draftsmith.eval.rows import Measured, Setting
from draftsmith.eval.seeds import draft_of

# Parts of a measurement that are about one run.
_OF_ONE_RUN = ("identical", "diagnosis")


def with_pooled_runs(setting: Setting, measured: Measured) -> tuple[Setting, Measured]:
    """Add the drafts of several runs, with the counts of their runs, prompt by prompt.

    Alpha is then the mean over the runs, which have the same positions; tau and speed are tokens
    over the target calls and the seconds of all runs.
    """
    methods = {draft_of(run): setting.methods[run] for run in setting.methods}
    speeds: dict[tuple[str, float], SpeedMeasurement] = {}
    for at, timed in measured.speeds.items():
        of_run = {}
        for run in timed["runs"]:
            of_run[*at, run["draft"] or "", run["tree"], run["verifier"]] = run
        runs: list[Any] = [{**run, "draft": key[2] or None} for key, run in _pooled(of_run).items()]
        speeds[at] = {**timed, "runs": runs}
    decodings = _pooled(measured.decodings)
    pooled = Measured(measured.baselines, _pooled(measured.alphas), decodings, speeds)
    return replace(setting, methods=methods | dict(setting.methods)), pooled


def _pooled(measurements: Mapping[Any, Any]) -> dict[Any, Any]:
    """Measurements by set, temperature, draft and method: those of drafts, then of their runs."""
    of_draft = defaultdict(list)
    for (suite, temperature, run, *method), counts in measurements.items():
        of_draft[suite, temperature, draft_of(run), *method].append(counts)
    return {key: _sum(counts) for key, counts in of_draft.items()} | dict(measurements)


def _sum(parts: Sequence[Any]) -> Any:
    """Add up measurements of one form, number by number."""
    first = parts[0]
    if len(parts) == 1 or isinstance(first, str):
        return first
    if isinstance(first, list):
        return [_sum(each) for each in zip_longest(*parts, fillvalue=0)]
    if isinstance(first, dict):
        shared = [key for key in first if key not in _OF_ONE_RUN]
        summed = {key: _sum([part[key] for part in parts]) for key in shared}
        return dict.fromkeys(_OF_ONE_RUN) | summed
    return sum(parts)
