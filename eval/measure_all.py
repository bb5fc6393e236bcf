"""Every measurement of an evaluation, in order. Each is one file of OUT/cells, so a killed evaluation resumes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from drafts.load import LoadedPair
from draftsmith_core.io import hash_json
from draftsmith_core.models import eos_ids
from draftsmith_core.processes import from_main
from draftsmith_core.progress import Advance, Tick, no_advance, progress
from draftsmith_core.runs import Run
from draftsmith_core.settings import Sampling
from eval.acceptance import Continuation
from eval.config import EvalConfig
from eval.diagnose import RootStep
from eval.estimate import AlphaMeasurement, measure_alphas
from eval.measure import SpeedMeasurement, Suite, Task, continuations
from eval.model_rows import identity, machine
from eval.predict import predicted_methods
from eval.request import EvalRequest, Method
from eval.rows import Measured
from eval.schema import ModelRow

# Part of every cell's name: raise it when a code change makes the same request measure something else.
MEASUREMENT_VERSION = 8


@dataclass
class Evaluation:
    """What every measurement of an evaluation shares, and how many of its cells were `reused` and `measured`.

    A cell is a finished measurement: a JSON file named by the hash of everything that decides its outcome. Cells of
    other configurations stay, and are reused when that configuration comes back.
    """

    config: EvalConfig
    request: EvalRequest
    suites: list[Suite]
    pair: LoadedPair
    models: dict[str, ModelRow]
    run: Run
    advance: Advance = no_advance
    reused: int = 0
    measured: int = 0

    def kept(self, decides: dict[str, Any]) -> str | None:
        """The name of a cell, None if it was not measured yet."""
        name = _cell_name(decides)
        return name if from_main((self.run.directory / name).exists) else None

    def cell(
        self,
        decides: dict[str, Any],
        make: Callable[[Tick], Any],
        note: str = "",
        units: int = 0,
        who: Literal["main", "all"] = "all",
    ) -> Any:
        """Return the kept outcome, or that of `make(tick)`, which is then kept.

        decides: everything that decides the outcome. units: of progress, under `note`. who: as in `Run.step`.
        """

        def tick(count: int) -> None:
            self.advance(count, note)

        if self.kept(decides):
            self.reused += 1
            tick(units)
        else:
            self.measured += 1
        return self.run.step(_cell_name(decides), lambda: make(tick), who=who)

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

    def task(self, suite: Suite, sampling: Sampling, prompts: int | None = None, batch_size: int = 1) -> Task:
        """The decoding of a suite, or of its first prompts."""
        target, config = self.pair.target, self.config
        rows = suite.prompts[:prompts]
        return Task(target, rows, sampling, eos_ids(target), config.max_new_tokens, config.seed, batch_size)


def _cell_name(decides: dict[str, Any]) -> str:
    return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **decides})[:32]}.json"


def measure_all(work: Evaluation) -> Measured:
    """Measure everything that the request asks for. The clock comes last, when everything is warm."""
    drafts, methods = len(work.pair.drafts), len(work.request.methods)
    timed = work.config.speed_prompts if methods else 0
    parts = [(suite, sampling) for suite in work.suites for sampling in work.request.samplings]
    counted, clocked = 1 + drafts * (1 + methods), 1 + drafts * methods
    total = sum(len(suite.prompts) * counted + min(timed, len(suite.prompts)) * clocked for suite, _ in parts)
    measured = Measured({}, {}, {}, {})
    with progress("eval", total) as work.advance:
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
    baseline = work.cell({"what": "baseline", **common}, task.baseline, f"target alone: {where}", count)
    measured.baselines[suite.name, temperature] = baseline
    for name, alpha in _alphas(work, sampling, continuations(suite.prompts, baseline), common).items():
        measured.alphas[suite.name, temperature, name] = alpha
        work.advance(count, f"alpha: {where}")
    for name, draft in work.pair.drafts.items():
        for method in work.request.methods:
            decides = {"what": "decoding", **common, "draft": identity(work.models[name]), **_identity(method)}
            measured.decodings[suite.name, temperature, name, method] = work.cell(
                decides, partial(task.decoding, draft, method, baseline), f"{name}, {method.tree}: {where}", count
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
    requests = {name: {**decides, "draft": identity(work.models[name])} for name in work.pair.drafts}
    missing = {name: draft for name, draft in work.pair.drafts.items() if not work.kept(requests[name])}
    measured: dict[str, AlphaMeasurement] = {}
    if missing:
        names = {"": f"the target {work.models['target']['name']}"}
        measured = measure_alphas(
            work.pair.target,
            missing,
            rows,
            sampling,
            methods,
            batch_size=work.config.batch_size,
            roots=list(steps.values()),
            diagnose=True,
            seed=work.config.seed,
            names=names | {name: f"draft {name} ({work.models[name]['name']})" for name in missing},
        )
    return {name: work.cell(decides, lambda _, name=name: measured[name]) for name, decides in requests.items()}  # type: ignore[misc]


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
    note, units = (
        f"timing: {suite.name}, T={sampling.temperature:g}",
        len(task.prompts) * (1 + len(drafts) * len(methods)),
    )
    times: SpeedMeasurement = work.cell(decides, partial(task.speed, drafts, methods, costs_of), note, units, "main")
    return times
