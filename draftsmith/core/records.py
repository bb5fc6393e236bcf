"""Records of what made an artifact, and whether two of them agree.

`run.json` is in every directory that a command writes: command, options, versions, inputs and
progress. `draftsmith.json` stands beside the weights of a draft.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from draftsmith.core import __version__
from draftsmith.core.errors import InputError, without_secrets
from draftsmith.core.io import JsonObject, first_damaged, read_json, write_sealed
from draftsmith.core.ranks import from_each, is_main, on_main

RUN = "run.json"
RECORD = "draftsmith.json"
"""Beside the weights of a draft: how it was made."""
RESULTS_SCHEMA = 8
"""Of the results.json of an evaluation."""
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


def read_run(directory: Path) -> JsonObject:
    """The record of the run that began in a directory, empty if none did. Its keys: stage, command,
    identity, inputs, paths, versions, progress (unit, done, of), finished.
    """
    file = directory / RUN
    if not file.exists():
        return {}
    what = "the record of a run; delete this directory, or choose another --out"
    return read_json(file, what, ["identity"])


def note(directory: Path, **values: object) -> None:
    """Set values of a run's record, in the main process."""
    if is_main():
        record = read_run(directory)
        if record and record | values != record:
            write_sealed(directory / RUN, record | values)


def note_progress(directory: Path, unit: str, done: int, of: int | None) -> None:
    """Record how far a run is; one that has more to do is not finished."""
    begun = {} if done == of else {"finished": False}
    note(directory, progress={"unit": unit, "done": done, "of": of}, **begun)


def paths_of(values: Iterable[object], directory: Path) -> dict[str, str]:
    """The local paths in values of options or words of a command, as given, by where they lie from
    a directory.
    """
    paths = {}
    for value in values:
        for part in _tails(str(value)):
            if os.path.exists(part):
                paths[part] = os.path.relpath(part, directory)
                break
    return paths


def path_now(value: str, record: JsonObject, directory: Path) -> str:
    """Return a value that may hold a path of a run's record, as it is now: the run may have been
    moved, or is read from another working directory.
    """
    for part in _tails(value):
        if part in record["paths"]:
            moved = os.path.normpath(directory / record["paths"][part])
            return value.removesuffix(part) + moved if os.path.exists(moved) else value
    return value


def _tails(value: str) -> Iterator[str]:
    """A value, and what stands behind a name or a kind: NAME=PATH, kind:PATH, kind+PATH."""
    yield value
    for mark in re.finditer("[=:+]", value):
        yield value[mark.end() :]


def agree(identity: JsonObject) -> None:
    """Raise InputError in every process, naming the first key that differs, if one has another
    identity than the main process.
    """
    main, *others = from_each(lambda: identity)

    def compare() -> None:
        for rank, other in enumerate(others, 1):
            where = f"on rank {rank}"
            if differs := difference(main, other, f"{where} it is", f"differs {where}"):
                alike = "give every process the same options, files and versions"
                raise InputError(f"{differs}; {alike}")

    on_main(compare)


def difference(
    recorded: JsonObject,
    current: JsonObject,
    now: str = "now it is",
    changed: str = "changed since",
) -> str | None:
    """The first key (dotted) in which two identities differ, with both values; None if they
    agree.

    now, changed: words before the current value, and for hashes, which say nothing.
    """
    for key in sorted(recorded.keys() | current.keys()):
        a = recorded.get(key)
        b = current.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = difference(a, b, now, changed)
            if inner is not None:
                return f"{key}.{inner}".removeprefix("config.")
        elif a != b:
            if _HASH.fullmatch(str(a)) and _HASH.fullmatch(str(b)):
                return f"{key.replace('_', ' ')} {changed}"
            return f"{key} is {_shown(a)}, {now} {_shown(b)}"
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def provenance(command: str, config: JsonObject) -> JsonObject:
    """Where an artifact came from, without secrets or times: equal runs write equal bytes."""
    origin: JsonObject = without_secrets({"command": command, "config": config})
    return origin | {"versions": versions(), "git_commit": git_commit()}


def versions() -> dict[str, str]:
    """Versions of Python, of this project and of the libraries that decide its numbers."""
    installed = {"python": platform.python_version(), "draftsmith": __version__}
    for package in _PACKAGES:
        # `datasets` may be absent.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def git_commit() -> str | None:
    """Commit of the checkout that this code runs from, with `+` if it has changes; None outside a
    checkout.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        return described.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def check_weights(checkpoint: Path) -> None:
    """Raise InputError if weights of a draft that this project made are not what was written."""
    digests = read_record(checkpoint).get("files", {})
    weights = {name: digests[name] for name in digests if name.endswith(".safetensors")}
    if damaged := first_damaged(checkpoint, weights):
        raise InputError(
            f"{checkpoint / damaged}: is not what was written; copy or make the draft again"
        )


def read_record(checkpoint: Path, keys: Sequence[str] = ()) -> JsonObject:
    """The record of a draft that this project made, with these keys; empty for others."""
    path = checkpoint / RECORD
    return read_json(path, "the record of a draft checkpoint", keys) if path.is_file() else {}
