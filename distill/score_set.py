"""The target's distributions for answers that are there already: one forward per row, no text is generated.

The parts of a set, or groups of consecutive rows of a file, are scored by all processes in turn and written whole or
not at all, so that a killed run continues, with the same bytes.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distill.manifest import SET_FORMAT, claim_set, finish
from distill.parts import SCHEMA, TEACHER, read_record, write_part
from distill.score import score
from distill.score_config import ScoreConfig
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json, read_json, sha256_file
from draftsmith_core.model_options import loading
from draftsmith_core.models import (
    check_tokenizer,
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    vocabulary_size,
)
from draftsmith_core.processes import join_processes, on_main, terminable, without_fsdp_variable
from draftsmith_core.progress import progress
from draftsmith_core.prompt_rows import Record, count_rows, digest_of, iterate_records, parse_record, text_of
from draftsmith_core.prompts import answered, content_id
from draftsmith_core.provenance import command_line
from draftsmith_core.run_directory import hold, keeping
from draftsmith_core.teacher_rows import COLUMN, bytes_per_token
from draftsmith_core.tokenization import Tokenizer, check_vocabulary, load_tokenizer, vocabulary_sample

# Rows with their number in the source, and the reason where a row cannot be scored.
Numbered = list[tuple[int, dict[str, Any] | str]]


@dataclass(frozen=True)
class _Source:
    """Where the answers are: what identifies them and how they were made, how many rows and tokens of answers they are
    (None: not known), and per part what identifies it and the function that reads it.
    """

    identity: dict[str, Any]
    config: dict[str, Any]
    rows: int | None
    tokens: int | None
    parts: Callable[[], Iterator[tuple[str, Callable[[], Numbered]]]]


def score_set(config: ScoreConfig, command: str | None = None) -> dict[str, Any]:
    """Write the scored set, continuing what a killed run left; returns its summary.

    command: the command line to record; without one, the one that asks for `config`. Raises InputError and RunError.
    """
    with terminable(), without_fsdp_variable(), keeping(lambda: any(Path(config.out).glob("part-*.parquet"))):
        return _score_set(config, command or command_line("distill", config))


def _score_set(config: ScoreConfig, command: str) -> dict[str, Any]:
    processes = join_processes(config.device)
    out = Path(config.out)
    if out.is_file() or out.resolve() == Path(config.score).resolve():
        raise InputError(f"--out {config.out!r}: name a directory of its own for the scored set")
    tokenizer = load_tokenizer(config.target, config.trust_remote_code, config.chat_template)
    if Path(config.score).is_dir():
        source = _of_set(Path(config.score), tokenizer)
    elif next(iterate_records(config.score), None) is None:
        raise InputError(f"{config.score}: holds no rows")
    model = load_model(config.target, **loading(config))
    check_tokenizer(config.target, model, tokenizer)
    if not Path(config.score).is_dir():
        source = _of_file(config, tokenizer, eos_ids(model))
    size = vocabulary_size(model)
    each = bytes_per_token(min(config.teacher_top_k, size), size)
    _check_room(out, source.tokens, each)
    limit = context_length(model)
    identity = {
        "config": source.config | {"target": config.target, "teacher_top_k": config.teacher_top_k},
        "scored": source.identity,
        "target_fingerprint": fingerprint(model),
        "target_dtype": dtype_name(model),
    }

    def written(index: int, digest: str, rows: Numbered) -> None:
        skipped: list[tuple[int, str]] = []
        kept = []
        for number, row in rows:
            why = row if isinstance(row, str) else _why_not(row, limit, size)
            if why:
                skipped.append((number, why))
            elif not isinstance(row, str):
                teacher = score(model, row["prompt_ids"], row["response_ids"], config.teacher_top_k)
                kept.append({**row, COLUMN: teacher})
        record = {"read": len(rows), "digest": digest, "skipped": skipped, "failed": [], "shortened": []}
        write_part(out, index, record, kept, pa.schema([*SCHEMA, *TEACHER]))

    with hold(out):
        on_main(lambda: claim_set(out, identity))
        parts = 0
        with progress("score", source.rows if processes.num_processes == 1 else None) as advance:
            for index, (digest, read) in enumerate(source.parts()):
                parts += 1
                if index % processes.num_processes != processes.process_index:
                    continue
                made = read_record(out, index)
                if made is None:
                    rows = read()
                    written(index, digest, rows)
                    advance(len(rows), "")
                elif made["digest"] == digest:
                    advance(made["read"], "")
                else:
                    raise InputError(f"{config.score}: has changed since {out} was begun; choose another --out")
        processes.wait_for_everyone()
        on_main(lambda: finish(out, parts, identity, command, {"vocabulary": vocabulary_sample(tokenizer)}))
        manifest = read_json(out / "manifest.json", "the manifest that this run has written")
    keys = ("response_tokens", "skipped_because")
    return {"out": config.out, **manifest["counts"], **{key: manifest[key] for key in keys}, "bytes_per_token": each}


def _why_not(row: dict[str, Any], limit: int | None, size: int) -> str:
    """Why a row cannot be scored, "" when it can."""
    ids = [*row["prompt_ids"], *row["response_ids"]]
    if not row["response_ids"]:
        return "no answer"
    if limit is not None and len(ids) > limit:
        return f"{len(ids)} tokens, more than the {limit} that fit"
    if not all(0 <= token < size for token in ids):
        return f"holds a token that the target, with {size}, does not have"
    return ""


def _check_room(out: Path, tokens: int | None, each: int) -> None:
    """InputError where the disk has not the room for so many tokens of so many bytes, as far as that is known."""
    if tokens is None:
        return
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    needed = tokens * each - sum(part.stat().st_size for part in out.glob("part-*.parquet"))
    free = shutil.disk_usage(there).free
    if needed > free:
        raise InputError(
            f"--out {out}: needs {needed / 1e9:.1f} GB ({tokens} tokens of {each} bytes), and {free / 1e9:.1f} GB are "
            f"free; lower --teacher_top_k, or choose another disk"
        )


def _of_set(directory: Path, tokenizer: Tokenizer) -> _Source:
    manifest = read_json(directory / "manifest.json", "the manifest of a finished distilled set")
    if manifest.get("format") != SET_FORMAT:
        raise InputError(f"{directory}: its manifest.json is not that of a distilled set")
    if not manifest.get("complete"):
        raise InputError(f"{directory}: the distilled set is not finished; run the same distill command again")
    check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))

    def parts() -> Iterator[tuple[str, Callable[[], Numbered]]]:
        start = 0
        for part in manifest["parts"]:
            yield part["sha256"], partial(read, directory / part["file"], part["sha256"], start)
            start += part["rows"]

    def read(path: Path, digest: str, start: int) -> Numbered:
        if not path.is_file() or sha256_file(path) != digest:
            raise InputError(f"{path}: is not the file that the manifest describes; copy it again")
        rows = pq.read_table(path).to_pylist()
        kept = [{name: row.get(name) for name in SCHEMA.names} for row in rows]
        return list(enumerate(kept, start + 1))

    target = manifest.get("identity", {}).get("target_fingerprint")
    identity = {"set": hash_json(manifest["parts"]), "target_fingerprint": target}
    rows = sum(part["rows"] for part in manifest["parts"])
    return _Source(identity, dict(manifest.get("config", {})), rows, manifest.get("response_tokens"), parts)


def _of_file(config: ScoreConfig, tokenizer: Tokenizer, ends: tuple[int, ...]) -> _Source:
    """Rows of a file, with what is not known of them left empty."""

    def parts() -> Iterator[tuple[str, Callable[[], Numbered]]]:
        records = iterate_records(config.score)
        while group := list(islice(records, config.part_rows)):
            yield digest_of(group), partial(read, group)

    def read(group: list[Record]) -> Numbered:
        return [(record.number, row(record)) for record in group]

    def row(record: Record) -> dict[str, Any] | str:
        where = f"{config.score}:{record.number}"
        try:
            found = parse_record(record, config.score)
            domain, own = text_of(found, "domain") or config.domain, text_of(found, "id")
            if found.get("messages") is not None:
                tools = found.get("tools") or None
                (prompt, response), tokens_from = answered(found["messages"], where, tokenizer, tools), "text"
            else:
                prompt, response, tokens_from = *(_ids(found, key, where) for key in _IDS), "target"
        except InputError as error:
            return str(error).removeprefix(f"{where}: ")
        name = own or content_id([*prompt, *response])
        return {
            "id": name,
            "prompt_id": own or content_id(prompt),
            "prompt_hash": content_id(prompt),
            "domain": domain,
            "prompt_ids": prompt,
            "response_ids": response,
            "finish_reason": "stop" if response and response[-1] in ends else "length",
            "temperature": None,
            "seed": None,
            "sample_index": 0,
            "turn": 0,
            "tokens_from": tokens_from,
        }

    keys = ("num_samples", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
    made = dict.fromkeys(keys) | {"prompts": config.score, "part_rows": config.part_rows, "domain": config.domain}
    return _Source({"file": config.score}, made, count_rows(config.score), None, parts)


_IDS = ("prompt_ids", "response_ids")


def _ids(row: dict[str, Any], key: str, where: str) -> list[int]:
    value = row.get(key)
    if value is None:
        raise InputError(f"{where}: needs `messages` that end with the assistant's answer, or {' and '.join(_IDS)}")
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise InputError(f"{where}: key {key!r}: expected a list of token ids")
    return value
