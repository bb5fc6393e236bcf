"""Divide the prompts into those that train the draft and those that are held out for the evaluation."""

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import canonical_json, read_json, sha256_file, write_json_atomic, write_rows
from draftsmith_core.prompt_rows import asked_of, iterate_records, parse_record
from draftsmith_core.prompts import PromptSet

_SOURCE = "source.json"


def hold_out(source: str, read: PromptSet, count: int, directory: Path) -> None:
    """Write the rows of `source` to train.jsonl and heldout.jsonl in `directory`, without the skipped ones.

    The `count` prompts with the smallest hashes of their tokens are held out, whatever the order of the rows. Rows of
    equal tokens stay on one side.
    """
    hashes = [hashlib.sha256(canonical_json(list(prompt.ids)).encode()).hexdigest() for prompt in read.prompts]
    distinct = sorted(set(hashes))
    heldout = set(distinct[: min(count, len(distinct) - 1)])
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, hashes, strict=True))
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for record in islice(iterate_records(source), read.rows):
        if record.number not in skipped:
            prompt, content = next(used)
            row = {"id": prompt.id, "domain": prompt.domain, **asked_of(parse_record(record, source))}
            sides[content in heldout].append(row)
    write_json_atomic(directory / _SOURCE, {"sha256": _digest(source)})
    write_rows(directory / "train.jsonl", sides[False])
    write_rows(directory / "heldout.jsonl", sides[True])


def check_unchanged(source: str, directory: Path) -> None:
    """Raise InputError if the prompt file changed since `hold_out` divided it."""
    record = directory / _SOURCE
    if record.is_file() and _digest(source) not in (None, read_json(record, "the record of prompts")["sha256"]):
        raise InputError(f"{source}: has changed since this run began; name another --out, or restore it")


def _digest(source: str) -> str | None:
    return sha256_file(Path(source)) if Path(source).is_file() else None
