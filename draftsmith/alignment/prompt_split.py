"""The prompts of `align`, divided into a part to train on and a part that is held out."""

from itertools import islice
from pathlib import Path

from draftsmith.core.asked_hash import asked_in_chat, group_ranks
from draftsmith.core.errors import InputError
from draftsmith.core.io import (
    first_damaged,
    read_json,
    refuse_foreign,
    sha256_file,
    write_rows,
    write_sealed,
)
from draftsmith.core.prompt_rows import asked_of, iterate_records, parse_record
from draftsmith.core.prompts import PromptSet

# Of the prompt file and of what it was divided into.
_RECORD = "source.json"


def hold_out(source: str, read: PromptSet, count: int, directory: Path) -> None:
    """Write the rows of `source` to train.jsonl and heldout.jsonl, without the skipped ones.

    Hold out `count` prompts by the hashes of what they ask, whatever the order of the rows, the
    template and its date. Rows that ask the same, and a chat with its own earlier turns, stay on
    one side.
    """
    keys = []
    for prompt in read.prompts:
        keys.append(prompt.hashes)
        if prompt.chat is not None:
            chat = prompt.chat
            keys[-1] += [asked_in_chat(chat.first(turns)) for turns in chat.answered()]
    ranks = group_ranks(keys)
    count = min(count, max(ranks))
    if not count:
        raise InputError(
            f"{source}: all {len(ranks)} prompts ask the same, or are turns of one chat, so none "
            "can be held out; add prompts, or name others with --id"
        )
    skipped = {skip.row for skip in read.skipped}
    used = iter(zip(read.prompts, ranks, strict=True))
    train: list[dict[str, object]] = []
    heldout: list[dict[str, object]] = []
    for row in islice(iterate_records(source), read.rows):
        if row.number in skipped:
            continue
        prompt, rank = next(used)
        asked = asked_of(parse_record(row))
        side = heldout if rank < count else train
        side.append({"id": prompt.id, "domain": prompt.domain, **asked})
    if not (directory / _RECORD).exists():
        refuse_foreign(directory, ("*.jsonl",))
    record = {"sha256": _digest(source)}
    write_sealed(directory / _RECORD, record)
    write_rows(directory / "train.jsonl", train)
    write_rows(directory / "heldout.jsonl", heldout)
    files = {name: sha256_file(directory / name) for name in ("train.jsonl", "heldout.jsonl")}
    write_sealed(directory / _RECORD, record | {"files": files})


def check_unchanged(source: str, directory: Path, since: str = "this run") -> None:
    """Raise InputError if the prompt file changed since `hold_out` divided it, or its parts did."""
    file = directory / _RECORD
    if not file.is_file():
        return
    record = read_json(file, "the record of prompts", ["sha256"])
    if damaged := first_damaged(directory, record.get("files", {})):
        raise InputError(f"{directory / damaged}: is not what was written; name another --out")
    if _digest(source) not in (None, record["sha256"]):
        raise InputError(
            f"{source}: has changed since {since} began; name another --out, or restore it"
        )


def _digest(source: str) -> str | None:
    return sha256_file(Path(source)) if Path(source).is_file() else None
