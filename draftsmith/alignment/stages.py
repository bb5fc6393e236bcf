"""Align a draft: distil, train, evaluate and report, through the functions that the commands
call.
"""

import dataclasses
import gc
import json
import math
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.alignment.choices import complete, filled
from draftsmith.alignment.config import BEGUN_BY, AlignConfig, seconds_of
from draftsmith.alignment.engines import in_words as engines_in_words
from draftsmith.alignment.facts import Facts, load, look
from draftsmith.alignment.forecast import (
    StepTimes,
    expected,
    pays,
    short_evaluation,
    step_costs,
    time_steps,
    untrained,
)
from draftsmith.alignment.prompt_split import check_unchanged, hold_out
from draftsmith.alignment.reuse import as_earlier, check_same, copy_answers, earlier_run
from draftsmith.alignment.stage_configs import Stages, expected_training, given, stages_of
from draftsmith.alignment.summary import best_draft
from draftsmith.alignment.time_budget import bought, within
from draftsmith.alignment.weights_type import with_type
from draftsmith.config import InitConfig
from draftsmith.core.command_line import check_file
from draftsmith.core.errors import InputError, without_secrets
from draftsmith.core.hub import check_push, pushed
from draftsmith.core.io import JsonObject, read_json, write_json_atomic, write_text_atomic
from draftsmith.core.launcher import as_typed, join_processes
from draftsmith.core.models import experts_per_token
from draftsmith.core.options import command_line, configured, options_of, value_at
from draftsmith.core.progress import waiting
from draftsmith.core.prompts import PromptSet
from draftsmith.core.ranks import from_each, from_main, on_main, say, with_target
from draftsmith.core.runs import Run
from draftsmith.core.settings import LARGE, loading
from draftsmith.core.template_date import fix_date
from draftsmith.distill.generate import distill
from draftsmith.drafts.cards import add_results
from draftsmith.eval.decision import decide
from draftsmith.eval.evaluate import evaluate
from draftsmith.eval.remarks import ENOUGH
from draftsmith.eval.request import check
from draftsmith.eval.results import Results
from draftsmith.starting import in_words, made
from draftsmith.train import memory
from draftsmith.train.training_run import train

# What steps took when the run began, for the forecast of a run that goes on.
_TIMES = "step_times.json"
_SHORTER = "; shorter by the option beside it, or all by --time_budget 30m"


def align(config: AlignConfig | None = None, **options: Any) -> Results:
    """Distil, train, evaluate and report; return the results. Choose and print what is left open.

    Everything is under `config.out`: align.yaml (the options with nothing left open), prompts/,
    distilled/, one checkpoint per objective, eval/. Every stage resumes what a killed run left. Of
    several processes all generate, train and evaluate. Raise InputError for bad input, RunError for
    a run that failed.
    """
    config = configured(AlignConfig, config, options)
    return run_stages(config)[1]


def run_stages(config: AlignConfig, command: str | None = None) -> tuple[AlignConfig, Results]:
    """Do what `align` does; return also the options with nothing left open. command: as typed."""
    began = time.monotonic()
    out = config.directory
    command = command or command_line("align", config)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    join_processes(config.device, config)
    with Run(out) as run:
        run.begin()
        config = from_main(partial(_started, config, run))
        config, stages = _settle(config, command, began)
        say(f"\n1/3 distil: {config.target} answers {stages.distill.prompts}")
        distill(stages.distill)
        if stages.general is not None:
            kind = "chats" if config.distill.general_from == "magpie" else "texts"
            say(
                f"{config.target} writes {config.distill.general_texts} {kind} by itself, to "
                "be replayed"
            )
            for line in left_out_of(distill(stages.general)):
                say(line)
        for name, training in stages.training.items():
            why = ""
            if training.replay:
                why = f", {training.steps} steps: as many answers, beside the replayed text"
            say(f"\n2/3 train: {name} ({training.objective}{why})")
            train(training)
            _free()
        on_main(lambda: shutil.rmtree(out / "features", ignore_errors=True))
        say("\n3/3 evaluate")
        config, results = _evaluated(config, command)
        for name in stages.training:
            on_main(partial(add_results, out / name, out / "eval" / "results.json", name))
        # A finished run has no clock in its files.
        on_main(partial((out / _TIMES).unlink, missing_ok=True))
        for url in pushed(out / best_draft(config, results), config.push_to_hub, "model").values():
            say(f"uploaded: {url}")
    return config, results


def _evaluated(config: AlignConfig, command: str) -> tuple[AlignConfig, Results]:
    """Evaluate the acceptance of drafts that cannot pay by what training says, on few prompts;
    return also the options of that. Evaluate all, if their acceptance says otherwise.
    """
    if short := from_main(lambda: short_evaluation(config, _times(config))):
        say(f"only acceptance is measured, on {short.eval.max_prompts} prompts")
        results = evaluate(stages_of(short).evaluation)
        if decide(results).verdict == "rejected":
            changed = ("eval.tree", "eval.speed_prompts", "eval.max_prompts")
            on_main(lambda: _rewrite(config.file, short, changed, command))
            return short, results
        say("on the target's own texts a draft may pay: all is measured")
    return config, evaluate(stages_of(config).evaluation)


def _times(config: AlignConfig) -> StepTimes | None:
    """Return what steps took when the run began; None if it is finished."""
    file = config.directory / _TIMES
    return StepTimes(**read_json(file, "the times of steps")) if file.is_file() else None


def left_out_of(general: JsonObject) -> list[str]:
    """Say why fewer texts are replayed than the target wrote."""
    reasons = [*general["skipped_because"], *general["failed_because"]]
    written = general["prompts_read"]
    kept = general["rows"]
    if own := general["own_prompts"]:
        reasons = [*own["left_out_because"], *reasons]
        written = own["drawn"]
    if kept == written:
        return []
    return [f"{kept} of {written} are replayed; {'; '.join(reasons)}"]


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def _settle(config: AlignConfig, command: str, began: float) -> tuple[AlignConfig, Stages]:
    """Return the options with nothing left open, from align.yaml if a run began here, and those of
    the stages. began: when the command did, for its budget.
    """
    if not from_main(config.file.exists):
        begun = with_target(partial(_begin, config, command, began))
        _free()
        return begun
    return from_main(partial(_continued, config, command))


def _continued(config: AlignConfig, command: str) -> tuple[AlignConfig, Stages]:
    whole = _resumed(config, config.file, command)
    check_unchanged(config.prompts, config.directory / "prompts")
    say(f"{config.file}: continuing what was begun here")
    if times := _times(config):
        # Its answers are what they were to be.
        say(f"of the whole run, {expected(times.of_stages(whole), fixed=['distil'])}")
    return whole, stages_of(whole)


def _begin(config: AlignConfig, command: str, began: float) -> tuple[AlignConfig, Stages]:
    """Choose what is left open, hold out prompts, and write align.yaml."""
    earlier = None if config.distilled is None else earlier_run(config.distilled)
    if earlier is not None:
        config = as_earlier(config, earlier)
    # Before the models are loaded, only what does not fit is said.
    size, *too_large = memory.in_words(expected_training(config)) or [""]
    if too_large:
        say(f"{size}\n{too_large[0]}")
    with waiting("align: reads the target and the prompts"):
        models = load(config)
        config = replace(config, date=fix_date(models.tokenizer, config.date))
        facts, prompts = look(config, models)
    if config.date is not None:
        say(f"the chat template prints the date; in this run it is {config.date}")
    usual, _ = complete(config, facts)
    # Refuse now what a later stage would refuse, before anything is written.
    stages = stages_of(usual)
    check(stages.evaluation)
    if size and not too_large:
        say(size)
    if earlier is not None:
        check_same(usual, earlier, models.target)
    ids = [prompt.ids for prompt in prompts.prompts]
    asked = config.dtype
    config = with_type(config, models.target, ids)
    with waiting("align: times some steps of each stage"):
        if config.dtype not in (asked, "float32"):
            models = load(config)
        draft = untrained(models, stages)
        costs = step_costs(models, draft, ids[0], stages.evaluation.temperature)
        times = time_steps(stages, models, draft, ids, costs)
    if earlier is not None and earlier.distill == usual.distill:
        times = replace(times, answer_s=0.0)
    if config.eval.tree is not None or config.eval.speed_prompts is not None:
        # What was asked for is decoded, whatever the draft.
        times = replace(times, pays_from=None)
    # Processes that hold the target together choose by the clock of the first.
    costs, times, spent_s = from_each(lambda: (costs, times, time.monotonic() - began))[0]
    budget_s = math.inf if config.time_budget is None else seconds_of(config.time_budget)
    whole, chosen = within(config, facts, times.of_stages, budget_s, spent_s)
    stages = stages_of(whole)
    on_main(partial(_divide, config, prompts, whole.heldout_prompts))
    say(expected(times.of_stages(whole)) + ("" if config.time_budget else _SHORTER))
    if config.time_budget is not None:
        say(bought(config, facts, times.of_stages, whole, spent_s))
    prompts.say_skipped()
    for line in _plan(whole, facts, stages):
        say(line)
    if costs:
        say(pays(costs, mixture=experts_per_token(models.target) > 0))
    on_main(partial(_write_chosen, command, whole, chosen, times))
    return whole, stages


def _divide(config: AlignConfig, prompts: PromptSet, heldout: int | None) -> None:
    """Hold out prompts, or take those that the run of --distilled held out. config: as given."""
    if config.distilled is not None:
        copy_answers(config)
    elif heldout is not None:
        hold_out(config.prompts, prompts, heldout, config.directory / "prompts")
    asked = config.eval.max_prompts or 0
    if heldout is not None and asked > heldout:
        say(
            f"prompts: all {heldout} that are held out are measured; --heldout_prompts {asked} "
            "holds out more"
        )


def _write_chosen(
    command: str, config: AlignConfig, chosen: Sequence[str], times: StepTimes
) -> None:
    write_json_atomic(config.directory / _TIMES, dataclasses.asdict(times))
    head = (
        "# Every option of this run; `draftsmith align --config FILE --out DIR` runs it again.\n"
        f"{_begun_by(command)}# Chosen were:\n"
    )
    reasons = "".join(f"#   {line}\n" for line in chosen)
    _write(config.file, head + reasons, config)
    say(
        f"{config.file}: all options, {len(chosen)} chosen with their reasons; edit it and run it "
        "with --config and another --out"
    )


def _plan(config: AlignConfig, facts: Facts, stages: Stages) -> Iterator[str]:
    """Say what the run will do, and what it cannot show."""
    if config.heldout_prompts and min(config.heldout_prompts, facts.different) < ENOUGH:
        yield (
            f"prompts: {config.heldout_prompts} are held out to measure on, which shows that "
            f"the road works, not which draft is better; {5 * ENOUGH} hold out "
            f"{ENOUGH}, which can"
        )
    if facts.fresh_head:
        yield _fresh_head(config, facts)
    kind = next(iter(stages.training.values())).kind
    yield f"engines: {engines_in_words(facts.support, kind)}"
    answers = config.distill
    yield (
        f"distil: {answers.num_samples} answers to each of {answers.max_prompts} prompts, at most "
        f"{answers.max_new_tokens} tokens each"
    )
    steps = ", ".join(f"{name} {run.steps} steps" for name, run in stages.training.items())
    yield f"train: {steps} of {config.train.rows_per_step} rows"


def _begun_by(command: str) -> str:
    return f"{BEGUN_BY}{without_secrets(as_typed(command))}\n"


def _write(file: Path, comments: str, config: AlignConfig) -> None:
    options = yaml.safe_dump(_shown(config), sort_keys=False, width=1000)
    write_text_atomic(file, comments + options)


def _fresh_head(config: AlignConfig, facts: Facts) -> str:
    """Say which head is made, and why no language model."""
    if config.kind not in ("eagle", "eagle3"):
        return f"draft: a fresh {config.kind} head; --init or --draft start a language model"
    head = "EAGLE head"
    size = config.train.draft_vocab_size
    if size is not None:
        head = f"EAGLE-3 head that drafts {size:,} of {facts.vocabulary:,} tokens"
        if facts.drafted is not None:
            head += f" (the others have {facts.drafted.missing:.1%} of the target's mass)"
    projection = facts.projection_share * (size or facts.vocabulary) / facts.vocabulary
    cost = facts.draft_parameters / facts.target_read + projection
    least = facts.layer_share + facts.projection_share
    return (
        f"draft: a fresh {head}: it reads {cost:.0%} of the target per token, one pruned layer "
        f"with the whole vocabulary {least:.0%}; --init or --draft start a language model"
    )


def _started(config: AlignConfig, run: Run) -> AlignConfig:
    """With --init, make the draft in OUT/start and return options that name it."""
    if config.init is None:
        return config
    start = run.out / "start"
    if not start.exists():
        say(f"init: {config.init} makes {start}")
        options = InitConfig(
            method=config.init,
            out=str(start),
            target=config.target,
            prompts=config.prompts,
            prompt_tokens=config.prompt_tokens,
            seed=config.seed,
            chat_template=config.chat_template,
            **{key: value for key, value in loading(config).items() if key not in LARGE},
        )
        with waiting("align: makes the draft"):
            summary = made(options, config.train.draft_vocab_size)
        for line in in_words(summary):
            say(line)
        _free()
    return replace(config, draft=str(start), init=None)


def _resumed(config: AlignConfig, file: Path, command: str) -> AlignConfig:
    """Return the options of the run that began here, with fewer steps and, before the evaluation,
    its options as they are given now. Raise InputError if another one differs.
    """
    check_file(AlignConfig, file)
    begun = AlignConfig(**yaml.safe_load(file.read_text(encoding="utf-8")))
    recorded = _shown(begun)
    given = _shown(config)
    taken: JsonObject = {}
    changed: dict[str, str] = {}
    evaluated = (file.parent / "eval").exists()
    for option in options_of(AlignConfig):
        key = option.key
        then = value_at(recorded, key)
        now: Any = value_at(given, key)
        is_open = key.startswith("eval.") and not evaluated
        if not (option.identity or "." in key or key == "date"):
            # What was moved is told by its content where it is read. The file has no passwords of
            # URLs.
            if now or not option.by_content:
                taken[key] = getattr(config, key)
        elif now in (None, [], then) or (key, now) == ("dtype", "auto"):
            continue
        elif key == "train.steps" and now < then or is_open:
            begun = filled(begun, key, now)
            changed[key] = f"{key}: {json.dumps(now)} in place of {json.dumps(then)}"
        else:
            raise InputError(
                f"--out {file.parent}: was begun with other options: {key} is "
                f"{json.dumps(then)}, now it is {json.dumps(now)}; name another --out, to which "
                f"--config {file} gives the other options"
            )
    if changed:
        _rewrite(file, begun, changed, command)
        say("; ".join(changed.values()))
    if config.draft == str(Path(begun.out) / "start"):
        taken["draft"] = str(file.parent / "start")
    return replace(begun, **taken)


def _rewrite(file: Path, config: AlignConfig, changed: Collection[str], command: str) -> None:
    """Replace the values of some options, drop the reasons of the old values, and write the command
    that continues the run.
    """
    old = (BEGUN_BY, *(f"#   {key} " for key in changed))
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    notes = [line for line in lines if line.startswith("#") and not line.startswith(old)]
    notes.insert(1, _begun_by(command))
    _write(file, "".join(notes), config)


def _shown(config: AlignConfig) -> JsonObject:
    """Return the options as align.yaml has them: without secrets, and what is open in no group."""
    shown = without_secrets(dataclasses.asdict(config))
    groups = {key: given(value) for key, value in shown.items() if isinstance(value, dict)}
    return shown | groups
