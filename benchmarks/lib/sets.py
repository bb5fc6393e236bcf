"""Rows of text from files, and records of what was made once."""

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from draftsmith.core.io import JsonObject, read_json, write_json_atomic
from draftsmith.core.prompt_rows import iterate_rows

ROOT = Path(__file__).resolve().parents[2]


def shuffled(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """In an order that depends on each row alone."""
    return sorted(rows, key=lambda row: hashlib.sha256(row["text"].encode()).digest())


def pieces(source: Path, characters: int = 400) -> list[dict[str, str]]:
    """Rows of text: of long ones every `characters`, of chats all turns together."""
    found = []
    for _, row in iterate_rows(str(source)):
        text = (
            row["text"]
            if "text" in row
            else "\n\n".join(turn["content"] for turn in row["messages"])
        )
        found += [
            text[i : i + characters]
            for i in range(0, max(1, len(text) - characters // 2), characters)
        ]
    return [{"text": text} for text in dict.fromkeys(found) if len(text) >= 100]


def once(path: Path, make: Callable[[], JsonObject]) -> JsonObject:
    """What `make` returned when it was first asked, with the seconds it took."""
    if not path.exists():
        started = time.perf_counter()
        busy = time.process_time()
        made = make()
        spent = {
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - busy,
        }
        write_json_atomic(path, made | {key: round(value, 2) for key, value in spent.items()})
    return read_json(path, "a record of this benchmark")
