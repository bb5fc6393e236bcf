"""`draftsmith decode`: one prompt to the terminal, or many to a file."""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode import Batch, Generation, Stop, stop_at
from decode.engine import OnTokens
from draftsmith.cli.decode_setup import DecodeConfig, Setup, set_up
from draftsmith.cli.decode_summary import Output, in_words, summarise
from draftsmith.cli.method_table import terminal
from draftsmith.cli.output import finish
from draftsmith.cli.token_stream import Stream
from draftsmith_core.errors import InputError
from draftsmith_core.io import canonical_json, hash_json, make_dir, write_text_atomic
from draftsmith_core.models import context_length, eos_ids
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process
from draftsmith_core.progress import progress
from draftsmith_core.prompts import Prompt, PromptSet, read_prompts
from draftsmith_core.sampling import generator, row_seed
from draftsmith_core.tokenization import Tokenizer, decode_text, encode_text

# What cannot change the outputs but by rounding, or is in the identity by its content.
_NOT_IDENTITY = ("out", "device", "fast", "target", "draft", "proposer", "tree", "verifier", "datastore", "prompts")


@dataclass(frozen=True)
class Job:
    """One output to make."""

    prompt: Prompt
    sample_index: int


@dataclass(frozen=True)
class Task:
    """Everything that a batch of jobs needs."""

    config: DecodeConfig
    setup: Setup
    eos: tuple[int, ...]
    stop: Stop | None


def run(argv: list[str]) -> None:
    """Decode."""
    try:
        config, as_json = parse(DecodeConfig, "decode", argv)
    except SystemExit:
        if "-h" in argv or "--help" in argv:
            print("\n" + terminal(shutil.get_terminal_size().columns))
        raise
    require_single_process("decode")
    setup = set_up(config)
    if not setup.lossless and setup.choice is not None:
        print(
            f"draftsmith decode: warning: verifier {setup.choice.verifier} is lossy; "
            f"above temperature 0 the outputs do not follow the target's law",
            file=sys.stderr,
        )
    prompts = _prompts(config, setup)
    jobs = [Job(p, k) for p in prompts.prompts for k in range(config.num_samples)]
    eos = () if config.ignore_eos else eos_ids(setup.target)
    task = Task(config, setup, eos, stop_at(setup.tokenizer, config.stop) if config.stop else None)
    show = config.prompt is not None and config.out is None and config.num_samples == 1
    if config.out is not None:
        options = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_IDENTITY}
        outputs = _to_file(Path(config.out), hash_json([options, prompts.digest, setup.identity()]), task, jobs)
    elif show:
        outputs = _to_terminal(task, jobs)
    else:
        outputs = list(_outputs(task, jobs))
    summary = summarise(config, setup, prompts, outputs)
    finish(summary, in_words(summary, show), as_json)


def _prompts(config: DecodeConfig, setup: Setup) -> PromptSet:
    limits = [context_length(model) for model in setup.models]
    room = min((limit for limit in limits if limit is not None), default=None)
    longest = None if room is None else room - config.max_new_tokens
    if longest is not None and longest < 1:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leaves no room in a context of {room}")
    if config.prompts is not None:
        return read_prompts(
            config.prompts,
            setup.tokenizer,
            prompt_tokens=config.prompt_tokens,
            max_tokens=longest,
            limit=config.max_prompts,
        )
    assert config.prompt is not None
    ids = encode_text(setup.tokenizer, config.prompt)
    if not ids:
        raise InputError("--prompt: is empty and the tokenizer adds no BOS; write some text")
    if longest is not None and len(ids) > longest:
        raise InputError(f"--prompt: has {len(ids)} tokens, more than the {longest} that fit")
    return PromptSet("--prompt", (Prompt("prompt", "default", tuple(ids)),), (), 1)


def _outputs(task: Task, jobs: list[Job], finished: int = 0) -> Iterator[Output]:
    """Outputs of all jobs from `finished` on, in order, batch by batch."""
    size = task.config.batch_size
    with progress("decode", len(jobs), finished) as advance:
        for start in range(finished, len(jobs), size):
            batch_jobs = jobs[start : start + size]
            yield from _decode(task, batch_jobs)
            advance(len(batch_jobs), "")


def _decode(task: Task, jobs: list[Job], on_tokens: OnTokens | None = None) -> Iterator[Output]:
    """Outputs of one batch."""
    ends = [0.0] * len(jobs)

    def note(row: int, ids: list[int], from_draft: list[bool]) -> None:
        ends[row] = time.perf_counter()
        if on_tokens is not None:
            on_tokens(row, ids, from_draft)

    began = time.perf_counter()
    batch = task.setup.decoder.generate(
        [job.prompt.ids for job in jobs],
        task.config.sampling(),
        task.config.max_new_tokens,
        [generator(row_seed(task.config.seed, f"{j.prompt.id}/{j.sample_index}")) for j in jobs],
        task.eos,
        note,
        task.stop,
    )
    for job, generation, end in zip(jobs, batch.generations, ends, strict=True):
        yield _output(job, generation, batch, end - began - batch.prefill_s, task.setup.tokenizer)


def _output(job: Job, generation: Generation, batch: Batch, waited_s: float, tokenizer: Tokenizer) -> Output:
    """An output with the row of the command contract. `seconds` is the batch's wall clock shared evenly."""
    rows = len(batch.generations)
    row = {
        "id": job.prompt.id,
        "sample_index": job.sample_index,
        "prompt_ids": list(job.prompt.ids),
        "output_ids": generation.output_ids,
        "text": decode_text(tokenizer, generation.output_ids),
        "finish_reason": generation.finish_reason,
        "stats": {
            "target_calls": generation.stats.target_calls,
            "proposed": generation.stats.proposed,
            "accepted": generation.stats.accepted,
            "accepted_by_depth": list(generation.stats.accepted_by_depth),
            "seconds": (batch.prefill_s + batch.decode_s) / rows,
        },
    }
    return Output(row, generation.stats, batch.prefill_s / rows, waited_s)


def _to_file(out: Path, identity: str, task: Task, jobs: list[Job]) -> list[Output]:
    """Outputs go to `.OUT.partial` batch by batch; their rows become OUT at the end. A killed run continues it."""
    make_dir(out.parent, "--out")
    partial = out.with_name(f".{out.name}.partial")
    outputs = _finished(partial, identity, task.config.batch_size)
    head = canonical_json({"identity": identity}) + "\n"
    write_text_atomic(partial, head + _jsonl([output.to_json() for output in outputs]))
    with partial.open("a", encoding="utf-8") as file:
        for output in _outputs(task, jobs, len(outputs)):
            outputs.append(output)
            file.write(_jsonl([output.to_json()]))
            file.flush()
    write_text_atomic(out, _jsonl([output.row for output in outputs]))
    partial.unlink()
    return outputs


def _jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _finished(partial: Path, identity: str, batch_size: int) -> list[Output]:
    """Outputs of whole batches that an interrupted run of the same command left."""
    if not partial.exists():
        return []
    lines = partial.read_text(encoding="utf-8", errors="replace").split("\n")
    if lines[0] != canonical_json({"identity": identity}):
        return []
    outputs = [Output.from_json(json.loads(line)) for line in lines[1:-1]]
    return outputs[: len(outputs) // batch_size * batch_size]


def _to_terminal(task: Task, jobs: list[Job]) -> list[Output]:
    stream = Stream(task.setup.tokenizer, sys.stdout)
    outputs = list(_decode(task, jobs, lambda _, ids, from_draft: stream.add(ids, from_draft)))
    stream.close()
    return outputs
