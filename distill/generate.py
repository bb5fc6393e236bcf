"""A distilled set from prompts: rows in a fixed order, cut into parts, each part written whole or not at all.

The order of rows, the parts and the batches depend on the options alone, not on the number of processes or on how often
they were killed, so the files come out byte for byte the same.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distill.config import DistillConfig
from distill.engines import ENGINES, AnswerRequest, Engine
from draftsmith_core.cards import distilled_set_card
from draftsmith_core.errors import InputError
from draftsmith_core.hub import check_push, pushed
from draftsmith_core.io import (
    atomic_file,
    canonical_json,
    hash_json,
    sha256_file,
    write_json_atomic,
    write_text_atomic,
    writing,
)
from draftsmith_core.processes import join_processes, on_main, terminable
from draftsmith_core.progress import progress
from draftsmith_core.prompts import Prompt, PromptSet, read_prompts, skip_reasons
from draftsmith_core.provenance import command_line, provenance
from draftsmith_core.run_directory import claim, hold, keeping
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import load_tokenizer, vocabulary_sample

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("finish_reason", pa.string()),
        pa.field("seed", pa.int64()),
        pa.field("sample_index", pa.int32()),
    ]
)
# Beside each response token, when `teacher_top_k` asks for them.
TEACHER = [
    pa.field("top_ids", pa.list_(pa.list_(pa.int32()))),
    pa.field("top_logprobs", pa.list_(pa.list_(pa.float32()))),
    pa.field("tail_mass", pa.list_(pa.float32())),
]
# `manifest.json` of a finished set, `run.json` of one in the making.
_RECORDS = ("manifest.json", "run.json")
# Options that change where the work is done and written, not the rows.
_NOT_IDENTITY = ("out", "device", "push_to_hub")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the set to make. `seed` follows from the seed of the run, the prompt and the sample."""

    id: str
    prompt: Prompt
    sample_index: int
    seed: int


def distill(config: DistillConfig, command: str | None = None) -> dict[str, Any]:
    """Make the distilled set, continuing what a killed run left; returns its summary.

    command: the command line to record; without one, the one that asks for `config`. Raises InputError, and RunError
    for what fails while running. SIGTERM ends it with Terminated and Ctrl-C with KeyboardInterrupt; whole parts stay.
    """
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)
    with terminable(), keeping(lambda: any(Path(config.out).glob("part-*.parquet"))):
        summary = _distill(config, command or command_line("distill", config))
    return summary | pushed(Path(config.out), config.push_to_hub, "dataset")


def _distill(config: DistillConfig, command: str) -> dict[str, Any]:
    processes = join_processes(config.device)
    out = Path(config.out)
    if not config.out.strip() or out.is_file():
        raise InputError(f"--out {config.out!r}: is {'a file' if config.out else 'empty'}; name a directory")
    tokenizer = load_tokenizer(config.target, config.trust_remote_code)
    engine: Engine = ENGINES[config.engine](config, tokenizer)
    if engine.max_prompt_tokens is not None and engine.max_prompt_tokens < 1:
        raise InputError(f"max_new_tokens: {config.max_new_tokens} leaves no room for a prompt in the target's context")
    prompts = read_prompts(
        config.prompts,
        tokenizer,
        domain=config.domain,
        prompt_tokens=config.prompt_tokens,
        max_tokens=engine.max_prompt_tokens,
        limit=config.max_prompts,
    )
    rows = plan_rows(prompts, config)
    parts = [rows[i : i + config.part_rows] for i in range(0, len(rows), config.part_rows)]
    sampling = dataclasses.asdict(engine.sampling.sampling)
    if not sampling["min_p"]:
        del sampling["min_p"]  # sets that were made before there was the option have no such key
    options = dataclasses.asdict(config)
    del options["min_p"]
    identity = {
        "config": {k: v for k, v in (options | sampling).items() if k not in _NOT_IDENTITY},
        "target_fingerprint": engine.fingerprint,
        "target_dtype": engine.dtype,
        "prompts_digest": prompts.digest,
    }
    with hold(out):
        on_main(lambda: _claim(out, identity))
        _write_parts(out, parts, engine, config, processes.process_index, processes.num_processes)
        processes.wait_for_everyone()
        manifest = _manifest(out, parts, prompts, identity, command)
        manifest["vocabulary"] = vocabulary_sample(tokenizer)
        if processes.is_main_process:
            with writing(out / "manifest.json"):
                write_text_atomic(out / "README.md", distilled_set_card(manifest))
                write_json_atomic(out / "manifest.json", manifest)
                (out / "run.json").unlink(missing_ok=True)
        processes.wait_for_everyone()
    return {
        "out": str(out),
        **manifest["counts"],
        "response_tokens": manifest["response_tokens"],
        "skipped_because": skip_reasons(prompts.skipped),
        "sampling": dataclasses.asdict(engine.sampling.sampling),
        "sampling_from_target": engine.sampling.note,
    }


def plan_rows(prompts: PromptSet, config: DistillConfig) -> list[Row]:
    """Every (prompt, sample) in the order in which they are written."""
    rows = []
    for prompt in prompts.prompts:
        for index in range(config.num_samples):
            content = canonical_json([prompt.id, list(prompt.ids), index])
            row_id = hashlib.sha256(content.encode()).hexdigest()[:16]
            rows.append(Row(row_id, prompt, index, row_seed(config.seed, f"{prompt.id}/{index}")))
    return rows


def part_name(index: int) -> str:
    """File name of a part."""
    return f"part-{index:05d}.parquet"


def _claim(out: Path, identity: dict[str, Any]) -> None:
    """Make `out` this run's own, or make sure it is; InputError names what differs."""
    if not any((out / name).exists() for name in _RECORDS):
        for other in ("part-*.parquet", "README.md", "config.json"):  # a set's, written over; a model's, mixed up
            if found := next(out.glob(other), None):
                raise InputError(f"--out {out}: holds {found.name} of something else; choose another --out")
    claim(out, identity, what="distilled set", records=_RECORDS)


def _write_parts(
    out: Path, parts: list[list[Row]], engine: Engine, config: DistillConfig, process: int, processes: int
) -> None:
    k = config.teacher_top_k
    schema = pa.schema([*SCHEMA, *TEACHER]) if k else SCHEMA
    mine = range(process, len(parts), processes)
    finished = sum(len(parts[i]) for i in mine if (out / part_name(i)).exists())
    with progress("distill", sum(len(parts[i]) for i in mine), finished) as advance:
        for index in mine:
            path = out / part_name(index)
            if path.exists():
                continue
            columns: dict[str, list[Any]] = {name: [] for name in schema.names}
            for start in range(0, len(parts[index]), config.batch_size):
                rows = parts[index][start : start + config.batch_size]
                requests = [AnswerRequest(row.prompt.ids, row.seed) for row in rows]
                responses = engine.generate(requests)
                for row, request, response in zip(rows, requests, responses, strict=True):
                    columns["id"].append(row.id)
                    columns["domain"].append(row.prompt.domain)
                    columns["prompt_ids"].append(row.prompt.ids)
                    columns["response_ids"].append(response.response_ids)
                    columns["finish_reason"].append(response.finish_reason)
                    columns["seed"].append(row.seed)
                    columns["sample_index"].append(row.sample_index)
                    if k:
                        for name, values in vars(engine.score(request, response, k)).items():
                            columns[name].append(values)
                advance(len(rows), "")
            with writing(path), atomic_file(path) as temporary:
                pq.write_table(pa.table(columns, schema=schema), temporary)


def _manifest(
    out: Path, parts: list[list[Row]], prompts: PromptSet, identity: dict[str, Any], command: str
) -> dict[str, Any]:
    files = []
    tokens = stopped = done = 0
    for index in range(len(parts)):
        path = out / part_name(index)
        try:
            table = pq.read_table(path, columns=["response_ids", "finish_reason"])
        except (OSError, pa.ArrowException):
            raise InputError(f"{path}: was damaged after it was written; delete it and run the command again") from None
        part_tokens = sum(map(len, table["response_ids"].to_pylist()))
        stopped += table["finish_reason"].to_pylist().count("stop")
        tokens += part_tokens
        done += len(table)
        files.append({"file": path.name, "rows": len(table), "sha256": sha256_file(path)})
    made = done // max(1, identity["config"]["num_samples"])
    return {
        "format": "draftsmith distilled set",
        "version": 1,
        "complete": True,
        "parts": files,
        "counts": {
            "prompts_read": prompts.rows,
            "prompts_done": made,
            "prompts_skipped": len(prompts.skipped),
            "prompts_failed": prompts.rows - made - len(prompts.skipped),
            "rows": done,
        },
        "skipped": [dataclasses.asdict(skip) for skip in prompts.skipped],
        "finish_reasons": {"stop": stopped, "length": done - stopped},
        "response_tokens": tokens,
        "digest": hash_json([file["sha256"] for file in files]),
        "identity": identity,
        **provenance(command, identity["config"]),
    }
