"""The command `distill`: a distilled set from prompts."""

import atexit
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.core import options
from draftsmith.core.distilled_sets import described
from draftsmith.core.errors import without_secrets
from draftsmith.core.hub import check_push, pushed
from draftsmith.core.io import JsonObject, hash_json, write_text_atomic
from draftsmith.core.launcher import join_processes, leave_processes
from draftsmith.core.options import command_line, configured
from draftsmith.core.prompts import PromptReader
from draftsmith.core.ranks import on_main, say
from draftsmith.core.runs import Run
from draftsmith.core.settings import tokenizing
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import load_tokenizer, tokenizer_digest
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.conversations import switch_thinking_off
from draftsmith.distill.engines import ENGINES
from draftsmith.distill.filters import Suites
from draftsmith.distill.manifest import kept_date, make_set, write_manifest
from draftsmith.distill.own_prompts import draw_prompts, find_openings
from draftsmith.distill.part_maker import Job, make_parts
from draftsmith.distill.prompt_sources import StoredPrompts
from draftsmith.distill.states import check, complete

# Keys of the manifest that the summary repeats.
_SUMMARY = ["response_tokens", "tokens_from", "own_prompts"]
_SUMMARY += ["skipped_because", "failed_because", "shortened_because", "dropped_because"]


def distill(
    config: DistillConfig | None = None, command: str | None = None, **options: Any
) -> JsonObject:
    """Make the distilled set, or resume one that a killed run left; return its summary.

    command: the command line to record, by default the one of `config`. Raise InputError for
    invalid input and RunError for failures of the run.
    """
    config = configured(DistillConfig, config, options)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    with Run(config.out) as run:
        join_processes(config.device, config)
        tokenizer = load_tokenizer(config.target, **tokenizing(config))
        if config.thinking == "drop":
            switch_thinking_off(tokenizer)
        date = fix_date(tokenizer, config.date, kept_date(run.out))
        if date is not None:
            say(f"distill: the chat template prints the date; in this set it is {date}")
        with closing(ENGINES[config.engine](config, tokenizer)) as engine:
            job = Job(config, engine, tokenizer, date)
            if engine.states is not None:
                check(config, engine)
            summary = _distill(job, run, command or command_line("distill", config))
            atexit.register(leave_processes)
            return summary


def _distill(job: Job, run: Run, command: str) -> JsonObject:
    config = job.config
    engine = job.engine
    tokenizer = job.tokenizer
    out = run.out
    reader = PromptReader(
        config.prompts,
        tokenizer,
        config.domain,
        config.prompt_tokens,
        max_tokens=engine.max_prompt_tokens,
        whole_chats=config.turns == "last",
    )
    suites = Suites(config.decontaminate) if config.decontaminate else None
    prompts = StoredPrompts(config, config.prompts, reader, suites)
    openings = find_openings(config, engine, tokenizer)
    if openings is None:
        prompts.check_usable()

    def make() -> int:
        source = prompts
        if config.thinking == "drop":
            template = str(tokenizer.chat_template)
            on_main(lambda: write_text_atomic(out / "chat_template.jinja", template))
        if openings is not None:
            drawn = str(draw_prompts(job, openings, run))
            source = StoredPrompts(config, drawn, replace(reader, source=drawn), suites)
        return make_parts(job, source, out, "distill")

    manifest = make_set(
        run,
        command,
        _identity(job, suites),
        make,
        tokenizer=tokenizer,
        inputs=options.known_by_content(config),
    )
    states = None
    if engine.states is not None:
        # What an earlier run was killed before it wrote, or was not asked for.
        states = complete(config, engine, [out])
        manifest["states"] = states["measured"]
        on_main(lambda: write_manifest(out, manifest))
    return {
        "out": config.out,
        **manifest["counts"],
        **{key: manifest[key] for key in _SUMMARY},
        "states": states,
        "texts": described(manifest),
        "sampling": engine.sampling.sampling.record(),
        "sampling_from_target": engine.sampling.note,
        **pushed(out, config.push_to_hub, "dataset"),
    }


def _identity(job: Job, suites: Suites | None) -> JsonObject:
    config = job.config
    choices = options.identity(config) | job.engine.sampling.sampling.record()
    # A chat template counts by its content, not by the name of its file.
    del choices["chat_template"]
    template = job.tokenizer.chat_template
    identity = {
        "config": choices,
        # The parts know the rows of a file, wherever it lies.
        "prompts": None if Path(config.prompts).is_file() else without_secrets(config.prompts),
        **job.engine.identity,
        "chat_template": hash_json(template)[:16] if template else None,
        "tokenizer": tokenizer_digest(job.tokenizer),
    }
    if job.engine.identity["target_fingerprint"] is None:
        # A server does not show its weights.
        identity["target"] = config.target
    if job.date is not None:
        identity["date"] = job.date
    if suites is not None:
        identity["decontaminated"] = suites.digest
    return identity
