"""The measurements of an evaluation, each kept as a file of OUT/cells."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, TypeVar

from draftsmith.core.io import hash_json
from draftsmith.core.models import eos_ids
from draftsmith.core.progress import Advance, Tick, no_tick, progress
from draftsmith.core.ranks import from_main, groups, launched, say
from draftsmith.core.records import agree
from draftsmith.core.runs import Run
from draftsmith.core.settings import Sampling
from draftsmith.drafts.load import LoadedModels
from draftsmith.eval.acceptance import Continuation
from draftsmith.eval.copying import AnyDraft, CopyingDraft, JoinedDraft
from draftsmith.eval.decision import least_that_pays
from draftsmith.eval.decoding import SpeedMeasurement, Task, continuations
from draftsmith.eval.diagnosis.root_step import RootStep
from draftsmith.eval.facts import identity, machine
from draftsmith.eval.predict import predicted_methods
from draftsmith.eval.reading import AlphaMeasurement, measure_alphas
from draftsmith.eval.request import EvalRequest
from draftsmith.eval.rows import Measured, Setting, prediction_rows
from draftsmith.eval.schema import ModelRow
from draftsmith.eval.seeds import draft_of
from draftsmith.eval.suites import Suite

# Part of the name of every cell: raise it when a code change makes the same request measure
# something else.
MEASUREMENT_VERSION = 9
Measurement = TypeVar("Measurement")
Decides = dict[str, object]


@dataclass
class Evaluation:
    """What all measurements of an evaluation share, and the number of cells `reused` and
    `measured`.

    A cell is a finished measurement: a JSON file named by the hash of everything that decides its
    outcome. Cells of other configurations stay, and are reused when that configuration comes back.
    """

    request: EvalRequest
    suites: list[Suite]
    pair: LoadedModels
    drafts: dict[str, AnyDraft]
    models: dict[str, ModelRow]
    run: Run
    advance: Advance = no_tick
    reused: int = 0
    measured: int = 0

    def kept(self, decides: Decides) -> bool:
        """Whether a cell is finished."""
        return from_main(lambda: self.run.finished(_cell_name(decides)))

    def cell(
        self,
        decides: Decides,
        make: Callable[[Tick], Measurement],
        note: str = "",
        units: int = 0,
        who: Literal["main", "all"] = "all",
    ) -> Measurement:
        """Return the stored outcome, or store and return that of `make(tick)`.

        decides: everything that decides the outcome. units: of progress, under `note`. who: as in
        `Run.step`.
        """

        def tick(count: int) -> None:
            self.advance(count, note)

        if self.kept(decides):
            self.reused += 1
            tick(units)
        else:
            self.measured += 1
        outcome: Measurement = self.run.step(_cell_name(decides), lambda: make(tick), who=who)
        return outcome

    def measure(self) -> Measured:
        """Measure everything that the request asks for. The clock comes last, when everything is
        warm. Raise InputError if the processes have other models or prompts.
        """
        models = {name: row["fingerprint"] for name, row in self.models.items()}
        agree({"models": models, "prompts": {suite.name: suite.digest for suite in self.suites}})
        parts = list(product(self.suites, self.request.samplings))
        prompts = sum(len(suite.prompts) for suite, _ in parts)
        measured = Measured({}, {}, {}, {})
        with progress("eval", prompts * (1 + len(self.drafts))) as self.advance:
            for suite, sampling in parts:
                self._read(suite, sampling, measured)
        self.request = self._worth_decoding(measured)
        runs = self.request.runs
        timed = self.request.config.speed_prompts if runs else 0
        total = prompts * runs
        for suite, _ in parts:
            total += min(timed, len(suite.prompts)) * (1 + runs)
        with progress("eval", total) as self.advance:
            for suite, sampling in parts:
                self._count(suite, sampling, measured)
            for suite, sampling in parts if timed else ():
                at = (suite.name, sampling.temperature)
                measured.speeds[at] = self._time(suite, sampling)
        return measured

    @property
    def setting(self) -> Setting:
        """What the rows of results are made for."""
        config = self.request.config
        return Setting(
            suites=self.suites,
            base=self.request.base,
            temperatures=list(dict.fromkeys(config.temperature)),
            methods=self.request.methods,
            bootstrap=config.bootstrap,
            seed=config.seed,
        )

    def _worth_decoding(self, measured: Measured) -> EvalRequest:
        """Leave out the decoding of models that save next to no call by their acceptance, on every
        set, unless figures of decoding are required. Runs of one draft are all decoded.
        """
        request = self.request
        methods = dict(request.methods)
        least = least_that_pays(request.config.pays_from)
        rows = prediction_rows(self.setting, measured)
        predicted = [row for row in rows if row["figure"] == "tau_predicted"]
        for name, draft in self.drafts.items() if not request.config.require else ():
            taus = [row for row in predicted if row["draft"] == name]
            foreseen = {(row["tree"], row["verifier"]) for row in taus}
            asked = {(method.tree, method.verifier) for method in methods[name]}
            most = max((row["high"] or math.inf for row in taus), default=math.inf)
            copies = isinstance(draft, CopyingDraft | JoinedDraft)
            lone = draft_of(name) == name
            if asked and asked <= foreseen and most < least and not copies and lone:
                methods[name] = []
                say(
                    f"eval: draft {name} is not decoded: by its alpha it has at most {most:.3f} "
                    f"tokens per target call, and below {least:g} no draft pays"
                )
        return replace(request, methods=methods)

    def _decides(self, what: str, suite: Suite, sampling: Sampling) -> Decides:
        return {
            "what": what,
            "suite": suite.digest,
            "sampling": sampling.record(),
            "eos": list(eos_ids(self.pair.target)),
            "target": identity(self.models["target"]),
            "max_new_tokens": self.request.config.max_new_tokens,
            "seed": self.request.config.seed,
        }

    def _task(self, suite: Suite, sampling: Sampling, batch_size: int) -> Task:
        config = self.request.config
        return Task(
            target=self.pair.target,
            prompts=suite.prompts,
            sampling=sampling,
            eos=eos_ids(self.pair.target),
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            batch_size=batch_size,
        )

    def _read(self, suite: Suite, sampling: Sampling, measured: Measured) -> None:
        """Measure one suite at one temperature: the target's texts, and acceptance on them."""
        task, decides = self._decoding(suite, sampling)
        where = f"{suite.name}, T={sampling.temperature:g}"
        count = len(suite.prompts)
        baseline = self.cell(decides, task.baseline, f"target alone: {where}", count)
        measured.baselines[suite.name, sampling.temperature] = baseline
        texts = continuations(suite.prompts, baseline)
        for name, alpha in self._alphas(sampling, texts, decides).items():
            measured.alphas[suite.name, sampling.temperature, name] = alpha
            self.advance(count, f"alpha: {where}")

    def _count(self, suite: Suite, sampling: Sampling, measured: Measured) -> None:
        """Decode one suite at one temperature with every draft."""
        task, decides = self._decoding(suite, sampling)
        at = (suite.name, sampling.temperature)
        for name, draft in self.drafts.items():
            for method in self.request.methods[name]:
                drafted = {"what": "decoding", "draft": identity(self.models[name])}
                measured.decodings[*at, name, method] = self.cell(
                    decides | drafted | method.facts,
                    partial(task.decoding, draft, method, measured.baselines[at]),
                    f"{name}, {method.tree}: {suite.name}, T={sampling.temperature:g}",
                    len(suite.prompts),
                )

    def _decoding(self, suite: Suite, sampling: Sampling) -> tuple[Task, Decides]:
        """The task of decoding a suite, and what decides the target's texts."""
        batch_size = self.request.config.batch_size
        decides = self._decides("baseline", suite, sampling) | {"batch_size": batch_size}
        return self._task(suite, sampling, batch_size), decides

    def _alphas(
        self, sampling: Sampling, texts: Sequence[Continuation], decides: Decides
    ) -> dict[str, AlphaMeasurement]:
        """Acceptance and predictions of every draft. Drafts without a stored cell share one forward
        of the target.
        """
        steps: dict[str, RootStep] = {}
        for method in self.request.asked:
            step = RootStep.of(method)
            # At temperature 0 every lossless rule reaches the bound: the one token that the target
            # can take.
            if step is not None and not sampling.greedy:
                steps[step.name] = step
        methods = predicted_methods(self.request.asked, sampling.greedy)
        decides = decides | {
            "what": "alpha",
            "roots": list(steps),
            "predicted": [method.facts for method in methods],
        }
        drafts = self.drafts
        cells = {name: decides | {"draft": identity(self.models[name])} for name in drafts}
        missing = {name: draft for name, draft in drafts.items() if not self.kept(cells[name])}
        measured: dict[str, AlphaMeasurement] = {}
        if missing:
            names = {"": f"the target {self.models['target']['name']}"}
            for name in missing:
                names[name] = f"draft {name} ({self.models[name]['name']})"
            measured = measure_alphas(
                self.pair.target,
                missing,
                texts,
                sampling,
                methods,
                batch_size=self.request.config.batch_size,
                roots=list(steps.values()),
                diagnose=True,
                seed=self.request.config.seed,
                names=names,
            )

        def of(name: str) -> AlphaMeasurement:
            return self.cell(cells[name], lambda _: measured[name])

        return {name: of(name) for name in cells}

    def _time(self, suite: Suite, sampling: Sampling) -> SpeedMeasurement:
        config = self.request.config
        methods = self.request.asked
        decides = self._decides("speed", suite, sampling) | {
            "prompts": config.speed_prompts,
            "drafts": {name: identity(self.models[name]) for name in self.drafts},
            "methods": [method.facts for method in methods],
            "machine": machine(self.pair.target),
        }
        if config.compile:
            decides["compile"] = True
        task = self._task(suite, sampling, 1)
        prompts = suite.prompts[: config.speed_prompts]
        task = replace(task, prompts=prompts, compile=bool(config.compile))
        runs = 1 + self.request.runs
        return self.cell(
            decides,
            partial(task.speed, self.drafts, self.request.methods),
            f"timing: {suite.name}, T={sampling.temperature:g}",
            units=runs * len(prompts),
            who="main" if groups() == launched() else "all",
        )


def _cell_name(decides: Decides) -> str:
    return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **decides})[:32]}.json"
