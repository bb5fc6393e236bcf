"""The measurements of an evaluation, each a file of OUT/cells, and their table of counts."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, TypeVar

from draftsmith.core.distilled_sets import repeats
from draftsmith.core.io import hash_json
from draftsmith.core.models import eos_ids
from draftsmith.core.progress import Advance, Tick, no_tick, progress
from draftsmith.core.ranks import from_main, groups, launched
from draftsmith.core.runs import Run
from draftsmith.core.settings import Sampling
from draftsmith.decode.method import Method
from draftsmith.decode.propose import CHAIN
from draftsmith.decode.propose.sources import AnyDraft
from draftsmith.drafts.load import LoadedModels
from draftsmith.eval.alpha import measure_alphas, prompt_nats
from draftsmith.eval.counts import TARGET, CellCounts, Count, Tally, Where, of_method
from draftsmith.eval.facts import identity, machine
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.parts import span_marks
from draftsmith.eval.predict import chains
from draftsmith.eval.remarks import conditions
from draftsmith.eval.request import EvalRequest, draft_and_seed
from draftsmith.eval.schema import Conditions, ModelRow
from draftsmith.eval.suites import Suite, prompt_groups
from draftsmith.eval.timing import BaselineMeasurement, Task, TimedCounts, continuations

# Part of the name of every cell: raise it when a code change makes the same request measure
# something else.
MEASUREMENT_VERSION = 11
Measurement = TypeVar("Measurement")
Decides = dict[str, object]


@dataclass
class Evaluation:
    """What all measurements of an evaluation share, the counts that they append, how quiet the
    machine was, and the number of cells `reused` and `measured`.

    A cell is a finished measurement: a JSON file named by the hash of everything that decides its
    outcome. Cells of other configurations stay, and are reused when that configuration comes back.
    """

    request: EvalRequest
    suites: list[Suite]
    pair: LoadedModels
    drafts: dict[str, AnyDraft]
    models: dict[str, ModelRow]
    run: Run
    tally: Tally = field(default_factory=Tally)
    conditions: list[Conditions] = field(default_factory=list)
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

    def measure(self) -> None:
        """Measure everything that the request asks for. The clock comes last, when everything is
        warm.
        """
        parts = list(product(self.suites, self.request.samplings))
        prompts = sum(len(suite.prompts) for suite, _ in parts)
        runs = self.request.runs
        timed = self.request.config.speed_prompts if runs else 0
        total = prompts * (1 + len(self.drafts) + runs)
        for suite, _ in parts:
            total += min(timed, len(suite.prompts)) * (1 + runs)
        with progress("eval", total) as self.advance:
            every = []
            for suite, sampling in parts:
                baseline = self._read(suite, sampling)
                self._count(suite, sampling, baseline)
                # A text that repeats itself is drafted fast by anything.
                outputs = enumerate(baseline["output_ids"])
                every.append([number for number, ids in outputs if not repeats(ids)])
            for (suite, sampling), numbers in zip(parts, every, strict=True):
                if numbers[:timed]:
                    self._time(suite, sampling, numbers[:timed])

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """By suite, the group of each prompt."""
        return prompt_groups(self.suites)

    def _append(
        self,
        run: str,
        suite: Suite,
        sampling: Sampling,
        counts: Sequence[Sequence[Any]],
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Add the counts of a cell to the table. run: a draft, or the target."""
        draft, seed = draft_and_seed(run)
        where = Where(draft, seed, suite.name, suite.kind, sampling.temperature)
        self.tally.extend(where, self.groups[suite.name], counts, prompts)

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

    def _read(self, suite: Suite, sampling: Sampling) -> BaselineMeasurement:
        """Measure one suite at one temperature: the target's texts, which are returned, and
        acceptance on them.
        """
        where = f"{suite.name}, T={sampling.temperature:g}"
        count = len(suite.prompts)
        task, decides = self._decoding(suite, sampling)
        baseline = self.cell(decides, task.baseline, f"target alone: {where}", count)
        self._append(TARGET, suite, sampling, prompt_nats(self.pair.target, suite.prompts))
        outputs = baseline["output_ids"]
        written = [
            Count("tokens", [len(ids) for ids in outputs]),
            Count("looping", [len(ids) if repeats(ids) else 0 for ids in outputs]),
            Count("stopped", [int(reason == "stop") for reason in baseline["finish_reason"]]),
        ]
        self._append(TARGET, suite, sampling, written)
        texts = continuations(suite.prompts, baseline)
        for name, counts in self._alphas(sampling, texts, decides).items():
            self._append(name, suite, sampling, counts)
            self.advance(count, f"alpha: {where}")
        return baseline

    def _count(self, suite: Suite, sampling: Sampling, baseline: BaselineMeasurement) -> None:
        """Decode one suite at one temperature with every draft."""
        task, decides = self._decoding(suite, sampling)
        for name, draft in self.drafts.items():
            for method in self.request.methods[name]:
                drafted = {"what": "decoding", "draft": identity(self.models[name])}
                cell = self.cell(
                    decides | drafted | method.facts,
                    partial(task.decoding, draft, method, baseline),
                    f"{name}, {method.tree}: {suite.name}, T={sampling.temperature:g}",
                    len(suite.prompts),
                )
                self._append(name, suite, sampling, cell["counts"])

    def _decoding(self, suite: Suite, sampling: Sampling) -> tuple[Task, Decides]:
        """The task of decoding a suite, and what decides the target's texts."""
        batch_size = self.request.config.batch_size
        decides = self._decides("baseline", suite, sampling) | {"batch_size": batch_size}
        return self._task(suite, sampling, batch_size), decides

    def _alphas(
        self, sampling: Sampling, texts: Sequence[Continuation], decides: Decides
    ) -> Mapping[str, Sequence[Count]]:
        """Acceptance and predictions of every draft. Drafts without a stored cell share one forward
        of the target.
        """
        every = [*self.request.asked, Method.of(f"chain:{CHAIN}")]
        asked = list(dict.fromkeys(every))
        decides = decides | {"what": "alpha", "predicted": [method.facts for method in asked]}
        cells: dict[str, Decides] = {}
        missing: dict[str, AnyDraft] = {}
        for name, draft in self.drafts.items():
            cells[name] = decides | {"draft": identity(self.models[name])}
            if not self.kept(cells[name]):
                missing[name] = draft
        measured: dict[str, list[Count]] = {}
        if missing:
            measured = measure_alphas(
                self.pair.target,
                missing,
                texts,
                sampling,
                asked,
                brief=chains(greedy=sampling.greedy),
                marks=span_marks(self.pair.tokenizer),
                batch_size=self.request.config.batch_size,
                seed=self.request.config.seed,
            )

        def of(name: str) -> CellCounts:
            return self.cell(cells[name], lambda _: CellCounts(counts=measured[name]))

        return {name: of(name)["counts"] for name in cells}

    def _time(self, suite: Suite, sampling: Sampling, numbers: Sequence[int]) -> None:
        """Time the prompts of these numbers."""
        config = self.request.config
        prompts = [suite.prompts[number] for number in numbers]
        methods = self.request.asked
        decides = self._decides("speed", suite, sampling) | {
            "prompts": numbers,
            "drafts": {name: identity(self.models[name]) for name in self.drafts},
            "methods": [method.facts for method in methods],
            "machine": machine(self.pair.target),
        }
        if config.compile:
            decides["compile"] = True
        task = self._task(suite, sampling, 1)
        task = replace(task, prompts=prompts, compile=bool(config.compile))
        runs = 1 + self.request.runs
        timed: TimedCounts = self.cell(
            decides,
            partial(task.speed, self.drafts, self.request.methods),
            f"timing: {suite.name}, T={sampling.temperature:g}",
            units=runs * len(prompts),
            who="main" if groups() == launched() else "all",
        )
        for run, counts in timed["runs"]:
            self._append(run, suite, sampling, counts, numbers)
        _, alone_counts = timed["runs"][0]
        alone = of_method(map(Count._make, alone_counts))
        pairs = zip(alone["decode_s"], alone["timed_tokens"], strict=True)
        rates = [seconds / tokens for seconds, tokens in pairs if tokens]
        quiet = conditions(
            suite.name, sampling.temperature, timed["load"], rates, os.cpu_count() or 1
        )
        self.conditions.append(quiet)


def _cell_name(decides: Decides) -> str:
    return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **decides})[:32]}.json"
