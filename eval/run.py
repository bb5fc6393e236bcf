"""One evaluation, from its options over its measurements to results.json and the report."""

import atexit
import os
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.core.devices import (
    attention_of_any_length,
    reset_peak_memory,
    resolve_device,
)
from draftsmith.core.errors import InputError, RunError, without_secrets
from draftsmith.core.io import JsonObject, read_json, refuse_foreign, remove_leftovers
from draftsmith.core.launcher import join_processes, leave_processes
from draftsmith.core.options import command_line, configured, identity
from draftsmith.core.ranks import from_main, is_main, launched, on_main, say
from draftsmith.core.records import agree, path_now, provenance, read_run
from draftsmith.core.runs import Run
from draftsmith.core.settings import resolve_sampling, sampling_options
from draftsmith.core.template_date import date_of
from draftsmith.decode.compiled.steps import check_backend
from draftsmith.decode.propose.sources import AnyDraft
from draftsmith.drafts.config import DoctorConfig
from draftsmith.drafts.doctor import first_engine
from draftsmith.drafts.draft_sources import is_joined, models_of
from draftsmith.drafts.load import LoadedModels
from draftsmith.eval import remarks
from draftsmith.eval.cells import Evaluation
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.copying import loaded_drafts
from draftsmith.eval.counts import TARGET, packed
from draftsmith.eval.facts import clock, model_rows
from draftsmith.eval.figures import definitions, estimate, rows_as_json
from draftsmith.eval.loading import load
from draftsmith.eval.remarks import announce
from draftsmith.eval.report.page import write_report
from draftsmith.eval.request import EvalRequest, check, draft_and_seed
from draftsmith.eval.results import SCHEMA_VERSION, Results
from draftsmith.eval.schema import ModelRow, Remark
from draftsmith.eval.suites import suite_rows
from draftsmith.eval.timing import decoder_of, records_steps


def evaluate(config: EvalConfig | None = None, **options: Any) -> Results:
    """Measure every draft on every suite, write results.json, report.html and plots/, and return
    the results.

    Launched processes divide the prompts; results equal those of one process, except for timings,
    which one of them takes. A killed run resumes from OUT/cells. Raise InputError before the first
    measurement, and RequirementError after everything is written if a requirement is not met.
    """
    return evaluate_request(check(configured(EvalConfig, config, options)))


@attention_of_any_length()
def evaluate_request(request: EvalRequest) -> Results:
    """Do as `evaluate` with options that are parsed."""
    given = request.config
    started = time.time()
    if launched() > 1:
        join_processes(given.device, given)
    out = Path(given.out)
    with Run(out) as run:
        run.lock()
        on_main(lambda: _check_before(out))
        for directory in (out, out / "plots", out / "cells") if is_main() else ():
            remove_leftovers(directory)
        work, notes = _prepared(request, run)
        work.measure()
        late = remarks.of_timing(work.conditions, os.cpu_count() or 1)
        late += remarks.of_outputs(work.tally.table(), work.models[TARGET]["dtype"])
        notes += announce(late, strict=False)

        def write() -> None:
            results = Results(_document(work, notes, started), out)
            results.write()
            write_report(results)

        on_main(write)
        run.finish("measurements", work.reused + work.measured)
    atexit.register(leave_processes)
    results = Results.load(out)
    if given.strict and late:
        raise RunError(f"--strict: {late[0]['text']}; {out} has the results")
    results.require(*given.require)
    return results


def _prepared(request: EvalRequest, run: Run) -> tuple[Evaluation, list[Remark]]:
    """Read prompts, load models, claim the directory; return the work and what is remarkable."""
    given = request.config
    device = resolve_device(given.device)
    check_backend(given.compile, device)
    reset_peak_memory(device)
    sources = models_of(request.drafts)
    suites, pair = load(given, sources, request.id_sets, request.ood_sets)
    drafts = _drafts(request, pair)
    # Sampling options that are left out come from the target's generation_config.json.
    hottest = sampling_options(given) | {"temperature": max(given.temperature)}
    found = resolve_sampling(given.target, pair.target, hottest)
    if found.note:
        say(f"eval: {found.note}")
    recorded = from_main(lambda: records_steps(given.compile, pair.target, drafts.values()))
    request = request.resolved(found.sampling, date_of(pair.tokenizer), compile=recorded)
    models = model_rows(given.target, pair.target, request.drafts, drafts)
    _name_engines(request, pair, models)
    early = [
        *remarks.of_prompts(suites),
        *remarks.of_training(sources, suites),
        *remarks.of_models(models),
        *remarks.of_targets(sources, pair.target),
    ]
    notes = announce(early, strict=given.strict)
    inputs = {key: getattr(given, key) for key in ("target", "draft", "id", "ood", "tree")}
    fingerprints = {name: row["fingerprint"] for name, row in models.items()}
    agree({"models": fingerprints, "prompts": {suite.name: suite.digest for suite in suites}})
    run.begin("evaluation", identity(given), command_line("eval", given), inputs, replace=True)
    work = Evaluation(request, suites, pair, drafts, models, run)
    few = remarks.of_groups(work.groups)
    of_target = remarks.of_target(given.target, pair.target)
    notes += announce([*of_target, *few], strict=False)
    return work, notes


def _name_engines(request: EvalRequest, pair: LoadedModels, models: dict[str, ModelRow]) -> None:
    given = request.config
    for name, source in request.drafts.items():
        if not is_joined(source):
            asked = DoctorConfig(
                target=given.target,
                draft=source,
                revision=given.revision,
                trust_remote_code=given.trust_remote_code,
            )
            models[name]["engine"] = first_engine(asked, pair, name)


def _check_before(out: Path) -> None:
    """Raise InputError if results in `out` are of another program."""
    file = out / "results.json"
    if not file.is_file() or "schema_version" not in read_json(file, "results"):
        refuse_foreign(out, ("results.json", "report.html", "plots/*"))


def _document(work: Evaluation, notes: list[Remark], started: float) -> JsonObject:
    """Make results.json."""
    request = work.request
    options = asdict(request.config)
    counts = work.tally.table()
    every = chain.from_iterable(request.methods.values())
    methods = list(dict.fromkeys(every))
    trees = [*request.asked, *methods]
    rows = estimate(
        counts,
        base=request.base,
        resamples=request.config.bootstrap,
        seed=request.config.seed,
        most_tokens={method.tree: method.most_tokens for method in trees},
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "definitions": definitions(),
        "remarks": notes,
        "config": without_secrets(options),
        "base": request.base,
        "drafts": [name for name in request.drafts if draft_and_seed(name)[1] == 1],
        "temperatures": [sampling.temperature for sampling in request.samplings],
        "methods": [{**method.facts, "lossless": method.lossless} for method in methods],
        "models": work.models,
        "suites": suite_rows(work.suites, work.groups),
        "rows": rows_as_json(rows),
        "counts": packed(counts),
        "conditions": work.conditions,
        "provenance": provenance(command_line("eval", request.config), options),
        "clock": clock(started, work.reused, work.measured, work.pair.target),
    }


def without_timings(directory: str) -> EvalConfig:
    """Remove the timings of an evaluation and return its options: `evaluate` measures only them
    again.
    """
    results = Results.load(directory)
    options = results.document["config"] | {"out": str(directory)}
    record = read_run(Path(directory))
    if not options["speed_prompts"]:
        raise InputError(f"{directory}: timed nothing; evaluate with --speed_prompts instead")
    for key in record.get("inputs", ()):
        given = options[key]
        named = [given] if isinstance(given, str) else given
        now = [path_now(value, record, Path(directory)) for value in named]
        options[key] = now[0] if isinstance(given, str) else now
    for cell in Path(directory).glob("cells/*.json"):
        if "load" in read_json(cell, "a measurement"):
            cell.unlink()
    return EvalConfig(**options)


def _drafts(request: EvalRequest, pair: LoadedModels) -> dict[str, AnyDraft]:
    """All drafts in the order given, each checked with its methods."""
    drafts = loaded_drafts(request.drafts, pair)
    for name, draft in drafts.items():
        try:
            for method in request.methods[name]:
                decoder_of(pair.target, draft, method)
        except ValueError as error:
            raise InputError(f"--draft {name}: {error}") from None
    return drafts
