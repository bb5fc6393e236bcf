"""All measurements of an evaluation in order, each taken from disk where it is there."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drafts.load import LoadedPair
from draftsmith_core.io import hash_json, remove_leftovers, write_json_atomic
from draftsmith_core.models import eos_ids
from draftsmith_core.processes import is_main
from draftsmith_core.progress import Advance, no_advance, progress
from draftsmith_core.sampling_options import Sampling
from eval import measure
from eval.acceptance import Continuation
from eval.config import EvalConfig
from eval.estimate import AlphaMeasurement, measure_alphas
from eval.groups import Measured
from eval.headroom import RootStep
from eval.model_rows import identity, machine
from eval.prediction_rows import predicted_methods
from eval.request import EvalRequest, Method
from eval.schema import ModelRow
from eval.suites import Suite

T = TypeVar("T", bound=Mapping[str, Any])


# Part of every name: raise it when a code change makes the same request measure something else.
MEASUREMENT_VERSION = 6


class MeasurementCache:
    """One JSON file per measurement, named by the hash of everything that decides its outcome.

    A request that differs in any of it has another name, so that results of another configuration are never taken
    for this one's; they stay, and are used again when that configuration comes back.
    """

    def __init__(self, directory: Path) -> None:
        """Keep measurements in `directory`; it is made with the first of them."""
        self.directory = directory
        self.reused = 0
        self.measured = 0
        if directory.is_dir() and is_main():
            remove_leftovers(directory)

    def get(self, request: dict[str, Any], measure: Callable[[], T]) -> T:
        """The kept outcome of `request`, or that of `measure()`, which is then kept."""
        return self.get_all({"": request}, lambda missing: {"": measure()})[""]

    def get_all(
        self, requests: Mapping[str, dict[str, Any]], measure: Callable[[list[str]], Mapping[str, T]]
    ) -> dict[str, T]:
        """The outcomes of several requests by name: those that are kept, and of the others what `measure(names)` gives
        in one go, which is then kept, each by itself.
        """
        outcomes: dict[str, T] = {}
        for name, asked in requests.items():
            kept = _read(self._path(asked))
            if kept is not None and kept.get("request") == json.loads(json.dumps(_versioned(asked))):
                outcomes[name] = kept["outcome"]
        self.reused += len(outcomes)
        if missing := [name for name in requests if name not in outcomes]:
            for name, outcome in measure(missing).items():
                if is_main():
                    kept = {"request": _versioned(requests[name]), "outcome": outcome}
                    write_json_atomic(self._path(requests[name]), kept)
                outcomes[name] = outcome
                self.measured += 1
        return {name: outcomes[name] for name in requests}

    def _path(self, request: dict[str, Any]) -> Path:
        return self.directory / f"{hash_json(_versioned(request))[:32]}.json"


def _versioned(request: dict[str, Any]) -> dict[str, Any]:
    return {"cell_version": MEASUREMENT_VERSION, **request}


def _read(path: Path) -> dict[str, Any] | None:
    """What is in the file, or None when it cannot be read (then it is measured again)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) and "outcome" in value else None


@dataclass(frozen=True)
class Run:
    """What every measurement of an evaluation has in common."""

    config: EvalConfig
    request: EvalRequest
    suites: list[Suite]
    pair: LoadedPair
    models: dict[str, ModelRow]
    cache: MeasurementCache
    advance: Advance = no_advance

    def get(self, what: str, asked: dict[str, Any], units: int, note: str, take: Callable[..., T]) -> T:
        """The outcome of one measurement of `units` steps of progress, from disk or taken now by `take(tick=...)`."""

        def tick(count: int) -> None:
            self.advance(count, note)

        reused = self.cache.reused
        outcome = self.cache.get({"what": what, **asked}, lambda: take(tick=tick))
        if self.cache.reused > reused:
            tick(units)
        return outcome

    def common(self, suite: Suite, sampling: Sampling) -> dict[str, Any]:
        """What decides the outcome of every measurement on a suite with one sampling."""
        return {
            "suite": suite.digest,
            "sampling": asdict(sampling),
            "eos": list(eos_ids(self.pair.target)),
            "target": identity(self.models["target"]),
            "max_new_tokens": self.config.max_new_tokens,
            "seed": self.config.seed,
        }


def measure_all(run: Run) -> Measured:
    """Every measurement that the request asks for. The clock comes last, when everything is warm."""
    speed_prompts, methods = run.config.speed_prompts, len(run.request.methods)
    parts = [(suite, sampling) for suite in run.suites for sampling in run.request.samplings]
    counted = 1 + len(run.pair.drafts) * (1 + methods)
    timed = 1 + len(run.pair.drafts) * methods
    total = sum(len(suite.prompts) * counted + min(speed_prompts, len(suite.prompts)) * timed for suite, _ in parts)
    measured = Measured({}, {}, {}, {})
    with progress("eval", total) as advance:
        run = replace(run, advance=advance)
        for suite, sampling in parts:
            _count(run, suite, sampling, measured)
        # One process times while the others wait.
        if speed_prompts and is_main():
            for suite, sampling in parts:
                measured.speeds[suite.name, sampling.temperature] = _time(run, suite, sampling)
    return measured


def _count(run: Run, suite: Suite, sampling: Sampling, measured: Measured) -> None:
    """The target's continuations, and every draft's alpha and decoding counts on them."""
    target, prompts, temperature = run.pair.target, suite.prompts, sampling.temperature
    where, batch_size = f"{suite.name}, T={temperature:g}", run.config.batch_size
    task = measure.Task(
        target, prompts, sampling, eos_ids(target), run.config.max_new_tokens, run.config.seed, batch_size
    )
    common = {**run.common(suite, sampling), "batch_size": batch_size}
    baseline = run.get("baseline", common, len(prompts), f"target alone: {where}", task.baseline)
    measured.baselines[suite.name, temperature] = baseline
    rows = measure.continuations(prompts, baseline)
    _alphas(run, suite, sampling, rows, common, measured)
    for name, draft in run.pair.drafts.items():
        for method in run.request.methods:
            measured.decodings[suite.name, temperature, name, method] = run.get(
                "decoding",
                {**common, "draft": identity(run.models[name]), **_asked(method)},
                len(prompts),
                f"{name}, {method.tree}: {where}",
                partial(task.decoding, draft, method, baseline),
            )


def _asked(method: Method) -> dict[str, Any]:
    return {"tree": method.tree, "shape": asdict(method.shape), "verifier": method.verifier}


def _alphas(
    run: Run,
    suite: Suite,
    sampling: Sampling,
    rows: Sequence[Continuation],
    common: dict[str, Any],
    measured: Measured,
) -> None:
    """Acceptance and predictions of every draft; those not kept from before share one forward of the target."""
    # At temperature 0 every lossless rule reaches the bound: the one token that the target can take.
    steps = {} if sampling.greedy else {s.name: s for m in run.request.methods if (s := RootStep.of(m)) is not None}
    methods = predicted_methods(run.request.methods, sampling.greedy)
    asked = {
        "what": "alpha",
        "diagnosis": 1,
        "missing": 1,
        **common,
        "roots": list(steps),
        "predicted": [_asked(method) for method in methods],
    }
    names = {name: f"draft {name} ({run.models[name]['name']})" for name in run.pair.drafts}
    note = f"alpha: {suite.name}, T={sampling.temperature:g}"

    def measure_missing(missing: list[str]) -> Mapping[str, AlphaMeasurement]:
        return measure_alphas(
            run.pair.target,
            {name: run.pair.drafts[name] for name in missing},
            rows,
            sampling,
            methods,
            batch_size=run.config.batch_size,
            roots=list(steps.values()),
            diagnose=True,
            seed=run.config.seed,
            names={"": f"the target {run.models['target']['name']}", **names},
        )

    requests = {name: {**asked, "draft": identity(run.models[name])} for name in run.pair.drafts}
    for name, found in run.cache.get_all(requests, measure_missing).items():
        measured.alphas[suite.name, sampling.temperature, name] = found
        run.advance(len(rows), note)


def _time(run: Run, suite: Suite, sampling: Sampling) -> measure.SpeedMeasurement:
    """Clock times of the target alone and of every draft and method, interleaved."""
    target, drafts, methods = run.pair.target, run.pair.drafts, run.request.methods
    prompts = suite.prompts[: run.config.speed_prompts]
    # Figures of speed lead with the highest temperature and the first lossless method.
    first = next((method for method in methods if method.lossless), None)
    hottest = sampling.temperature == max(run.config.temperature)
    costs_of = first if first is not None and first.shape.depth > 1 and hottest else None
    asked = {
        "prompts": run.config.speed_prompts,
        "drafts": {name: identity(run.models[name]) for name in drafts},
        "methods": [[method.tree, asdict(method.shape), method.verifier] for method in methods],
        "machine": machine(target),
        "costs_of": None if costs_of is None else _asked(costs_of),
        **run.common(suite, sampling),
    }
    task = measure.Task(target, prompts, sampling, eos_ids(target), run.config.max_new_tokens, run.config.seed)
    take = partial(task.speed, drafts, methods, costs_of)
    units = len(prompts) * (1 + len(drafts) * len(methods))
    return run.get("speed", asked, units, f"timing: {suite.name}, T={sampling.temperature:g}", take)
