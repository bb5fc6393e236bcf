"""Rows of text from files, and records of what was made once."""

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from draftsmith.core.io import JsonObject, read_json, write_json_atomic
from draftsmith.core.prompt_rows import iterate_rows


def shuffled(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """In an order that depends on each row alone."""

    def mark(row: dict[str, str]) -> bytes:
        text = row["text"].encode()
        return hashlib.sha256(text).digest()

    return sorted(rows, key=mark)


def pieces(source: Path, characters: int = 400) -> list[dict[str, str]]:
    """Rows of text: of long ones every `characters`, of chats all turns together."""
    found = []
    for row in iterate_rows(str(source)):
        turns = [row["text"]] if "text" in row else [turn["content"] for turn in row["messages"]]
        text = "\n\n".join(turns)
        end = max(1, len(text) - characters // 2)
        found += [text[i : i + characters] for i in range(0, end, characters)]
    return [{"text": text} for text in dict.fromkeys(found) if len(text) >= 100]


def once(path: Path, make: Callable[[], JsonObject]) -> JsonObject:
    """What `make` returned when it was first asked, with the seconds it took."""
    if not path.exists():
        started = time.perf_counter()
        busy = time.process_time()
        made = make()
        made["seconds"] = round(time.perf_counter() - started, 2)
        made["processor_seconds"] = round(time.process_time() - busy, 2)
        write_json_atomic(path, made)
    return read_json(path, "a record of this benchmark")
