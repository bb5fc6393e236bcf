"""The files of a distilled set: parts of rows, and what became of the prompts that each part is from.

A part has the rows of a fixed number of prompts. Its Parquet metadata records those prompts and why some gave nothing,
so the parts alone add up to the set.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from distill.filters import HELD_OUT
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_file, canonical_json, read_json, sha256_file, write_json_atomic, writing
from draftsmith_core.prompts import Prompt, Reasons, Skipped
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
ERRORS = "errors.jsonl"
_METADATA = b"draftsmith"
KINDS = ("part-*.parquet", "empty-*.json")


def part_name(index: int) -> str:
    """File name of a part."""
    return f"part-{index:05d}.parquet"


def _empty_name(index: int) -> str:
    # A Parquet file without rows is one that `datasets` refuses to read.
    return f"empty-{index:05d}.json"


def names_of(index: int) -> tuple[str, str]:
    """File names of a part with rows, and of one without; a part has one of them."""
    return part_name(index), _empty_name(index)


@dataclass
class Part:
    """An unfinished part.

    left: unfinished samples by row of the source. failed, shortened: reasons by row that has no answer, or not to all
    turns. dropped: reasons by answer that is not written.
    """

    index: int
    digest: str
    read: int
    skipped: list[Skipped]
    prompts: dict[int, Prompt]
    left: Counter[int]
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
        empty = {key[0]: self.dropped[key] for key in sorted(self.dropped, reverse=True) if key[0] not in rows}
        skipped = [*self.skipped, *(Skipped(row, f"every answer dropped: {why}") for row, why in sorted(empty.items()))]
        record = {
            "read": self.read,
            "digest": self.digest,
            "skipped": [[skip.row, skip.reason] for skip in skipped],
            "failed": sorted(self.failed.items()),
            "shortened": sorted(self.shortened.items()),
            "dropped": [[key[0], why] for key, why in sorted(self.dropped.items())],
        }
        return write_part(out, self.index, record, [self.rows[key] for key in keys], schema)


def write_part(out: Path, index: int, record: dict[str, Any], rows: list[dict[str, Any]], schema: pa.Schema) -> Path:
    """Write a part and return its path. record: digest of its prompts, and what was left out and why."""
    if not rows:
        path = out / _empty_name(index)
        with writing(path):
            write_json_atomic(path, record)
        return path
    columns = {name: [row[name] for row in rows] for name in schema.names}
    path = out / part_name(index)
    table = pa.table(columns, schema=schema.with_metadata({_METADATA: canonical_json(record).encode()}))
    with writing(path), atomic_file(path) as temporary:
        pq.write_table(table, temporary)
    return path


def check_digest(out: Path, index: int, digest: str, source: str) -> int | None:
    """Return how many prompts a finished part is from; None if there is no such part.

    Raise InputError if it was made from other prompts than `source` has now.
    """
    record = _read_record(out, index)
    if record is not None and record["digest"] != digest:
        raise InputError(
            f"{source}: its rows are not those that {out / part_name(index)} was made from; choose another --out or "
            f"delete the directory"
        )
    return None if record is None else int(record["read"])


def _read_record(out: Path, index: int) -> dict[str, Any] | None:
    path, empty = out / part_name(index), out / _empty_name(index)
    if empty.exists():
        return read_json(empty, "the record of prompts that gave no rows")
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads((pq.read_schema(path).metadata or {})[_METADATA])
        return record
    except (OSError, pa.ArrowException, KeyError):
        raise _damaged(path) from None


def _damaged(path: Path) -> InputError:
    return InputError(f"{path}: is damaged; delete it and run the command again")


@dataclass
class Totals:
    """The sums over all parts. held_out: row numbers of held-out prompts."""

    files: list[dict[str, Any]]
    read: int
    rows: int
    tokens: int
    finish_reasons: Counter[str]
    tokens_from: Counter[str]
    skipped: Reasons
    failed: Reasons
    shortened: Reasons
    dropped: Reasons
    digests: list[str]
    held_out: list[int] = field(default_factory=list)


def add_up(out: Path, parts: int) -> Totals:
    """Add up all parts; write `errors.jsonl` with a line per prompt that gave less than it should."""
    reasons = (Reasons(), Reasons(), Reasons(), Reasons())
    totals = Totals([], 0, 0, 0, Counter(stop=0, length=0), Counter(), *reasons, [])
    with atomic_file(out / ERRORS) as temporary, temporary.open("w", encoding="utf-8") as errors:
        for index in range(parts):
            _add(totals, out, index, errors)
    if not (out / ERRORS).stat().st_size:
        (out / ERRORS).unlink()
    return totals


def _add(totals: Totals, out: Path, index: int, errors: TextIO) -> None:
    path, record = out / part_name(index), _read_record(out, index)
    assert record is not None, f"{path} was deleted while the run wrote others"
    if path.exists():
        try:
            table = pq.read_table(path, columns=["response_ids", "finish_reason", "tokens_from"])
        except (OSError, pa.ArrowException):
            raise _damaged(path) from None
        totals.files.append({"file": path.name, "rows": len(table), "sha256": sha256_file(path)})
        totals.rows += len(table)
        totals.tokens += pc.sum(pc.list_value_length(table["response_ids"])).as_py() or 0
        for name, counts in (("finish_reason", totals.finish_reasons), ("tokens_from", totals.tokens_from)):
            for entry in pc.value_counts(table[name]).to_pylist():
                counts[entry["values"]] += entry["counts"]
    totals.read += record["read"]
    totals.digests.append(record["digest"])
    outcomes = {name: getattr(totals, name) for name in ("skipped", "failed", "shortened", "dropped")}
    entries = [(row, name, reason) for name in outcomes for row, reason in record.get(name, [])]
    for row, outcome, reason in sorted(entries):
        outcomes[outcome].add(row, reason)
        if reason == HELD_OUT:
            totals.held_out.append(row)
            continue
        errors.write(canonical_json({"row": row, "outcome": outcome, "reason": reason}) + "\n")
