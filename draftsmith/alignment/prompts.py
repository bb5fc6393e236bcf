"""Which prompts are trained on and which are held out for the evaluation."""

import hashlib
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, canonical_json, write_rows
from draftsmith_core.prompt_rows import asked_of, iterate_rows
from draftsmith_core.prompts import PromptSet


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
    for number, (line, row) in enumerate(iterate_rows(source)):
        if number == read.rows:
            break
        if line in skipped:
            continue
        prompt, content = next(used)
        sides[content in heldout].append({"id": prompt.id, "domain": prompt.domain, **asked_of(row)})
    with atomic_dir(directory) as made:
        write_rows(made / "train.jsonl", sides[False])
        write_rows(made / "heldout.jsonl", sides[True])
