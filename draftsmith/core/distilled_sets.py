"""Finished distilled sets: their files, whole as the manifest describes them, and their rows."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, read_manifest, sha256_file


def set_file(directory: Path, part: JsonObject) -> Path:
    """Return the file of a part; InputError unless it is the one that the manifest describes."""
    path = directory / part["file"]
    if not path.is_file() or sha256_file(path) != part["sha256"]:
        raise InputError(
            f"{path}: is missing, or not the file in the manifest; copy the whole directory again"
        )
    return path


def set_rows(directory: str | Path, columns: list[str] | None = None) -> Iterator[JsonObject]:
    """Yield the rows of a set, one part in memory; InputError as `set_file`."""
    directory = Path(directory)
    for part in read_manifest(directory)["parts"]:
        yield from pq.read_table(set_file(directory, part), columns=columns).to_pylist()
