"""The prompts of `align`, divided into a part to train on and a part that is held out."""

from itertools import islice
from pathlib import Path

from draftsmith_core.asked_hash import group_ranks
from draftsmith_core.errors import InputError
from draftsmith_core.io import (
    read_json,
    refuse_foreign,
    sha256_file,
    write_json_atomic,
    write_rows,
)
from draftsmith_core.prompt_rows import asked_of, iterate_records, parse_record
from draftsmith_core.prompts import PromptSet


def hold_out(source: str, read: PromptSet, count: int, directory: Path) -> None:
    """Write the rows of `source` to train.jsonl and heldout.jsonl, without the skipped ones.

    Hold out `count` prompts by the hashes of what they ask, whatever the order of the rows, the
    template and its date. Rows that ask the same, and a chat with its own earlier turns, stay on
    one side.
    """
    keys = []
    for prompt in read.prompts:
        keys.append([*prompt.hashes, *(prompt.chat.asked_by_turn() if prompt.chat else ())])
    ranks = group_ranks(keys)
    count = min(count, max(ranks))
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, ranks, strict=True))
    train: list[dict[str, object]] = []
    heldout: list[dict[str, object]] = []
    for record in islice(iterate_records(source), read.rows):
        if record.number in skipped:
            continue
        prompt, rank = next(used)
        asked = asked_of(parse_record(record, source))
        side = heldout if rank < count else train
        side.append({"id": prompt.id, "domain": prompt.domain, **asked})
    if not (directory / "source.json").exists():
        refuse_foreign(directory, ("*.jsonl",))
    write_json_atomic(directory / "source.json", {"sha256": _digest(source)})
    write_rows(directory / "train.jsonl", train)
    write_rows(directory / "heldout.jsonl", heldout)


def check_unchanged(source: str, directory: Path) -> None:
    """Raise InputError if the prompt file changed since `hold_out` divided it."""
    record = directory / "source.json"
    digest = _digest(source)
    if digest is None or not record.is_file():
        return
    if digest != read_json(record, "the record of prompts")["sha256"]:
        raise InputError(
            f"{source}: has changed since this run began; name another --out, or restore it"
        )


def _digest(source: str) -> str | None:
    return sha256_file(Path(source)) if Path(source).is_file() else None
