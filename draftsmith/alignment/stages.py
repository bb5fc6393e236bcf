"""Align a draft: look, choose, write a file per stage, and run the stages by the functions that the
commands call.
"""

import gc
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.alignment.choices import choose, shared
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.facts import look
from draftsmith.alignment.stage_files import CONFIGS, Stage, files_of, relocate, stage_of
from draftsmith.core.errors import ChangedError, InputError, without_secrets
from draftsmith.core.io import refuse_foreign, sha256_file, write_rows
from draftsmith.core.launcher import as_typed, join_processes
from draftsmith.core.options import command_line, configured, identity, known_by_content
from draftsmith.core.progress import waiting
from draftsmith.core.prompt_rows import parse_named
from draftsmith.core.ranks import from_main, on_main, say, with_target
from draftsmith.core.records import difference, read_run
from draftsmith.core.runs import Run, claim
from draftsmith.core.settings import LARGE, loading
from draftsmith.distill.generate import distill
from draftsmith.drafts.cards import add_results
from draftsmith.eval.request import check
from draftsmith.eval.results import Results
from draftsmith.eval.run import evaluate
from draftsmith.init_run import init
from draftsmith.train.training_run import train


def align(config: AlignConfig | None = None, **options: Any) -> Results:
    """Distil, train, evaluate and report; return the results.

    Under `config.out`, distill.yaml, general.yaml (text to replay), train.yaml (one per draft) and
    eval.yaml are the options of the stages: what is open is chosen, and what is there already is
    read. Every stage resumes what a killed run left. Of several processes all generate, train and
    evaluate. Raise InputError for bad input, RunError for a run that failed.
    """
    config = configured(AlignConfig, config, options)
    return Results.load(run_stages(config, command_line("align", config))[-1].options.out)


def run_stages(config: AlignConfig, command: str, *, only_write: bool = False) -> list[Stage]:
    """Write the files of the stages and run them; return them. command: as typed."""
    join_processes(config.device, config)
    with Run(config.out) as run:
        run.lock()
        stages = _prepared(config, command)
        if only_write:
            return stages
        on_main(lambda: _delete(config, stages))
        for done, stage in enumerate(stages):
            run.progress("stages", done, len(stages))
            say(stage.command)
            try:
                _run(stage)
            except ChangedError as error:
                differs, _, _ = str(error).rpartition("; choose")
                raise InputError(
                    f"{stage.file}: has changed since it ran: {differs}; give --fresh {stage.name}"
                ) from None
            _free()
        on_main(partial(shutil.rmtree, config.directory / "features", ignore_errors=True))
        evaluation = stages[-1].options
        made = [stage.options.out for stage in stages]
        for draft in evaluation.draft:
            name, _, source = draft.partition("=")
            if source in made:
                on_main(partial(add_results, source, f"{evaluation.out}/results.json", name))
        run.finish("stages", len(stages))
    return stages


def _run(stage: Stage) -> None:
    if stage.name == "train":
        train(stage.options)
    elif stage.name == "eval":
        evaluate(stage.options)
    else:
        summary = distill(stage.options)
        for line in summary["skipped_because"] + summary["failed_because"]:
            say(line)


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def _prepared(config: AlignConfig, command: str) -> list[Stage]:
    """Return the stages with the options in their files; first write those that are missing."""
    if config.init is not None:
        config = from_main(lambda: _started(config))
    files = files_of(config)
    if from_main(lambda: all(file.is_file() for file in files.values())):
        on_main(lambda: _claim(config, command))
    else:
        with_target(lambda: _begin(config, command))
        _free()
    return from_main(lambda: [stage_of(name, file) for name, file in files.items()])


def _claim(config: AlignConfig, command: str) -> None:
    """Raise InputError if the directory is of a run with other options or prompts; let the files of
    this one name the places of now.
    """
    decides = identity(config) | loading(config)
    decides["draft"] = bool(config.draft)
    for sets in ("id", "ood"):
        decides[sets] = sorted(parse_named(sets, getattr(config, sets)))
    file = Path(config.prompts)
    decides["prompts"] = sha256_file(file) if file.is_file() else without_secrets(config.prompts)
    record = read_run(config.directory)
    if record and not difference(record["identity"]["config"], decides):
        relocate(config, record)
    # Whoever resumes does not delete again.
    again = re.sub(r" --fresh[ =]\w+", "", as_typed(command))
    claim(config.directory, "alignment", {"config": decides}, again, known_by_content(config))


def _begin(config: AlignConfig, command: str) -> None:
    """Look, choose, hold out prompts, and write the files that are missing."""
    with waiting("align: reads the target and the prompts"):
        facts, prompts = look(config)
    stages: list[Stage] = []
    for name, file in files_of(config).items():
        chosen = None
        if not file.is_file():
            chosen = choose(name, config, facts, stages[0].options if stages else None)
        stages.append(stage_of(name, file, chosen))
    check(stages[-1].options)

    def write() -> None:
        if not read_run(config.directory):
            sides = [f"prompts/{side}.jsonl" for side in facts.split]
            refuse_foreign(config.directory, ["features", *sides])
        _claim(config, command)
        for side, rows in facts.split.items():
            write_rows(config.directory / "prompts" / f"{side}.jsonl", rows)
        for stage in stages:
            stage.write()

    on_main(write)
    names = ", ".join(stage.file.name for stage in stages)
    say(f"{config.directory}: edit {names} to change what the stages do")
    if not config.id:
        prompts.say_skipped()


def _started(config: AlignConfig) -> AlignConfig:
    """Make the draft of --init in OUT/start; return options that name it."""
    start = config.directory / "start"
    if not start.exists():
        given = {key: value for key, value in shared(config).items() if key not in LARGE}
        init(method="prune", out=str(start), prompts=config.prompts, **given)
    return replace(config, draft=str(start), init=None)


def _delete(config: AlignConfig, stages: Sequence[Stage]) -> None:
    """Delete what the stage of --fresh and those after it made in this directory."""
    if config.fresh is None:
        return
    order = list(CONFIGS)
    again = order[order.index(config.fresh) :]
    for stage in stages:
        made = Path(stage.options.out)
        if stage.name in again and made.parent == config.directory and read_run(made):
            shutil.rmtree(made)
