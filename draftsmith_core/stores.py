"""Copying a finished directory to a store that fsspec knows: s3://, gs://, abfs://, file://, memory:// and others.

Keys are whatever the store's own package reads (environment variables, files in the home directory).
"""

from pathlib import Path
from typing import Any

import fsspec

from draftsmith_core.errors import InputError, RunError
from draftsmith_core.processes import on_main

# Copied last, so that a store that has it has everything.
_LAST = "manifest.json"


def check_store(url: str) -> None:
    """Refuse, before any work is done, a store that cannot be written. Raises InputError."""
    _open(url)


def _open(url: str) -> tuple[Any, str]:
    if "://" not in url:
        raise InputError(f"copy_to: {url!r} is no URL of a store; write one such as s3://BUCKET/DIR")
    try:
        store, path = fsspec.core.url_to_fs(url)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(f"copy_to: {url}: {' '.join(str(error).split())}") from None
    return store, path


def copied(directory: Path, url: str | None) -> dict[str, str]:
    """`{"copied_to": url}` for a run's summary, after copying the files directly in `directory`; empty without a URL.

    Every process calls it, the main one copies. Raises RunError in one line; what is on disk is not touched.
    """
    if url is None:
        return {}
    on_main(lambda: _copy(directory, url))
    return {"copied_to": url}


def _copy(directory: Path, url: str) -> None:
    store, path = _open(url)
    files = [file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")]
    try:
        store.makedirs(path, exist_ok=True)
        for file in sorted(files, key=lambda file: (file.name == _LAST, file.name)):
            store.put_file(str(file), f"{path.rstrip('/')}/{file.name}")
    # A store's package has errors of its own.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(
            f"copy_to {url}: {reason}; {directory} is complete, and the same command copies it again"
        ) from None
