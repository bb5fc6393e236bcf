"""Every measurement of an evaluation, in order. Each is one file of OUT/cells, so a killed evaluation resumes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from drafts.load import LoadedPair
from draftsmith_core.io import hash_json
from draftsmith_core.models import eos_ids
from draftsmith_core.processes import from_main
from draftsmith_core.progress import Advance, no_advance, progress
from draftsmith_core.runs import Run
from draftsmith_core.settings import Sampling
from eval.acceptance import Continuation
from eval.config import EvalConfig
from eval.estimate import AlphaMeasurement, measure_alphas
from eval.headroom import RootStep
from eval.measure import SpeedMeasurement, Suite, Task, continuations
from eval.model_rows import identity, machine
from eval.predict import predicted_methods
from eval.request import EvalRequest, Method
from eval.rows import Measured
from eval.schema import ModelRow

# Part of every cell's name: raise it when a code change makes the same request measure something else.
MEASUREMENT_VERSION = 7


class Cells:
    """Finished measurements, one JSON file each, named by the hash of everything that decides its outcome.

    A request that differs in any of it has another name. Cells of other configurations stay, and are reused when that
    configuration comes back.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.reused, self.measured = run, 0, 0

    def get(self, request: dict[str, Any], make: Callable[[], Any], who: Literal["main", "all"] = "all") -> Any:
        """Return the kept outcome of `request`, or that of `make()`, which is then kept. `who`: as in `Run.step`."""
        if self._missing(request):
            self.measured += 1
        else:
            self.reused += 1
        return self.run.step(self._name(request), make, who=who)

    def get_all(
        self, requests: Mapping[str, dict[str, Any]], make: Callable[[list[str]], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the outcomes of several requests by name; `make(names)` measures all missing ones at once."""
        missing = [name for name, request in requests.items() if self._missing(request)]
        made = make(missing) if missing else {}
        return {name: self.get(request, lambda name=name: made[name]) for name, request in requests.items()}  # type: ignore[misc]

    def _missing(self, request: dict[str, Any]) -> bool:
        return not from_main((self.run.directory / self._name(request)).exists)

    def _name(self, request: dict[str, Any]) -> str:
        return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **request})[:32]}.json"


@dataclass(frozen=True)
class Evaluation:
    """What every measurement of an evaluation shares."""

    config: EvalConfig
    request: EvalRequest
    suites: list[Suite]
    pair: LoadedPair
    models: dict[str, ModelRow]
    cells: Cells
    advance: Advance = no_advance

    def identity(self, suite: Suite, sampling: Sampling) -> dict[str, Any]:
        """What decides the outcome of every measurement on a suite with one sampling."""
        return {
            "suite": suite.digest,
            "sampling": asdict(sampling),
            "eos": list(eos_ids(self.pair.target)),
            "target": identity(self.models["target"]),
            "max_new_tokens": self.config.max_new_tokens,
            "seed": self.config.seed,
        }

    def cell(
        self,
        request: dict[str, Any],
        units: int,
        note: str,
        make: Callable[..., Any],
        who: Literal["main", "all"] = "all",
    ) -> Any:
        """Return one measurement of `units` units of progress, kept or made now by `make(tick=...)`."""

        def tick(count: int) -> None:
            self.advance(count, note)

        reused = self.cells.reused
        outcome = self.cells.get(request, lambda: make(tick=tick), who)
        if self.cells.reused > reused:
            tick(units)
        return outcome

    def task(self, suite: Suite, sampling: Sampling, prompts: int | None = None, batch_size: int = 1) -> Task:
        """The decoding of a suite, or of its first prompts."""
        target, config = self.pair.target, self.config
        rows = suite.prompts[:prompts]
        return Task(target, rows, sampling, eos_ids(target), config.max_new_tokens, config.seed, batch_size)


def measure_all(work: Evaluation) -> Measured:
    """Measure everything that the request asks for. The clock comes last, when everything is warm."""
    timed, methods = work.config.speed_prompts, len(work.request.methods)
    parts = [(suite, sampling) for suite in work.suites for sampling in work.request.samplings]
    counted = 1 + len(work.pair.drafts) * (1 + methods)
    clocked = 1 + len(work.pair.drafts) * methods
    total = sum(len(suite.prompts) * counted + min(timed, len(suite.prompts)) * clocked for suite, _ in parts)
    measured = Measured({}, {}, {}, {})
    with progress("eval", total) as advance:
        work = replace(work, advance=advance)
        for suite, sampling in parts:
            _count(work, suite, sampling, measured)
        for suite, sampling in parts if timed else ():
            measured.speeds[suite.name, sampling.temperature] = _time(work, suite, sampling)
    return measured


def _count(work: Evaluation, suite: Suite, sampling: Sampling, measured: Measured) -> None:
    """The target's continuations, and every draft's alpha and decoding counts on them."""
    task = work.task(suite, sampling, batch_size=work.config.batch_size)
    temperature, where = sampling.temperature, f"{suite.name}, T={sampling.temperature:g}"
    common = {**work.identity(suite, sampling), "batch_size": task.batch_size}
    count = len(suite.prompts)
    baseline = work.cell({"what": "baseline", **common}, count, f"target alone: {where}", task.baseline)
    measured.baselines[suite.name, temperature] = baseline
    for name, alpha in _alphas(work, sampling, continuations(suite.prompts, baseline), common).items():
        measured.alphas[suite.name, temperature, name] = alpha
        work.advance(count, f"alpha: {where}")
    for name, draft in work.pair.drafts.items():
        for method in work.request.methods:
            decides = {"what": "decoding", **common, "draft": identity(work.models[name]), **_identity(method)}
            decode = partial(task.decoding, draft, method, baseline)
            measured.decodings[suite.name, temperature, name, method] = work.cell(
                decides, count, f"{name}, {method.tree}: {where}", decode
            )


def _identity(method: Method) -> dict[str, Any]:
    return {"tree": method.tree, "shape": asdict(method.shape), "verifier": method.verifier}


def _alphas(
    work: Evaluation, sampling: Sampling, rows: Sequence[Continuation], common: dict[str, Any]
) -> dict[str, AlphaMeasurement]:
    """Acceptance and predictions of every draft. Those that are not kept share one forward of the target."""
    # At temperature 0 every lossless rule reaches the bound: the one token that the target can take.
    steps = {} if sampling.greedy else {s.name: s for m in work.request.methods if (s := RootStep.of(m)) is not None}
    methods = predicted_methods(work.request.methods, sampling.greedy)
    decides = {"what": "alpha", **common, "roots": list(steps), "predicted": [_identity(method) for method in methods]}
    names = {"": f"the target {work.models['target']['name']}"}
    names |= {name: f"draft {name} ({work.models[name]['name']})" for name in work.pair.drafts}

    def measure_missing(missing: list[str]) -> Mapping[str, AlphaMeasurement]:
        return measure_alphas(
            work.pair.target,
            {name: work.pair.drafts[name] for name in missing},
            rows,
            sampling,
            methods,
            batch_size=work.config.batch_size,
            roots=list(steps.values()),
            diagnose=True,
            seed=work.config.seed,
            names=names,
        )

    requests = {name: {**decides, "draft": identity(work.models[name])} for name in work.pair.drafts}
    return work.cells.get_all(requests, measure_missing)


def _time(work: Evaluation, suite: Suite, sampling: Sampling) -> SpeedMeasurement:
    """Clock times of the target alone and of every draft and method, interleaved, in one process."""
    drafts, methods = work.pair.drafts, work.request.methods
    # Figures of speed lead with the highest temperature and the first lossless method.
    first = next((method for method in methods if method.lossless), None)
    hottest = sampling.temperature == max(work.config.temperature)
    costs_of = first if first is not None and first.shape.depth > 1 and hottest else None
    decides = {
        "what": "speed",
        "prompts": work.config.speed_prompts,
        "drafts": {name: identity(work.models[name]) for name in drafts},
        "methods": [_identity(method) for method in methods],
        "machine": machine(work.pair.target),
        "costs_of": None if costs_of is None else _identity(costs_of),
        **work.identity(suite, sampling),
    }
    task = work.task(suite, sampling, work.config.speed_prompts)
    units, note = (
        len(task.prompts) * (1 + len(drafts) * len(methods)),
        f"timing: {suite.name}, T={sampling.temperature:g}",
    )
    times: SpeedMeasurement = work.cell(
        decides, units, note, partial(task.speed, drafts, methods, costs_of), who="main"
    )
    return times
