"""Where an artifact came from: command, configuration, versions, commit. No times: equal runs write equal bytes."""

import dataclasses
import importlib.metadata
import json
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import draftsmith_core
from draftsmith_core.io import read_json

# Beside the weights of a draft: how it was made.
RECORD = "draftsmith.json"
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, of this project and of the libraries that decide its numbers."""
    found = {"python": platform.python_version(), "draftsmith": draftsmith_core.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # `datasets` may be absent where only decoding is done
    return found


def git_commit() -> str | None:
    """Commit of the checkout this code runs from (with `+` when it has changes), or None outside a checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def command_line(command: str, config: Any) -> str:
    """The command line that asks for what an options dataclass holds; options at their defaults are left out."""
    return shlex.join(["draftsmith", command, *_words(config, "")])


def _words(config: Any, prefix: str) -> list[str]:
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value):
            words += _words(value, f"{prefix}{field.name}.")
        elif value != default:
            words += [f"--{prefix}{field.name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def provenance(command: str, config: dict[str, Any]) -> dict[str, Any]:
    """The part of every artifact's metadata that says how it was made."""
    return {"command": command, "config": config, "versions": versions(), "git_commit": git_commit()}


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The record of a draft that this project made; empty for others."""
    path = checkpoint / RECORD
    return read_json(path, "the record of a draft checkpoint") if path.is_file() else {}


def difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """The first key (dotted) in which two records of runs differ, with both values; None when they agree."""
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = difference(a, b)
            if inner is not None:
                return f"{key}.{inner}".removeprefix("config.")
        elif a != b:
            return f"{key} is {_short(a)}, now it is {_short(b)}"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
