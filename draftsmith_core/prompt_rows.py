"""Rows of prompt sources, one at a time: JSON lines (also gzip and zstd), Parquet, here or in a store that fsspec knows
(s3://, gs://, https://, hf://), data sets of the hub.

A *record* is a row as it is stored, before it is understood: a million of them are passed over in seconds.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE

from draftsmith_core.errors import InputError, first_line
from draftsmith_core.sources import hub_has_address, is_url
from draftsmith_core.suites import load_suite, suite_name, suite_rows

KEYS = ("messages", "prompt", "text", "conversations", "instruction")
_JSON_LINES = (".jsonl", ".json", ".ndjson")
# Texts of the target's own: from their first token on, or from one token of the vocabulary on.
SELF, TOKEN = "self:", "token:"
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Record:
    """A row as it is stored: its line or row number from 1, and the bytes of the line or the values."""

    number: int
    stored: bytes | dict[str, Any]

    @property
    def content(self) -> bytes:
        """What tells one row from another."""
        if isinstance(self.stored, bytes):
            return self.stored
        # Dates and the like have no JSON; `str` is enough to see that they changed.
        return json.dumps(self.stored, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace")


def digest_of(records: list[Record]) -> str:
    """sha256 of the records in their order, as 64 hex digits."""
    whole = hashlib.sha256()
    for record in records:
        whole.update(b"%d\0" % record.number + record.content + b"\n")
    return whole.hexdigest()


def parse_record(record: Record, source: str) -> dict[str, Any]:
    """The row in a record, with `messages` in place of the keys of ShareGPT or Alpaca; InputError names its line."""
    return _as_messages(_stored_row(record, source), f"{source}:{record.number}")


def asked_of(row: dict[str, Any]) -> dict[str, Any]:
    """The keys of a row that make its prompt, with their values."""
    return {key: row[key] for key in ("messages", "tools", "prompt", "text") if row.get(key) is not None}


def _stored_row(record: Record, source: str) -> dict[str, Any]:
    """The row in a record with its own keys; InputError names its line."""
    where = f"{source}:{record.number}"
    row = record.stored
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start} of the line)") from None
        except RecursionError:
            raise InputError(f"{where}: nested too deeply to be a row") from None
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not valid JSON ({error.msg}); write one object a line") from None
        except ValueError:  # what is left to fail is a number of thousands of digits
            raise InputError(f"{where}: holds a number of too many digits; shorten it, or write it as text") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: a row must be a JSON object with one of the keys {', '.join(KEYS)}")
    return row


def free_rows(source: str) -> int | None:
    """N of the sources `self:N` and `token:N`, which are made and not read; None for any other source."""
    if not source.startswith((SELF, TOKEN)):
        return None
    kind, _, count = source.partition(":")
    if not (count.isascii() and count.isdecimal() and int(count)):
        raise InputError(
            f"{source}: write {kind}:N, with N texts that the target writes by itself, such as {kind}:1000"
        )
    return int(count)


def iterate_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of a JSONL/JSON-lines file, a Parquet file, or a dataset on the hub.

    Rows as ShareGPT has them (`conversations`: `from` and `value`) or Alpaca (`instruction`, `input`, `output`) come
    with `messages` in their place, and so do logs of an OpenAI-compatible server (`request` or `body` with `messages`).
    `@NAME` and `@NAME:FILE` are suites (`draftsmith_core.suites`). Raises InputError for the first row that cannot be
    read.
    """
    for record in iterate_records(source):
        yield record.number, parse_record(record, source)


def count_rows(source: str) -> int | None:
    """How many rows a file has, for progress; None where only reading it all would tell."""
    path = Path(source)
    if source.startswith(("@", SELF, TOKEN)):
        return free_rows(source)
    if is_url(source):
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    if path.suffix not in _JSON_LINES:
        return None
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            lines += block.count(b"\n")
            last = block
    return lines + (not last.endswith(b"\n"))


def _as_messages(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with `messages` in place of the keys of ShareGPT or Alpaca; any other row as it is."""
    for key in ("request", "body"):  # of a log of requests, and of a file of requests to be done
        if row.get("messages") is None and isinstance(row.get(key), dict):
            row = {**{name: value for name, value in row.items() if name != key}, **row[key]}
    if isinstance(row.get("messages"), list):
        return {**row, "messages": [_as_text(turn) for turn in row["messages"]]}
    if row.get("messages") is not None or row.get("prompt") is not None:
        return row
    if row.get("conversations") is not None:
        # ShareGPT's ids name the chat that a row was cut out of, and repeat.
        kept = {key: value for key, value in row.items() if key not in ("conversations", "id")}
        turns = _sharegpt(row["conversations"], where)
        return kept | ({"messages": turns} if turns else {"prompt": ""})
    if isinstance(row.get("instruction"), str):
        # `text` in Alpaca files holds the other three again, under a heading that is the same in every row.
        kept = {key: value for key, value in row.items() if key not in ("instruction", "input", "output", "text")}
        asked = "\n\n".join(part for key in ("instruction", "input") if (part := text_of(row, key, where).strip()))
        output = text_of(row, "output", where)
        answer = [{"role": "assistant", "content": output}] if output else []
        return kept | ({"messages": [{"role": "user", "content": asked}, *answer]} if asked else {"prompt": ""})
    return row


def _as_text(turn: Any) -> Any:
    """A message whose content is a list of parts, as clients of servers write it, with their text if all are text."""
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return turn
    return {**turn, "content": "".join(str(part.get("text", "")) for part in parts)}


# The names of speakers in ShareGPT files; some files mix them.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def _sharegpt(value: Any, where: str) -> list[dict[str, str]]:
    """Turns as chat templates want them: the user first, no two of one speaker in a row; empty without a question."""
    if not isinstance(value, list):
        raise InputError(f"{where}: key 'conversations': expected a list of {{from, value}} objects")
    turns: list[dict[str, str]] = []
    for index, turn in enumerate(value):
        if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
            raise InputError(f"{where}: key 'conversations[{index}]': expected text under 'from' and under 'value'")
        speaker: str = turn["from"]
        role = _SPEAKERS.get(speaker, speaker)
        if role == "assistant" and not any(each["role"] == "user" for each in turns):
            # ShareGPT cuts long chats into rows, so a row can begin with the rest of an answer.
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{turn['value']}"
        else:
            turns.append({"role": role, "content": turn["value"]})
    return turns if any(each["role"] == "user" and each["content"].strip() for each in turns) else []


def _suite_records(source: str) -> Iterator[Record]:
    """The prompts of a suite, made of rows from the hub or, for `@NAME:FILE`, from a file with the same columns."""
    suite = load_suite(suite_name(source))
    file = source.partition(":")[2]
    records = (
        iterate_records(file)
        if file
        else _hub_records(source, suite.dataset, suite.split, name=suite.subset, data_files=suite.files)
    )
    rows = ((record.number, _stored_row(record, file or source)) for record in records)
    for number, row in suite_rows(suite, rows, file or source):
        yield Record(number, row)


def iterate_records(source: str) -> Iterator[Record]:
    """The rows of a source as they are stored; InputError for a source that cannot be read."""
    if source.startswith("@"):
        yield from _suite_records(source)
        return
    if (free := free_rows(source)) is not None:
        yield from (Record(number, {"prompt": ""}) for number in range(1, free + 1))
        return
    path = Path(source)
    if not source.strip():
        raise InputError(f"{source!r}: is empty; name a .jsonl or .parquet file, or a dataset on the hub")
    if path.is_dir():
        raise InputError(f"{source}: is a directory; name a .jsonl or .parquet file in it")
    kind = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if path.is_file() or is_url(source):
        if path.suffix == ".parquet":
            yield from _parquet_records(source)
        elif kind in _JSON_LINES:
            yield from _json_records(source)
        else:
            raise InputError(f"{source}: unknown kind of file {path.suffix!r}; use .jsonl or .parquet")
    elif path.exists():
        raise InputError(f"{source}: is a pipe or a device, and rows may be read twice; write them to a .jsonl file")
    elif kind in (*_JSON_LINES, ".parquet") or source.startswith((".", "/", "~")):
        raise InputError(f"{source}: no such file")
    else:
        name, _, split = source.partition(":")
        yield from _hub_records(source, name, split or "train")


def _json_records(source: str) -> Iterator[Record]:
    import pyarrow

    with _opened(source, "cannot be read") as file:
        with pyarrow.input_stream(file, compression=_COMPRESSED.get(Path(source).suffix)) as stream:
            # Lines of bytes, so that a line that is not UTF-8 is that line's fault and no other's.
            for number, line in enumerate(io.BufferedReader(stream, 1 << 20), 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # editors on Windows begin a file with this mark
                if line.strip():
                    yield Record(number, line)


def _parquet_records(source: str) -> Iterator[Record]:
    import pyarrow.parquet

    with _opened(source, "not a readable Parquet file") as file:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                number += 1
                yield Record(number, row)


@contextmanager
def _opened(source: str, wrong: str) -> Iterator[Any]:
    """What pyarrow reads: the path of a file here, or the opened file of a store; InputError for what goes wrong."""
    import fsspec
    import pyarrow

    try:
        if is_url(source):
            with fsspec.open(source, "rb") as file:
                yield file
        else:
            yield source
    except Exception as error:
        # A store's package has errors of its own.
        if not (is_url(source) or isinstance(error, OSError | pyarrow.ArrowException)):
            raise
        raise InputError(f"{source}: {wrong} ({getattr(error, 'strerror', None) or first_line(error)})") from None


def _hub_records(source: str, dataset: str, split: str, **which: str | None) -> Iterator[Record]:
    """`which`: `name` of a configuration and `data_files`, as `datasets.load_dataset` takes them."""
    import datasets

    if not HF_HUB_OFFLINE and not hub_has_address():
        raise InputError(f"{source}: no such file, and the hub cannot be reached")
    try:
        rows = datasets.load_dataset(dataset, split=split, streaming=True, **which)
        for number, row in enumerate(rows, 1):
            yield Record(number, dict(row))
    except Exception as error:
        # The hub's client raises many kinds of error; for the user all mean that there is no such data set.
        raise InputError(
            f"{source}: neither a file here nor a dataset that the hub gives ({first_line(error)}); "
            f"check the path, or write owner/name:split"
        ) from None


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """The text (or number, as text) under `key`, empty where there is none; InputError for anything else."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str | int):
        raise InputError(f"{where}: key {key!r}: expected text, found {type(value).__name__}")
    return whole(str(value), key, where)


def whole(text: str, key: str, where: str) -> str:
    """`text`, or InputError for half a character: JSON allows a lone surrogate such as \\ud83d and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: key {key!r}: character {error.start + 1} is half of a surrogate pair; write it whole"
        ) from None
    return text
