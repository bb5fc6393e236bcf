"""Rows of prompt sources, one at a time: JSON lines (also gzip and zstd), Parquet, here or in a
store that fsspec knows (s3://, gs://, https://, hf://), datasets of the hub, and suites: `@gsm8k`
is configs/prompts/gsm8k.yaml.

A *record* is a row as it is stored, before it is understood: a million of them are passed over in
seconds.
"""

import codecs
import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draftsmith.core.errors import (
    InputError,
    at,
    first_line,
    one_line,
    require_package,
    without_secrets,
)
from draftsmith.core.io import JsonObject
from draftsmith.core.row_formats import ARGUMENTS, KEYS, as_known, required_keys
from draftsmith.core.row_reasons import Reasons
from draftsmith.core.sources import UNREACHABLE, hub_lacks, may_be_on_hub, similar
from draftsmith.core.suites import expand, load_suite, suite_name

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)
T = TypeVar("T")
_JSON_LINES = (".jsonl", ".json", ".ndjson")
# Sources of texts that the target writes: `self:N` begins with BOS, `token:N` with BOS and a random
# token.
SELF = "self:"
TOKEN = "token:"
# Keys of rows of token ids.
_ID_ROW = ("input_ids", "loss_mask", "labels", "prompt_ids")
# Byte order marks; that of UTF-16 begins that of UTF-32.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Before a source: its chats in other templates (`eval.other_templates`).
IN_OTHER_TEMPLATES = "template:"
_NOT_FOUND = "no such file, and no dataset owner/name:split on the hub"
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Record:
    """A row as it is stored: its line or row number from 1, and the bytes of the line or the
    values.
    """

    number: int
    stored: bytes | JsonObject


def digest_of(records: list[Record]) -> str:
    """sha256 of the records in their order, as 64 hex digits."""
    whole = hashlib.sha256()
    for record in records:
        content = record.stored
        if not isinstance(content, bytes):
            text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
            content = text.encode("utf-8", "replace")
        whole.update(b"%d\0%b\n" % (record.number, content))
    return whole.hexdigest()


def parse_record(record: Record) -> JsonObject:
    """The row in a record, as `as_known` reads it; InputError names its key."""
    return as_known(_stored_row(record))


def asked_of(row: JsonObject) -> JsonObject:
    """The keys of a row that make its prompt, with their values."""
    keys = ("messages", "tools", ARGUMENTS, "prompt", "text", *_ID_ROW)
    return {key: row[key] for key in keys if row.get(key) is not None}


def _stored_row(record: Record) -> JsonObject:
    row = record.stored
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode())
            # JSON can hold half a surrogate pair, which no file can.
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            fix = "write one object a line"
            if isinstance(row, bytes) and not row.endswith(b"\n"):
                fix = "the file ends within this line: is it still being written?"
            raise InputError(f"not valid JSON ({one_line(error)}); {fix}") from None
    if not isinstance(row, dict):
        raise InputError(f"a row must be a JSON object with one of the keys {', '.join(KEYS)}")
    return row


def free_rows(source: str) -> int | None:
    """N of the sources `self:N` and `token:N`, which are made and not read; None for any other
    source.
    """
    if not source.startswith((SELF, TOKEN)):
        return None
    start, _, count = source.partition(":")
    if not (count.isdecimal() and int(count)):
        raise InputError(
            f"{source}: write {start}:N, such as {start}:1000, for N texts that the target writes "
            "by itself"
        )
    return int(count)


def iterate_rows(source: str) -> Iterator[JsonObject]:
    """Yield the rows of any source as `as_known` reads them; skip others as `read_rows` does."""
    return read_rows(source, lambda row: row)


def read_rows(source: str, read: Callable[[JsonObject], T]) -> Iterator[T]:
    """Yield what `read` makes of each row of any source, as `as_known` has it.

    Rows that cannot be read are skipped; afterwards a warning counts them.
    """
    skipped = Reasons()
    for record in iterate_records(source):
        try:
            made = read(parse_record(record))
        except InputError as error:
            skipped.add(record.number, str(error))
        else:
            yield made
    for line in skipped.lines("rows skipped"):
        log.warning("%s: %s", source, line)


def count_rows(source: str) -> int | None:
    """Number of rows of a JSON-lines file or free texts, for progress; None for other sources."""
    path = Path(source)
    if path.suffix in _JSON_LINES and path.is_file():
        with path.open("rb") as file:
            return None if _holds_array(file) else sum(1 for _ in file)
    return free_rows(source)


def check_rows(source: str) -> None:
    """Raise InputError for a source that cannot be one of rows; read nothing."""
    source = source.removeprefix(IN_OTHER_TEMPLATES)
    if source.startswith("@") or _is_file(source) or free_rows(source) is not None:
        return
    name, _, split = source.partition(":")
    # `magpie:N` is no dataset either.
    if not split.isdecimal() and hub_lacks(name, "dataset"):
        raise InputError(f"{source}: {_NOT_FOUND} ({UNREACHABLE})")


def check_prompts(source: str) -> None:
    """Raise InputError for a file without a row that can be a prompt."""
    skipped = Reasons()
    for record in iterate_records(source):
        try:
            required_keys(parse_record(record))
            return
        except InputError as error:
            skipped.add(record.number, str(error))
    reasons = "; ".join(skipped.lines("rows skipped"))
    raise InputError(f"{source}: no row can be used; {reasons or 'it is empty'}")


def iterate_records(source: str) -> Iterator[Record]:
    """The rows of a source as they are stored; InputError for a source that cannot be read."""
    free = free_rows(source)
    if source.startswith("@"):
        yield from iterate_suite(source)
    elif free is not None:
        for number in range(1, free + 1):
            yield Record(number, {"prompt": ""})
    elif _is_file(source):
        yield from _file_records(source)
    else:
        name, _, split = source.partition(":")
        yield from _hub_records(source, name, split or "train")


def _is_file(source: str) -> bool:
    """Whether a source is a file of rows, here or in a store. Raise InputError for one that is
    missing or no such file.
    """
    path = Path(without_secrets(source))
    inner = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    readable = path.suffix == ".parquet" or inner in _JSON_LINES
    is_there = path.exists() or "://" in source
    reason = ""
    if path.exists() and not path.is_file():
        # A pipe can be read only once.
        reason = "is not a .jsonl or .parquet file that can be read twice"
    elif is_there and not readable:
        reason = "is not a .jsonl or .parquet file"
    elif not is_there and (readable or not may_be_on_hub(source.partition(":")[0])):
        reason = f"no such file{similar(path)}"
    if reason or not source.strip():
        raise InputError(f"{source}: {reason or 'no such file'}")
    return is_there


def _file_records(source: str) -> Iterator[Record]:
    import fsspec
    import pyarrow
    import pyarrow.parquet

    suffix = Path(without_secrets(source)).suffix
    try:
        with fsspec.open(source, "rb") if "://" in source else open(source, "rb") as file:
            if suffix == ".parquet":
                table = pyarrow.parquet.ParquetFile(file)
                batches = map(_python_rows, table.iter_batches(batch_size=4096))
                for number, row in enumerate(chain.from_iterable(batches), 1):
                    yield Record(number, row)
                return
            # Lines of bytes, so that a line that is not UTF-8 is that line's fault and no other's.
            stream = pyarrow.input_stream(file, compression=_COMPRESSED.get(suffix))
            lines = io.BufferedReader(stream, 1 << 20)
            start = lines.peek(4)[:4]
            for mark, encoding in _MARKS.items():
                if start.startswith(mark):
                    raise ValueError(f"it is in {encoding}; save it as UTF-8")
            if _holds_array(lines):
                for number, row in enumerate(json.loads(lines.read().decode("utf-8-sig")), 1):
                    yield Record(number, row)
                return
            for number, line in enumerate(lines, 1):
                if number == 1:  # editors on Windows begin a file with this mark
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield Record(number, line)
    except (
        OSError,
        ValueError,
        ImportError,
        OverflowError,
        RecursionError,
        pyarrow.ArrowException,
    ) as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            require_package(error.__cause__.name or "", source)
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{source}: cannot be read ({reason})") from None


def _python_rows(batch: "pyarrow.RecordBatch") -> list[JsonObject]:
    """Rows of Parquet; dates as text if Python cannot hold one, as those after the year 9999."""
    try:
        rows: list[JsonObject] = batch.to_pylist()
    except (OverflowError, ValueError):
        import pyarrow

        for index, field in enumerate(batch.schema):
            if pyarrow.types.is_temporal(field.type):
                batch = batch.set_column(index, field.name, batch[index].cast("string"))
        rows = batch.to_pylist()
    return rows


def _holds_array(file: io.BufferedReader) -> bool:
    """Whether a JSON file is one list of rows, as Alpaca and LLaMA-Factory keep them."""
    return file.peek(1)[:4].removeprefix(b"\xef\xbb\xbf").startswith(b"[")


def _hub_records(source: str, dataset: str, split: str, **which: str | None) -> Iterator[Record]:
    """`which`: `name` of a configuration and `data_files`, as `datasets.load_dataset` takes
    them.
    """
    import datasets

    from draftsmith.core.hub import offline_if_unreachable

    reachable = True
    try:
        with offline_if_unreachable() as reachable:
            rows = datasets.load_dataset(dataset, split=split, streaming=True, **which)
        for number, row in enumerate(rows, 1):
            yield Record(number, dict(row))
    except Exception as error:  # the hub's client has many classes of errors
        reason = first_line(error) if reachable else UNREACHABLE
        raise InputError(f"{source}: {_NOT_FOUND} ({reason})") from None


def text_of(row: JsonObject, key: str) -> str:
    """The value under `key` as text; empty if there is none."""
    return "" if row.get(key) is None else str(row[key])


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_named(option: str, values: Sequence[str]) -> dict[str, str]:
    """Models or prompt sets by name: `["a=x", "runs/b", "data/c.jsonl", "@d"]` are called a, b, c
    and d. A family of suites becomes its suites: `x=@spec-bench` gives x-qa, x-rag and others.

    Raise InputError for a name that cannot be, or that comes twice.
    """
    named = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not equals or "/" in name:
            name = _name_of(value)
            source = value
        if not NAME.fullmatch(name) or not source:
            raise InputError(
                f"{option} {value}: write NAME=VALUE; a name has letters, digits, '.', '_' and '-'"
            )
        members = {f"{name}-{part}": member for part, member in expand(source).items()}
        for key, member in (members or {name: source}).items():
            if key in named:
                raise InputError(
                    f"{option} {value}: the name {key!r} is used twice; write NAME={source}"
                )
            named[key] = member
    return named


def _name_of(value: str) -> str:
    """The name of a suite; of others the last part of the path, without split and suffixes."""
    if value.startswith("@"):
        return suite_name(value)
    path = re.sub(r":[\w-]+$", "", value).rstrip("/")
    name = re.sub(r"(\.(jsonl|json|parquet|txt|gz|zst))+$", "", path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")


def iterate_suite(source: str) -> Iterator[Record]:
    """Yield the prompts of a suite as rows, made of rows from the hub or, for `@NAME:FILE`, from a
    file with the same columns. FILE may be a directory that holds the file under its own name.
    """
    suite = load_suite(suite_name(source))
    _, _, path = source.partition(":")
    file = suite.local_file(path)
    if file:
        records = iterate_records(file)
    elif suite.gated:
        raise InputError(
            f"{source}: {suite.dataset} is gated; accept its conditions on the hub, run `hf "
            f"download {suite.dataset} --repo-type dataset --local-dir DIR`, and name "
            f"@{suite.name}:FILE"
        )
    else:
        records = _hub_records(
            source, suite.dataset, suite.split, name=suite.subset, data_files=suite.files
        )
    fitting = 0
    seen: set[str] = set()
    for record in records:
        with at(f"{file or source}:{record.number}"):
            row = _stored_row(record)
            try:
                if not suite.fits(row):
                    continue
                prompt = suite.prompt_of(row)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise InputError(
                    f"lacks {error}, which suite {suite.name} reads; name a file without "
                    f"@{suite.name}"
                ) from None
            if suite.placeholder and suite.placeholder in str(prompt):
                raise InputError(f"is a placeholder; {suite.fill}, and name @{suite.name}:DIR")
        if repr(prompt) in seen:
            continue
        seen.add(repr(prompt))
        fitting += 1
        if (fitting - 1) % suite.every == 0:
            yield Record(record.number, prompt)
            if fitting > (suite.prompts - 1) * suite.every:
                return
