"""Which prompts are trained on and which are held out for the evaluation."""

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, canonical_json, read_json, write_json_atomic, write_rows
from draftsmith_core.processes import say
from draftsmith_core.prompt_rows import asked_of, digest_of, iterate_records, parse_record
from draftsmith_core.prompts import PromptSet

# Beside the rows of both sides: how many were read of the file that they are from, and their hash.
_SOURCE = "source.json"


def hold_out(source: str, read: PromptSet, count: int, directory: Path) -> None:
    """Write the rows of `source` to train.jsonl and heldout.jsonl in `directory`, whole or not at all.

    `count` prompts are held out, those with the smallest hashes of their tokens: which ones does not depend on the
    order of the rows, and rows of equal tokens stay on one side. Rows that were skipped in `read` stay out of both.
    """
    hashes = [hashlib.sha256(canonical_json(list(prompt.ids)).encode()).hexdigest() for prompt in read.prompts]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise InputError(f"{source}: holds a single prompt, so none can be held out; add prompts, or name --id")
    heldout = set(distinct[: min(count, len(distinct) - 1)])
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, hashes, strict=True))
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    records = list(islice(iterate_records(source), read.rows))
    for record in records:
        if record.number in skipped:
            continue
        prompt, content = next(used)
        row = parse_record(record, source)
        sides[content in heldout].append({"id": prompt.id, "domain": prompt.domain, **asked_of(row)})
    with atomic_dir(directory) as made:
        write_json_atomic(made / _SOURCE, {"rows": read.rows, "more": read.more, "sha256": digest_of(records)})
        write_rows(made / "train.jsonl", sides[False])
        write_rows(made / "heldout.jsonl", sides[True])


def check_unchanged(source: str, directory: Path) -> None:
    """InputError where the rows that `hold_out` divided are others in the file now; of rows that came since it is said
    that they are not used. A file that is gone is not missed, and other sources are not read again.
    """
    if not (directory / _SOURCE).is_file() or not Path(source).is_file():
        return
    there = read_json(directory / _SOURCE, "the record of the prompts of a run")
    records = iterate_records(source)
    if digest_of(list(islice(records, there["rows"]))) != there["sha256"]:
        raise InputError(
            f"{source}: its first {there['rows']} rows are not those that this run was begun with; name another --out, "
            f"or write them as they were"
        )
    if not there["more"] and next(records, None) is not None:
        say(f"{source}: has more than the {there['rows']} rows that this run was begun with; the others are not used")
