"""Where results come from: the command, its options, versions and the commit."""

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from draftsmith.core import __version__
from draftsmith.core.errors import without_secrets
from draftsmith.core.io import JsonObject

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


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
