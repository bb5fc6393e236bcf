"""One evaluation, from its options to results.json, report.html and plots/."""

import json
import os
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode import take_over
from drafts.load import LoadedPair, load_pair
from drafts.vocabulary import vocabulary_map
from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError, RunError, without_secrets
from draftsmith_core.io import hash_json, remove_leftovers
from draftsmith_core.models import reset_peak_memory, resolve_device
from draftsmith_core.options import configured
from draftsmith_core.processes import is_main, join_processes, launched, on_main, say
from draftsmith_core.runs import Run, command_line, provenance
from draftsmith_core.settings import loading, resolve_sampling, sampling_options, tokenizing
from draftsmith_core.tokenization import load_tokenizer
from eval import remarks, rows
from eval.config import EvalConfig
from eval.diagnosis_rows import diagnosis_rows
from eval.measure import Suite, decoder_of, fit, load_suites
from eval.measure_all import Evaluation, measure_all
from eval.model_rows import clock, model_row
from eval.remarks import announce
from eval.report.page import write_report
from eval.request import EvalRequest, check
from eval.results import Results
from eval.schema import Remark

# Figures of which the tracker gets a table.
TABLES = ("alpha", "gain", "transfer", "tau", "accept", "tau_predicted", "speedup")


def evaluate(config: EvalConfig | None = None, **options: Any) -> Results:
    """Measure every draft on every suite, write results.json, report.html and plots/, and return the results.

    Launched processes divide the prompts and find the same bytes as one, except for the clock, which runs in one of
    them. A killed run resumes from OUT/cells. Raise InputError before the first measurement, and RequirementError, once
    everything is written, if a requirement is not met.
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
        given, config = config, _with_sampling_of(pair.target, config)
        models = {"target": model_row(config.target, pair.target)}
        models |= {name: model_row(request.drafts[name], draft) for name, draft in pair.drafts.items()}
        work = Evaluation(config, check(config), suites, pair, models, run)
        notes += announce(remarks.of_models(models, config.quantize_draft), strict=config.strict)
        notes += announce(remarks.of_target(config.target, pair.target), strict=False)
        measured = measure_all(work)
        busy = remarks.of_timing(rows.timing_conditions(measured, cpus := os.cpu_count() or 1), cpus)
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
                diagnosis=diagnosis_rows(setting, measured, cache(lambda token: str(pair.tokenizer.decode([token])))),
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
    """Remove the timings of an evaluation and return its options: `evaluate` measures only them again."""
    config = EvalConfig(**{**Results.load(directory).document["config"], "out": str(directory)})
    for cell in Path(directory).glob("cells/*.json"):
        if "one_level" in json.loads(cell.read_text(encoding="utf-8")):
            cell.unlink()
    return config


def _load(config: EvalConfig, request: EvalRequest) -> tuple[list[Suite], LoadedPair, list[Remark]]:
    """Read the prompts, which is cheap, then the models, then check that all of it fits together."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    suites = load_suites(
        request.id_sets, request.ood_sets, tokenizer, prompt_tokens=config.prompt_tokens, limit=config.max_prompts
    )
    pair = load_pair(
        config.target,
        request.drafts,
        quantize=config.quantize,
        quantize_draft=config.quantize_draft,
        tokenizer=tokenizer,
        heterogeneous_vocab=config.heterogeneous_vocab,
        **loading(config),
    )
    take_over(pair.target, *pair.drafts.values())
    for name, draft in pair.drafts.items():
        try:
            for method in request.methods:
                decoder_of(pair.target, draft, method)
        except ValueError as error:
            raise InputError(f"--draft {name}: {error}") from None
    suites = fit(suites, config.max_new_tokens, pair.context)
    prompts = [prompt.ids for suite in suites for prompt in suite.prompts]
    for name, draft in pair.drafts.items():
        if isinstance(draft, PreTrainedModel) and (words := vocabulary_map(draft)) is not None:
            say(f"eval: draft {name} has another tokenizer: of the prompts {words.coverage(prompts)}")
    if cut := [suite.name for suite in suites if suite.more]:
        say(f"eval: {', '.join(cut)}: using the first {config.max_prompts} rows (--max_prompts)")
    notes = remarks.of_prompts(suites) + remarks.of_training(request.drafts, suites)
    return suites, pair, announce(notes, strict=config.strict)


def _with_sampling_of(target: PreTrainedModel, config: EvalConfig) -> EvalConfig:
    """Fill top_k, top_p and min_p, if left open, from the target's generation config."""
    options = {**sampling_options(config), "temperature": max(config.temperature)}
    resolved = resolve_sampling(config.target, target, **options)
    if resolved.note:
        say(f"eval: {resolved.note}")
    sampling = resolved.sampling
    return replace(config, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def track(config: EvalConfig, results: Results) -> None:
    """Log the results to the tracker, if there is one; the same evaluation again is the same W&B run."""
    if config.tracker == "none":
        return
    import wandb

    document, out = results.document, results.directory
    models = {
        name: {key: row[key] for key in ("name", "kind", "fingerprint", "parameters", "dtype", "quantize")}
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
            run.log({f"figures/{png.stem}": wandb.Image(str(png)) for png in sorted((out / "plots").glob("*.png"))})


def figures(results: Results) -> dict[str, float]:
    """Every figure under one flat name, such as `alpha/mine/prose/T1` or `tau/mine/ood/T0/chain:4/speculative`.

    Figures that are not defined are left out.
    """
    named: dict[str, float] = {}
    for row in results.rows("alpha", "gain", "tau", "speedup", "transfer"):
        words = (row["figure"], row["draft"], row["domain"], f"T{row['temperature']:g}", row["tree"], row["verifier"])
        if row["value"] is not None:
            named["/".join(filter(None, words))] = row["value"]
    return named
