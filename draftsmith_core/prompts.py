"""Prompts as every command reads them: JSONL, Parquet or a dataset on the hub, tokenised; every row is counted."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub.constants import HF_HUB_OFFLINE

from draftsmith_core.errors import InputError
from draftsmith_core.io import canonical_json
from draftsmith_core.sources import hub_has_address
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text

log = logging.getLogger(__name__)

# Beside the weights of a checkpoint: hashes of the prompts it was trained on.
PROMPT_HASHES = "prompt_hashes.npy"
KEYS = ("messages", "prompt", "text", "conversations", "instruction")
# Keys of a row that other tools would put into the prompt, and that are not read here.
_CONTEXT = ("system", "tools", "functions", "documents", "images", "image", "audio", "video", "videos")


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised. `id` is the row's own or a hash of its content."""

    id: str
    domain: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Skipped:
    """A row that was read and not used, and why."""

    row: int
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """What a prompt source held. `len(prompts) + len(skipped) == rows`; no row is dropped in silence.

    more: whether it has rows beyond those that were asked for. from_text: how many rows were `text`.
    """

    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]
    rows: int
    more: bool = False
    from_text: int = 0

    @property
    def digest(self) -> str:
        """sha256 over ids, domains and tokens: equal for equal prompts, however they were stored."""
        text = canonical_json([[p.id, p.domain, list(p.ids)] for p in self.prompts])
        return hashlib.sha256(text.encode()).hexdigest()


def skip_reasons(skipped: Sequence[Skipped]) -> list[str]:
    """One line per reason for which rows were skipped: how many rows, and the first of them with its own figures."""
    first: dict[str, Skipped] = {}
    counts: Counter[str] = Counter()
    for skip in skipped:
        reason = re.sub(r"\d+", "N", skip.reason)
        first.setdefault(reason, skip)
        counts[reason] += 1
    return [
        f"{counts[reason]} skipped: {skip.reason} (row {skip.row}{', the first' if counts[reason] > 1 else ''})"
        for reason, skip in first.items()
    ]


def read_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    domain: str = "default",
    prompt_tokens: int = 32,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> PromptSet:
    """Read `source` (a .jsonl/.json/.parquet file, or `owner/name[:split]` on the hub) into prompts.

    A row has `messages` (chat; a final assistant turn is dropped), or `prompt`, or `text` (its first
    `prompt_tokens` tokens are the prompt); optional `id` and `domain`. Rows in the formats of ShareGPT and Alpaca are
    read as `messages`, see `iterate_rows`. Rows that are empty, too short for that or longer than `max_tokens` are
    skipped with their reason. A row without an `id` gets a hash of its tokens, with
    its count where the same prompt came before. `limit` stops after that many rows. Raises InputError that names
    file, line and key for a row that cannot be understood.
    """
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    named: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    unread: dict[str, int] = {}
    rows = from_text = 0
    more = False
    for number, row in iterate_rows(source):
        if more := limit is not None and rows >= limit:
            break
        rows += 1
        for name in _unread(row):
            unread.setdefault(name, number)
        where = f"{source}:{number}"
        from_text += next((key for key in KEYS if row.get(key) is not None), None) == "text"
        ids, short = _encode(row, where, tokenizer, prompt_tokens)
        key = _string(row, "id", where)
        if key in named:
            raise InputError(f"{where}: key 'id': {key!r} is row {named[key]}'s already; make ids unique")
        if key:
            named[key] = number
        else:
            key = content_id(ids, repeats)
        if short or not ids:
            skipped.append(Skipped(number, short or "empty prompt"))
        elif max_tokens is not None and len(ids) > max_tokens:
            skipped.append(Skipped(number, f"{len(ids)} tokens, more than the {max_tokens} that fit"))
        else:
            prompts.append(Prompt(key, _string(row, "domain", where) or domain, tuple(ids)))
    if unread:
        names = ", ".join(f"{name} (first in row {number})" for name, number in unread.items())
        log.warning("%s: its rows hold %s; the prompts are made without them", source, names)
    if not rows:
        raise InputError(f"{source}: holds no rows; a row needs one of the keys {', '.join(KEYS)}")
    if not prompts:
        raise InputError(f"{source}: none of its {rows} rows can be used (row {skipped[0].row}: {skipped[0].reason})")
    return PromptSet(source, tuple(prompts), tuple(skipped), rows, more, from_text)


def content_id(ids: list[int], repeats: Counter[str]) -> str:
    """The id of a prompt that has none: a hash of its tokens, with its count where it came before (in `repeats`)."""
    content = hashlib.sha256(canonical_json(ids).encode()).hexdigest()[:16]
    repeats[content] += 1
    return content if repeats[content] == 1 else f"{content}-{repeats[content]}"


def prompt_hash(ids: Sequence[int]) -> int:
    """64 bits that tell a tokenised prompt from others: the start of the sha256 of its ids as 32-bit integers."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()[:8], "big")


def write_prompt_hashes(directory: Path, hashes: Iterable[int]) -> None:
    """Keep beside a checkpoint which prompts it was trained on, sorted, eight bytes each, without their text."""
    np.save(directory / PROMPT_HASHES, np.unique(np.fromiter(hashes, dtype=np.uint64)))


def read_prompt_hashes(checkpoint: Path) -> npt.NDArray[np.uint64] | None:
    """What `write_prompt_hashes` kept; None for other checkpoints. InputError for a file that is broken."""
    path = checkpoint / PROMPT_HASHES
    if not path.is_file():
        return None
    try:
        hashes = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError):
        raise InputError(f"{path}: is broken; delete it, or copy it from the checkpoint again") from None
    found: npt.NDArray[np.uint64] = hashes
    return found


def _unread(row: dict[str, Any]) -> list[str]:
    """What a row holds that could be meant for the prompt and is not read: a second text, images, tools."""
    present = [key for key in KEYS if row.get(key) is not None]
    found = present[1:] + [key for key in _CONTEXT if row.get(key)]
    turns: Any = row.get("messages") if isinstance(row.get("messages"), list) else []
    for turn in turns:
        if isinstance(turn, dict) and not (turn is turns[-1] and turn.get("role") == "assistant"):
            found += [f"messages.{key}" for key, value in turn.items() if key not in ("role", "content") and value]
    return found


def iterate_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of a JSONL/JSON-lines file, a Parquet file, or a dataset on the hub.

    Rows as ShareGPT has them (`conversations`: `from` and `value`) or Alpaca (`instruction`, `input`, `output`) come
    with `messages` in their place.
    """
    for number, row in _rows(source):
        yield number, _as_messages(row, f"{source}:{number}")


def _as_messages(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row with `messages` in place of the keys of ShareGPT or Alpaca; any other row as it is."""
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
        asked = "\n\n".join(part for key in ("instruction", "input") if (part := _string(row, key, where).strip()))
        output = _string(row, "output", where)
        answer = [{"role": "assistant", "content": output}] if output else []
        return kept | ({"messages": [{"role": "user", "content": asked}, *answer]} if asked else {"prompt": ""})
    return row


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


def _rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    path = Path(source)
    if not source.strip():
        raise InputError(f"{source!r}: is empty; name a .jsonl or .parquet file, or a dataset on the hub")
    if "://" in source:
        raise InputError(f"{source}: is a URL; download it and name the file")
    if path.is_dir():
        raise InputError(f"{source}: is a directory; name a .jsonl or .parquet file in it")
    if path.is_file():
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix in (".jsonl", ".json", ".ndjson"):
            yield from _jsonl_rows(path)
        else:
            raise InputError(f"{source}: unknown kind of file {path.suffix!r}; use .jsonl or .parquet")
    elif path.suffix in (".jsonl", ".json", ".ndjson", ".parquet") or source.startswith((".", "/", "~")):
        raise InputError(f"{source}: no such file")
    else:
        yield from _hub_rows(source)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # as editors on Windows save it, with a byte order mark
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(
                        f"{path}:{number}: a row must be a JSON object with one of the keys {', '.join(KEYS)}"
                    )
                yield number, row
    except RecursionError:
        raise InputError(f"{path}:{number}: nested too deeply to be a row") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not valid JSON ({error.msg}); write one object a line") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a readable Parquet file ({reason})") from None


def _hub_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    name, _, split = source.partition(":")
    if not HF_HUB_OFFLINE and not hub_has_address():
        raise InputError(f"{source}: no such file, and the hub cannot be reached")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        yield from enumerate(rows, 1)
    except Exception as error:
        # The hub's client raises many kinds of error; for the user all mean that there is no such data set.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{source}: neither a file here nor a dataset that the hub gives ({reason}); "
            f"check the path, or write owner/name:split"
        ) from None


def _string(row: dict[str, Any], key: str, where: str) -> str:
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


def _encode(row: dict[str, Any], where: str, tokenizer: Tokenizer, prompt_tokens: int) -> tuple[list[int], str]:
    """Tokens of a row, and the reason to skip it ('' when there is none)."""
    present = [key for key in KEYS if row.get(key) is not None]
    if not present:
        found = ", ".join(map(repr, row)) or "nothing"
        raise InputError(f"{where}: needs one of the keys {', '.join(KEYS)}; found {found}")
    key = present[0]
    value = row[key]
    if key == "messages":
        return encode_messages(tokenizer, check_messages(value, where), where), ""
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, found {type(value).__name__}")
    whole(value, key, where)
    if not value.strip():
        return [], f"key {key!r} is empty"
    if key == "prompt":
        return encode_text(tokenizer, value), ""
    # Enough characters for `prompt_tokens` tokens in nearly all cases, so that a book is not tokenised for its start.
    start = value[: 64 + 16 * prompt_tokens]
    ids = encode_text(tokenizer, start)[:prompt_tokens]
    if len(ids) < prompt_tokens and len(start) < len(value):
        ids = encode_text(tokenizer, value)[:prompt_tokens]
    short = f"text has only {len(ids)} of {prompt_tokens} tokens" if len(ids) < prompt_tokens else ""
    return ids, short


def check_messages(value: Any, where: str) -> list[dict[str, str]]:
    """The messages that make the prompt (a final assistant turn dropped), or InputError naming the key."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: key 'messages': expected a list of {{role, content}} objects")
    messages: list[dict[str, str]] = []
    for index, message in enumerate(value):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise InputError(f"{where}: key 'messages[{index}].role': expected text such as 'user'")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{where}: key 'messages[{index}].content': expected text")
        whole(message["content"], f"messages[{index}].content", where)
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{where}: key 'messages': holds only an assistant turn; the prompt is missing")
    return messages
