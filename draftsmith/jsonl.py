"""Rows as JSON lines."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftsmith_core.io import write_text_atomic


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a .jsonl file, whole or not at all."""
    write_text_atomic(path, jsonl(rows))
