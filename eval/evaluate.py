"""One evaluation, from its options over its measurements, each a file of OUT/cells, to results.json
and the report.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from drafts.load import LoadedModels
from drafts.vocabulary import vocabulary_map
from draftsmith_core import wandb_runs
from draftsmith_core.devices import reset_peak_memory, resolve_device
from draftsmith_core.errors import InputError, RunError, without_secrets
from draftsmith_core.io import hash_json, remove_leftovers
from draftsmith_core.launcher import join_processes
from draftsmith_core.models import eos_ids
from draftsmith_core.options import configured
from draftsmith_core.progress import Advance, Tick, no_tick, progress
from draftsmith_core.ranks import from_main, is_main, launched, on_main, say
from draftsmith_core.runs import Run, command_line, provenance
from draftsmith_core.settings import Sampling, resolve_sampling, sampling_options
from eval import remarks, rows
from eval.acceptance import Continuation
from eval.config import EvalConfig
from eval.diagnosis.diagnose import RootStep
from eval.diagnosis.rows import diagnosis_rows
from eval.estimate import AlphaMeasurement, measure_alphas
from eval.facts import clock, identity, machine, model_row
from eval.measuring import SpeedMeasurement, Task, continuations, decoder_of
from eval.method import Method
from eval.predict import predicted_methods
from eval.remarks import announce
from eval.report.page import write_report
from eval.request import EvalRequest, check
from eval.results import Results
from eval.rows import Measured
from eval.schema import ModelRow, Remark
from eval.suites import Suite, load

# Part of the name of every cell: raise it when a code change makes the same request measure
# something else.
MEASUREMENT_VERSION = 8
# Figures that are logged to the tracker as tables.
TABLES = ("alpha", "gain", "transfer", "tau", "accept", "tau_predicted", "speedup")


def evaluate(config: EvalConfig | None = None, **options: Any) -> Results:
    """Measure every draft on every suite, write results.json, report.html and plots/, and return
    the results.

    Launched processes divide the prompts; results equal those of one process, except for timings,
    which one of them takes. A killed run resumes from OUT/cells. Raise InputError before the first
    measurement, and RequirementError after everything is written if a requirement is not met.
    """
    config = configured(EvalConfig, config, options)
    started = time.time()
    request = check(config)
    wandb_runs.check_tracker(config.tracker)
    if launched() > 1:
        join_processes(config.device)
    out = Path(config.out)
    with Run(out) as run:
        run.begin()
        for directory in (out, out / "plots", out / "cells") if is_main() else ():
            remove_leftovers(directory)
        reset_peak_memory(resolve_device(config.device))
        suites, pair, notes = _load(config, request)
        # Sampling options that are left out come from the target's generation_config.json.
        hottest = sampling_options(config) | {"temperature": max(config.temperature)}
        resolved = resolve_sampling(config.target, pair.target, **hottest)
        if resolved.note:
            say(f"eval: {resolved.note}")
        chosen = {key: getattr(resolved.sampling, key) for key in ("top_k", "top_p", "min_p")}
        given, config = config, replace(config, **chosen)
        models = {"target": model_row(config.target, pair.target)}
        models |= {
            name: model_row(request.drafts[name], draft) for name, draft in pair.drafts.items()
        }
        work = Evaluation(config, check(config), suites, pair, models, run)
        notes += announce(remarks.of_models(models, config.quantize_draft), strict=config.strict)
        notes += announce(remarks.of_target(config.target, pair.target), strict=False)
        measured = measure_all(work)
        busy = remarks.of_timing(
            rows.timing_conditions(measured, cpus := os.cpu_count() or 1), cpus
        )
        notes += announce(busy, strict=False)
        setting = rows.Setting(
            suites=suites,
            drafts=list(pair.drafts),
            base=work.request.base,
            temperatures=[sampling.temperature for sampling in work.request.samplings],
            methods=work.request.methods,
            bootstrap=config.bootstrap,
            seed=config.seed,
        )

        def write() -> None:
            document = rows.assemble(
                setting,
                measured,
                config=without_secrets(asdict(config)),
                models=models,
                provenance=provenance(command_line("eval", given), asdict(config)),
                clock=clock(started, work.reused, work.measured, pair.target),
                remarks=notes,
                diagnosis=diagnosis_rows(
                    setting, measured, cache(lambda token: str(pair.tokenizer.decode([token])))
                ),
            )
            Results(document, out).write()
            results = Results.load(out)
            write_report(results)
            track(config, results)

        on_main(write)
    results = Results.load(out)
    if config.strict and busy:
        raise RunError(f"--strict: {busy[0]['text']}; {out} has the results")
    results.require(*config.require)
    return results


def render(directory: str | Path) -> Path:
    """Draw the report again from DIR/results.json."""
    return write_report(Results.load(directory))


def without_timings(directory: str | Path) -> EvalConfig:
    """Remove the timings of an evaluation and return its options: `evaluate` measures only them
    again.
    """
    config = EvalConfig(**{**Results.load(directory).document["config"], "out": str(directory)})
    for cell in Path(directory).glob("cells/*.json"):
        if "one_level" in json.loads(cell.read_text(encoding="utf-8")):
            cell.unlink()
    return config


def _load(
    config: EvalConfig, request: EvalRequest
) -> tuple[list[Suite], LoadedModels, list[Remark]]:
    how = {
        "quantize_draft": config.quantize_draft,
        "heterogeneous_vocab": config.heterogeneous_vocab,
    }
    suites, pair = load(config, request.drafts, request.id_sets, request.ood_sets, **how)
    for name, draft in pair.drafts.items():
        try:
            for method in request.methods:
                decoder_of(pair.target, draft, method)
        except ValueError as error:
            raise InputError(f"--draft {name}: {error}") from None
    prompts = [prompt.ids for suite in suites for prompt in suite.prompts]
    for name, draft in pair.drafts.items():
        if isinstance(draft, PreTrainedModel) and (words := vocabulary_map(draft)) is not None:
            say(
                f"eval: draft {name} has another tokenizer: of the prompts "
                f"{words.coverage(prompts)}"
            )
    if cut := [suite.name for suite in suites if suite.more]:
        say(f"eval: {', '.join(cut)}: using the first {config.max_prompts} rows (--max_prompts)")
    notes = remarks.of_prompts(suites) + remarks.of_training(request.drafts, suites)
    return suites, pair, announce(notes, strict=config.strict)


def track(config: EvalConfig, results: Results) -> None:
    """Log the results to the tracker, if there is one; the same evaluation again is the same W&B
    run.
    """
    if config.tracker == "none":
        return
    import wandb

    document, out = results.document, results.directory
    models = {
        name: {
            key: row[key]
            for key in ("name", "kind", "fingerprint", "parameters", "dtype", "quantize")
        }
        for name, row in document["models"].items()
    }
    settings = {**document["config"], "models": models}
    run_id = hash_json([str(out.resolve()), settings])[:16]
    with wandb_runs.without_prompts():
        options = wandb_runs.run_options(out, out.resolve().name, run_id, "eval")
        with wandb.init(project=config.project, config=settings, **options) as run:
            run.summary.update(figures(results))
            known = {row["figure"] for row in document["rows"]}
            frames = {f"tables/{name}": results.to_frame(name) for name in TABLES if name in known}
            run.log({name: wandb.Table(dataframe=frame) for name, frame in frames.items()})
            run.log(
                {
                    f"figures/{png.stem}": wandb.Image(str(png))
                    for png in sorted((out / "plots").glob("*.png"))
                }
            )


def figures(results: Results) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or
    `tau/mine/ood/T0/chain:4/speculative`.

    Figures that are not defined are left out.
    """
    named: dict[str, float] = {}
    for row in results.rows("alpha", "gain", "tau", "speedup", "transfer"):
        words = (
            row["figure"],
            row["draft"],
            row["domain"],
            f"T{row['temperature']:g}",
            row["tree"],
            row["verifier"],
        )
        if row["value"] is not None:
            named["/".join(filter(None, words))] = row["value"]
    return named


@dataclass
class Evaluation:
    """What all measurements of an evaluation share, and the number of cells `reused` and
    `measured`.

    A cell is a finished measurement: a JSON file named by the hash of everything that decides its
    outcome. Cells of other configurations stay, and are reused when that configuration comes back.
    """

    config: EvalConfig
    request: EvalRequest
    suites: list[Suite]
    pair: LoadedModels
    models: dict[str, ModelRow]
    run: Run
    advance: Advance = no_tick
    reused: int = 0
    measured: int = 0

    def kept(self, decides: dict[str, Any]) -> str | None:
        """Return the name of a finished cell, else None."""
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

    def task(
        self, suite: Suite, sampling: Sampling, prompts: int | None = None, batch_size: int = 1
    ) -> Task:
        target, config = self.pair.target, self.config
        rows = suite.prompts[:prompts]
        return Task(
            target, rows, sampling, eos_ids(target), config.max_new_tokens, config.seed, batch_size
        )


def _cell_name(decides: dict[str, Any]) -> str:
    return f"cells/{hash_json({'version': MEASUREMENT_VERSION, **decides})[:32]}.json"


def measure_all(work: Evaluation) -> Measured:
    """Measure everything that the request asks for. The clock comes last, when everything is
    warm.
    """
    drafts, methods = len(work.pair.drafts), len(work.request.methods)
    timed = work.config.speed_prompts if methods else 0
    parts = [(suite, sampling) for suite in work.suites for sampling in work.request.samplings]
    counted, clocked = 1 + drafts * (1 + methods), 1 + drafts * methods
    total = sum(
        len(suite.prompts) * counted + min(timed, len(suite.prompts)) * clocked
        for suite, _ in parts
    )
    measured = Measured({}, {}, {}, {})
    with progress("eval", total) as work.advance:
        for suite, sampling in parts:
            _count(work, suite, sampling, measured)
        for suite, sampling in parts if timed else ():
            measured.speeds[suite.name, sampling.temperature] = _time(work, suite, sampling)
    return measured


def _count(work: Evaluation, suite: Suite, sampling: Sampling, measured: Measured) -> None:
    task = work.task(suite, sampling, batch_size=work.config.batch_size)
    temperature, where = sampling.temperature, f"{suite.name}, T={sampling.temperature:g}"
    common = {**work.identity(suite, sampling), "batch_size": task.batch_size}
    count = len(suite.prompts)
    baseline = work.cell(
        {"what": "baseline", **common}, task.baseline, f"target alone: {where}", count
    )
    measured.baselines[suite.name, temperature] = baseline
    for name, alpha in _alphas(
        work, sampling, continuations(suite.prompts, baseline), common
    ).items():
        measured.alphas[suite.name, temperature, name] = alpha
        work.advance(count, f"alpha: {where}")
    for name, draft in work.pair.drafts.items():
        for method in work.request.methods:
            decides = {
                "what": "decoding",
                **common,
                "draft": identity(work.models[name]),
                **_identity(method),
            }
            measured.decodings[suite.name, temperature, name, method] = work.cell(
                decides,
                partial(task.decoding, draft, method, baseline),
                f"{name}, {method.tree}: {where}",
                count,
            )


def _identity(method: Method) -> dict[str, Any]:
    return {"tree": method.tree, "shape": asdict(method.shape), "verifier": method.verifier}


def _alphas(
    work: Evaluation, sampling: Sampling, rows: Sequence[Continuation], common: dict[str, Any]
) -> dict[str, AlphaMeasurement]:
    """Acceptance and predictions of every draft. Drafts without a stored cell share one forward of
    the target.
    """
    # At temperature 0 every lossless rule reaches the bound: the one token that the target can
    # take.
    steps = (
        {}
        if sampling.greedy
        else {s.name: s for m in work.request.methods if (s := RootStep.of(m)) is not None}
    )
    methods = predicted_methods(work.request.methods, sampling.greedy)
    decides = {
        "what": "alpha",
        **common,
        "roots": list(steps),
        "predicted": [_identity(method) for method in methods],
    }
    requests = {
        name: {**decides, "draft": identity(work.models[name])} for name in work.pair.drafts
    }
    missing = {
        name: draft for name, draft in work.pair.drafts.items() if not work.kept(requests[name])
    }
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
    return {
        name: work.cell(decides, lambda _, name=name: measured[name])  # type: ignore[misc]
        for name, decides in requests.items()
    }


def _time(work: Evaluation, suite: Suite, sampling: Sampling) -> SpeedMeasurement:
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
        1 + len(drafts) * len(methods),
    )
    return work.cell(
        decides,
        partial(task.speed, drafts, methods, costs_of),
        note,
        units * len(task.prompts),
        "main",
    )
