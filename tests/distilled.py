"""What the tests of `distill` share: rows and files of a set."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows_of(directory: Path | str = "set") -> list[dict[str, Any]]:
    return [
        row
        for path in sorted(Path(directory).glob("part-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def files(directory: Path | str = "set", pattern: str = "*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).glob(pattern)}


def manifest(directory: Path | str = "set") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(directory, "manifest.json").read_text())
    return content


def errors(directory: Path | str = "set") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(directory, "errors.jsonl").read_text().splitlines()]


def write_rows(path: Path | str, *rows: Any) -> str:
    """Write a JSONL file; bytes and texts are lines as they are."""
    texts = (
        row if isinstance(row, bytes | str) else json.dumps(row, ensure_ascii=False) for row in rows
    )
    lines = (text if isinstance(text, bytes) else text.encode() for text in texts)
    Path(path).write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)
