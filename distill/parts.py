"""The files of a distilled set: parts with the rows of a fixed number of prompts each, answers of
unfinished parts, and the manifest that the parts add up to.

The Parquet metadata records those prompts and why some gave nothing, so the parts alone add up to
the set. Answers are kept as they come, and the run that resumes reads them back.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith_core.errors import InputError
from draftsmith_core.io import (
    atomic_file,
    canonical_json,
    read_json,
    write_json_atomic,
    writing,
)
from draftsmith_core.prompts import Prompt, Skipped
from draftsmith_core.teacher_rows import COLUMN

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("prompt_hash", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("finish_reason", pa.string()),
        pa.field("temperature", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("sample_index", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("tokens_from", pa.string()),
    ]
)
# With `teacher_top_k`.
TEACHER = [pa.field(COLUMN, pa.large_binary())]
_METADATA = b"draftsmith"


def names_of(index: int) -> tuple[str, str]:
    """Return the file names of a part with rows, and of one without, because `datasets` refuses a
    file without rows.
    """
    return f"part-{index:05d}.parquet", f"empty-{index:05d}.json"


@dataclass
class Part:
    """An unfinished part.

    left: unfinished samples by row of the source. failed, shortened: reasons by row that has no
    answer, or not to all turns. dropped: reasons by answer that is not written.
    """

    index: int
    digest: str
    read: int
    skipped: list[Skipped]
    prompts: dict[int, Prompt]
    left: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    shortened: dict[int, str] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)
    dropped: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def write(self, out: Path, schema: pa.Schema) -> Path:
        """Write the rows in the order of the prompts; return the file.

        A prompt without any answer left is skipped, with the reason of its first one.
        """
        keys = sorted(self.rows.keys() - self.dropped.keys())
        rows = {key[0] for key in keys} | self.failed.keys()
        empty = {
            key[0]: self.dropped[key]
            for key in sorted(self.dropped, reverse=True)
            if key[0] not in rows
        }
        skipped = [
            *self.skipped,
            *(Skipped(row, f"every answer dropped: {why}") for row, why in sorted(empty.items())),
        ]
        record = {
            "read": self.read,
            "digest": self.digest,
            "skipped": [[skip.row, skip.reason] for skip in skipped],
            "failed": sorted(self.failed.items()),
            "shortened": sorted(self.shortened.items()),
            "dropped": [[key[0], why] for key, why in sorted(self.dropped.items())],
        }
        return write_part(out, self.index, record, [self.rows[key] for key in keys], schema)


def write_part(
    out: Path, index: int, record: dict[str, Any], rows: list[dict[str, Any]], schema: pa.Schema
) -> Path:
    """Write a part and return its path. record: digest of its prompts, and what was left out and
    why.
    """
    path, empty = (out / name for name in names_of(index))
    if not rows:
        with writing(empty):
            write_json_atomic(empty, record)
        return empty
    columns = {name: [row[name] for row in rows] for name in schema.names}
    table = pa.table(
        columns, schema=schema.with_metadata({_METADATA: canonical_json(record).encode()})
    )
    with writing(path), atomic_file(path) as temporary:
        pq.write_table(table, temporary)
    return path


def check_digest(out: Path, index: int, digest: str, source: str) -> int | None:
    """Return the number of prompts of a finished part, None if it is not finished.

    Raise InputError if it was made from other prompts than `source` has now.
    """
    record = read_record(out, index)
    if record is not None and record["digest"] != digest:
        raise InputError(
            f"{source}: its rows changed since {out / names_of(index)[0]} was made; choose "
            "another --out or "
            f"delete the directory"
        )
    return None if record is None else int(record["read"])


def read_record(out: Path, index: int) -> dict[str, Any] | None:
    """Return the record of a part (see `write_part`), None if it is not finished."""
    path, empty = (out / name for name in names_of(index))
    if empty.exists():
        return read_json(empty, "the record of prompts that gave no rows")
    if not path.exists():
        return None
    with reading(path):
        record: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_METADATA])
    return record


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise InputError that names `path` if the block cannot read it."""
    try:
        yield
    except (OSError, pa.ArrowException, KeyError):
        raise InputError(f"{path}: is damaged; delete it and run the command again") from None
