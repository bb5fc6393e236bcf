"""Finished measurements on disk, so that a killed evaluation continues where it was."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftsmith_core.io import hash_json, remove_leftovers, write_json_atomic
from draftsmith_core.processes import is_main

T = TypeVar("T", bound=Mapping[str, Any])

# Part of every name: raise it when a code change makes the same request measure something else.
MEASUREMENT_VERSION = 6


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
        if directory.is_dir() and is_main():
            remove_leftovers(directory)

    def get(self, request: dict[str, Any], measure: Callable[[], T]) -> T:
        """The kept outcome of `request`, or that of `measure()`, which is then kept."""
        return self.get_all({"": request}, lambda missing: {"": measure()})[""]

    def get_all(
        self, requests: Mapping[str, dict[str, Any]], measure: Callable[[list[str]], Mapping[str, T]]
    ) -> dict[str, T]:
        """The outcomes of several requests by name: those that are kept, and of the others what `measure(names)` gives
        in one go, which is then kept, each by itself.
        """
        outcomes: dict[str, T] = {}
        for name, asked in requests.items():
            kept = _read(self._path(asked))
            if kept is not None and kept.get("request") == json.loads(json.dumps(_versioned(asked))):
                outcomes[name] = kept["outcome"]
        self.reused += len(outcomes)
        if missing := [name for name in requests if name not in outcomes]:
            for name, outcome in measure(missing).items():
                if is_main():
                    kept = {"request": _versioned(requests[name]), "outcome": outcome}
                    write_json_atomic(self._path(requests[name]), kept)
                outcomes[name] = outcome
                self.measured += 1
        return {name: outcomes[name] for name in requests}

    def _path(self, request: dict[str, Any]) -> Path:
        return self.directory / f"{hash_json(_versioned(request))[:32]}.json"


def _versioned(request: dict[str, Any]) -> dict[str, Any]:
    return {"cell_version": MEASUREMENT_VERSION, **request}


def _read(path: Path) -> dict[str, Any] | None:
    """What is in the file, or None when it cannot be read (then it is measured again)."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) and "outcome" in value else None
