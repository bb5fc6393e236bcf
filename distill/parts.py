"""The Parquet parts of a distilled set: the rows of a fixed number of prompts each.

Each part's metadata lists its prompts and why some were skipped, so the set can be rebuilt from its
parts.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.errors import InputError
from draftsmith.core.io import (
    canonical_json,
    is_whole,
    kept_json,
    read_json,
    require_keys,
    sealed_file,
    write_sealed,
)
from draftsmith.core.prompts import Prompt, Skipped
from draftsmith.core.ranks import leads_group
from draftsmith.core.records import note_progress
from draftsmith.core.teacher_rows import COLUMN
from draftsmith.distill.engines import Key

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "prompt_id": pa.string(),
        "prompt_hash": pa.string(),
        "asked": pa.string(),
        "domain": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "temperature": pa.float64(),
        "seed": pa.int64(),
        "sample_index": pa.int32(),
        "turn": pa.int32(),
        "tokens_from": pa.string(),
    }
)
TEACHER_SCHEMA = SCHEMA.append(pa.field(COLUMN, pa.large_binary()))
_METADATA = b"draftsmith"
_NO_ROWS = "the record of prompts that gave no rows"


class SetRow(TypedDict):
    """A row of a distilled set, as `SCHEMA` has it."""

    id: str
    prompt_id: str
    prompt_hash: str
    asked: str
    domain: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    finish_reason: str
    temperature: float | None
    seed: int | None
    sample_index: int
    turn: int
    tokens_from: str
    teacher: NotRequired[bytes]


# How a prompt gave less than it should.
Shortfall = Literal["skipped", "failed", "shortened", "dropped"]
SHORTFALLS: tuple[Shortfall, ...] = get_args(Shortfall)


class PartSummary(TypedDict):
    """What a part says of its prompts: their number and digest, and rows with reasons.

    shortened: rows of which later turns have no answer. dropped: a row for each answer left out.
    """

    read: int
    digest: str
    skipped: list[tuple[int, str]]
    failed: list[tuple[int, str]]
    shortened: list[tuple[int, str]]
    dropped: NotRequired[list[tuple[int, str]]]


def part_path(out: Path, index: int) -> Path:
    """Path of a part with rows."""
    return out / f"part-{index:05d}.parquet"


def empty_path(out: Path, index: int) -> Path:
    """Path of a part without rows, because `datasets` refuses a Parquet file without rows."""
    return out / f"empty-{index:05d}.json"


@dataclass
class Part:
    """An unfinished part.

    left: number of unfinished samples by row of the prompts. failed, shortened: reasons by row that
    has no answer, or not to all turns. dropped: reasons by answer that is not written.
    """

    index: int
    digest: str
    read: int
    skipped: list[Skipped]
    prompts: dict[int, Prompt]
    left: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    shortened: dict[int, str] = field(default_factory=dict)
    rows: dict[Key, SetRow] = field(default_factory=dict)
    dropped: dict[Key, str] = field(default_factory=dict)

    def write(self, out: Path, schema: pa.Schema) -> None:
        """Write the rows in the order of the prompts.

        A prompt without any answer left is skipped, with the reason of its first one.
        """
        kept = sorted(self.rows.keys() - self.dropped.keys())
        dropped = sorted(self.dropped.items())
        answered = {key.row for key in kept} | self.failed.keys()
        skipped = [(skip.row, skip.reason) for skip in self.skipped]
        for key, reason in dropped:
            if key.row not in answered:
                answered.add(key.row)
                skipped.append((key.row, f"every answer dropped: {reason}"))
        summary = PartSummary(
            read=self.read,
            digest=self.digest,
            skipped=skipped,
            failed=sorted(self.failed.items()),
            shortened=sorted(self.shortened.items()),
            dropped=[(key.row, reason) for key, reason in dropped],
        )
        write_part(out, self.index, summary, [self.rows[key] for key in kept], schema)


def write_part(
    out: Path, index: int, summary: PartSummary, rows: Sequence[SetRow], schema: pa.Schema
) -> None:
    """Write a part with its summary; one without rows is a JSON file with the summary alone. Of
    processes that hold the target together, one writes.
    """
    if not leads_group():
        return
    path = part_path(out, index)
    if rows:
        metadata = {_METADATA: canonical_json(summary).encode()}
        table = pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata))
        with sealed_file(path) as temporary:
            pq.write_table(table, temporary)
    else:
        write_sealed(empty_path(out, index), summary)
    finished = [*out.glob("part-*.parquet"), *out.glob("empty-*.json")]
    note_progress(out, "parts", len(finished), None)


def prompts_of_finished(out: Path, index: int, digest: str, prompts: str) -> int | None:
    """Return the number of prompts of a finished part, None if it is not finished or was damaged.

    Raise InputError if it was made from other rows than `prompts` has now.
    """
    without_rows = kept_json(empty_path(out, index), _NO_ROWS, PartSummary.__required_keys__)
    path = part_path(out, index)
    if without_rows is None and not is_whole(path):
        return None
    summary = read_summary(out, index)
    assert summary is not None
    if summary["digest"] != digest:
        raise InputError(
            f"{prompts}: its rows changed since {path} was made; choose another --out or delete "
            "the directory"
        )
    return summary["read"]


def read_summary(out: Path, index: int) -> PartSummary | None:
    """Return the summary of a part, None if it is not finished."""
    path = part_path(out, index)
    empty = empty_path(out, index)
    if empty.exists():
        return cast(PartSummary, read_json(empty, _NO_ROWS, PartSummary.__required_keys__))
    if not path.exists():
        return None
    with reading(path):
        metadata = pq.read_schema(path).metadata or {}
        summary = json.loads(metadata[_METADATA])
    return cast(PartSummary, require_keys(summary, PartSummary.__required_keys__, path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise InputError that names `path` if the block cannot read it."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException, KeyError):
        raise InputError(f"{path}: is damaged; delete it and run the command again") from None
