"""Rows of prompt sources, one at a time: JSON lines (also gzip and zstd), Parquet, here or in a
store that fsspec knows (s3://, gs://, https://, hf://), datasets of the hub, and suites: `@gsm8k`
is configs/prompts/gsm8k.yaml.

A *record* is a row as it is stored, before it is understood: a million of them are passed over in
seconds.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from draftsmith_core.errors import (
    InputError,
    first_line,
    nearest,
    one_line,
    require_package,
    without_secrets,
)

KEYS = ("messages", "prompt", "text", "conversations", "instruction")
_JSON_LINES = (".jsonl", ".json", ".ndjson")
# Sources of texts that the target writes: `self:N` begins with BOS, `token:N` with BOS and a random
# token.
SELF, TOKEN = "self:", "token:"
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
DIRECTORY = Path(__file__).parents[1] / "configs" / "prompts"


@dataclass(frozen=True)
class Record:
    """A row as it is stored: its line or row number from 1, and the bytes of the line or the
    values.
    """

    number: int
    stored: bytes | dict[str, Any]


def digest_of(records: list[Record]) -> str:
    """sha256 of the records in their order, as 64 hex digits."""
    whole = hashlib.sha256()
    for record in records:
        content = record.stored
        if not isinstance(content, bytes):
            content = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str).encode(
                "utf-8", "replace"
            )
        whole.update(b"%d\0" % record.number + content + b"\n")
    return whole.hexdigest()


def parse_record(record: Record, source: str) -> dict[str, Any]:
    """The row in a record, with `messages` in place of the keys of ShareGPT or Alpaca; InputError
    names its line.
    """
    return _as_messages(_stored_row(record, source), f"{source}:{record.number}")


def asked_of(row: dict[str, Any]) -> dict[str, Any]:
    """The keys of a row that make its prompt, with their values."""
    return {
        key: row[key] for key in ("messages", "tools", "prompt", "text") if row.get(key) is not None
    }


def _stored_row(record: Record, source: str) -> dict[str, Any]:
    where, row = f"{source}:{record.number}", record.stored
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
            json.dumps(
                row, ensure_ascii=False
            ).encode()  # JSON can hold half a surrogate pair, which no file can
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: not valid JSON ({one_line(error)}); write one object a line"
            ) from None
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: a row must be a JSON object with one of the keys {', '.join(KEYS)}"
        )
    return row


def free_rows(source: str) -> int | None:
    """N of the sources `self:N` and `token:N`, which are made and not read; None for any other
    source.
    """
    if not source.startswith((SELF, TOKEN)):
        return None
    kind, _, count = source.partition(":")
    if not (count.isdecimal() and int(count)):
        raise InputError(
            f"{source}: write {kind}:N, such as {kind}:1000, for N texts that the target writes "
            "by itself"
        )
    return int(count)


def iterate_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line or row number from 1, row) of a JSON-lines file, a Parquet file, a dataset on the
    hub or a suite.

    ShareGPT rows (`conversations`), Alpaca rows (`instruction`, `input`, `output`) and logged
    requests of an OpenAI-compatible server (`request` or `body`) get `messages`. Raises InputError
    for the first unreadable row.
    """
    for record in iterate_records(source):
        yield record.number, parse_record(record, source)


def count_rows(source: str) -> int | None:
    """Number of rows of a JSON-lines file or free texts, for progress; None for other sources."""
    path = Path(source)
    if path.suffix in _JSON_LINES and path.is_file():
        with path.open("rb") as file:
            return sum(1 for _ in file)
    return free_rows(source)


def _as_messages(row: dict[str, Any], where: str) -> dict[str, Any]:
    for key in ("request", "body"):  # of a log of requests, and of a file of requests to be done
        if row.get("messages") is None and isinstance(row.get(key), dict):
            row = {**{name: value for name, value in row.items() if name != key}, **row[key]}
    if isinstance(row.get("messages"), list):
        return {**row, "messages": [_as_text(turn) for turn in row["messages"]]}
    if row.get("messages") is not None or row.get("prompt") is not None:
        return row
    if row.get("conversations") is not None:
        try:
            turns = _sharegpt(row["conversations"])
        except (TypeError, KeyError):
            raise InputError(
                f"{where}: key 'conversations': expected a list of {{from, value}} objects"
            ) from None
        # ShareGPT's ids name the chat that a row was cut out of, and repeat.
        read: tuple[str, ...] = ("conversations", "id")
    elif row.get("instruction") is not None:
        question = "\n\n".join(
            part for key in ("instruction", "input") if (part := text_of(row, key).strip())
        )
        turns = [{"role": "user", "content": question}] if question else []
        if turns and (output := text_of(row, "output")):
            turns.append({"role": "assistant", "content": output})
        # `text` in Alpaca files holds the other three again, under a heading that is the same in
        # every row.
        read = ("instruction", "input", "output", "text")
    else:
        return row
    rest = {key: value for key, value in row.items() if key not in read}
    return rest | ({"messages": turns} if turns else {"prompt": ""})


def _as_text(turn: Any) -> Any:
    """A message whose content is a list of text parts, as clients of servers write it, with the
    text itself.
    """
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    ):
        return turn
    return {**turn, "content": "".join(str(part.get("text", "")) for part in parts)}


# The names of speakers in ShareGPT files; some files mix them.
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


def _sharegpt(conversation: list[dict[str, str]]) -> list[dict[str, str]]:
    """Turns as chat templates want them: the user first, no two of one speaker in a row; empty
    without a question.
    """
    turns: list[dict[str, str]] = []
    for turn in conversation:
        role, text = _SPEAKERS.get(turn["from"], turn["from"]), str(turn["value"])
        if role == "assistant" and not any(turn["role"] == "user" for turn in turns):
            # ShareGPT cuts long chats into rows, so a row can begin with the rest of an answer
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        else:
            turns.append({"role": role, "content": text})
    return (
        turns if any(turn["role"] == "user" and turn["content"].strip() for turn in turns) else []
    )


def iterate_records(source: str) -> Iterator[Record]:
    """The rows of a source as they are stored; InputError for a source that cannot be read."""
    path = Path(without_secrets(source))
    kind = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    readable, is_there = (
        path.suffix == ".parquet" or kind in _JSON_LINES,
        path.exists() or "://" in source,
    )
    if source.startswith("@"):
        yield from (Record(number, row) for number, row in _suite_rows(source))
    elif (free := free_rows(source)) is not None:
        yield from (Record(number, {"prompt": ""}) for number in range(1, free + 1))
    elif readable and is_there:
        yield from _file_records(source, path.suffix)
    elif readable or is_there or source.startswith((".", "/", "~")) or not source.strip():
        raise InputError(
            f"{source}: {'is not a .jsonl or .parquet file' if is_there else 'no such file'}"
        )
    else:
        name, _, split = source.partition(":")
        yield from _hub_records(source, name, split or "train")


def _file_records(source: str, suffix: str) -> Iterator[Record]:
    import fsspec
    import pyarrow
    import pyarrow.parquet

    try:
        with fsspec.open(source, "rb") if "://" in source else open(source, "rb") as file:
            if suffix == ".parquet":
                batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=4096)
                rows: Iterator[Any] = (row for batch in batches for row in batch.to_pylist())
            else:
                # Lines of bytes, so that a line that is not UTF-8 is that line's fault and no
                # other's.
                stream = pyarrow.input_stream(file, compression=_COMPRESSED.get(suffix))
                rows = iter(io.BufferedReader(stream, 1 << 20))
            for number, row in enumerate(rows, 1):
                if number == 1 and isinstance(row, bytes):
                    row = row.removeprefix(
                        b"\xef\xbb\xbf"
                    )  # editors on Windows begin a file with this mark
                if isinstance(row, dict) or row.strip():
                    yield Record(number, row)
    except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            require_package(error.__cause__.name or "", source)
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{source}: cannot be read ({reason})") from None


def _hub_records(source: str, dataset: str, split: str, **which: str | None) -> Iterator[Record]:
    """`which`: `name` of a configuration and `data_files`, as `datasets.load_dataset` takes
    them.
    """
    import datasets

    from draftsmith_core.hub import offline_if_unreachable

    reachable = True
    try:
        with offline_if_unreachable() as reachable:
            rows = datasets.load_dataset(dataset, split=split, streaming=True, **which)
        for number, row in enumerate(rows, 1):
            yield Record(number, dict(row))
    except Exception as error:  # the hub's client has many classes of errors
        reason = first_line(error) if reachable else "the hub cannot be reached"
        raise InputError(
            f"{source}: no such file, and no dataset owner/name:split on the hub ({reason})"
        ) from None


def text_of(row: dict[str, Any], key: str) -> str:
    """The value under `key` as text; empty if there is none."""
    return "" if row.get(key) is None else str(row[key])


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_named(option: str, values: Sequence[str]) -> dict[str, str]:
    """Models or prompt sets by name: `["a=x", "runs/b", "data/c.jsonl", "@d"]` are called a, b, c
    and d.

    Raise InputError for a name that cannot be, or that comes twice.
    """
    named: dict[str, str] = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not equals or "/" in name:
            source, path = value, re.sub(r":[\w-]+$", "", value).rstrip("/")
            name = re.sub(r"(\.(jsonl|json|parquet|txt|gz|zst))+$", "", path.rpartition("/")[2])
            name = (
                suite_name(value)
                if value.startswith("@")
                else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
            )
        if not NAME.fullmatch(name) or not source:
            raise InputError(
                f"{option} {value}: write NAME=VALUE; a name has letters, digits, '.', '_' and '-'"
            )
        if name in named:
            raise InputError(
                f"{option} {value}: the name {name!r} is used twice; write NAME={source}"
            )
        named[name] = source
    return named


# What a file of configs/prompts/ may leave open. `user` (a message), `prompt` (text to continue) or
# `turns` (a column with a chat, of which the first `keep_turns` are kept) makes a prompt of a row;
# `{column}`, `{column[key]}` and `{column[0]}` are filled in. Rows must match `where` and not
# repeat an earlier prompt; every `every`-th is taken, up to `prompts`.
_SUITE: dict[str, Any] = dict.fromkeys(("subset", "files", "user", "prompt", "turns"))
_SUITE |= {"keep_turns": 1, "where": {}, "every": 1}


def suite_names() -> list[str]:
    """All suites there are."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))


def suite_name(source: str) -> str:
    """The name in `@NAME` or `@NAME:FILE`."""
    return source.removeprefix("@").partition(":")[0]


def load_suite(name: str) -> SimpleNamespace:
    """Read a suite; InputError for an unknown name."""
    if name not in suite_names():
        raise InputError(
            f"@{name}: no such suite; "
            f"{nearest(f'@{name}', [f'@{suite}' for suite in suite_names()])}"
        )
    values = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"))
    return SimpleNamespace(**_SUITE | values, name=name)


def _suite_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The prompts of a suite, made of rows from the hub or, for `@NAME:FILE`, from a file with the
    same columns.
    """
    suite, file = load_suite(suite_name(source)), source.partition(":")[2]
    which = {"name": suite.subset, "data_files": suite.files}
    records = (
        iterate_records(file) if file else _hub_records(source, suite.dataset, suite.split, **which)
    )
    fitting = 0
    seen: set[str] = set()
    for record in records:
        row = _stored_row(record, file or source)
        try:
            if any(str(row[key]) not in allowed for key, allowed in suite.where.items()):
                continue
            if suite.turns is not None:
                turns = row[suite.turns][: suite.keep_turns]
                prompt = {"conversations" if turns and "from" in turns[0] else "messages": turns}
            elif suite.user is None:
                prompt = {"prompt": suite.prompt.format_map(row)}
            else:
                prompt = {
                    "messages": [{"role": "user", "content": suite.user.format_map(row).strip()}]
                }
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            reason = (
                f"lacks {error}, which suite {suite.name} reads; name a file without @{suite.name}"
            )
            raise InputError(f"{file or source}:{record.number}: {reason}") from None
        if repr(prompt) in seen:
            continue
        seen.add(repr(prompt))
        fitting += 1
        if (fitting - 1) % suite.every == 0:
            yield record.number, prompt
            if fitting > (suite.prompts - 1) * suite.every:
                return
