"""Finished measurements on disk, so that a killed evaluation continues where it was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftsmith_core.io import hash_json, remove_leftovers, write_json_atomic

T = TypeVar("T", bound=Mapping[str, Any])

# Part of every name: raise it when a code change makes the same request measure something else.
MEASUREMENT_VERSION = 4


class MeasurementCache:
    """One JSON file per measurement, named by the hash of everything that decides its outcome.

    A request that differs in any of it has another name, so that results of another configuration are never taken
    for this one's; they stay, and are used again when that configuration comes back.
    """

    def __init__(self, directory: Path) -> None:
        """Keep measurements in `directory`; it is made with the first of them."""
        self.directory = directory
        self.reused = 0
        self.measured = 0
        if directory.is_dir():
            remove_leftovers(directory)

    def get(self, request: dict[str, Any], measure: Callable[[], T]) -> T:
        """The kept outcome of `request`, or that of `measure()`, which is then kept."""
        request = {"cell_version": MEASUREMENT_VERSION, **request}
        path = self.directory / f"{hash_json(request)[:32]}.json"
        kept = _read(path)
        if kept is not None and kept.get("request") == json.loads(json.dumps(request)):
            self.reused += 1
            outcome: T = kept["outcome"]
            return outcome
        outcome = measure()
        write_json_atomic(path, {"request": request, "outcome": outcome})
        self.measured += 1
        return outcome


def _read(path: Path) -> dict[str, Any] | None:
    """What is in the file, or None when it cannot be read (then it is measured again)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) and "outcome" in value else None
