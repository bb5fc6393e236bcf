"""Directories in stores that fsspec knows: s3://, gs://, abfs://, file://, memory:// and others.

A run works in a directory on this machine. Where its `--out` is in a store, that directory is a copy: it begins with
what is there, every part is sent as it is made, and at the end it is deleted. Objects of s3, gs and abfs appear whole
or not at all, and the manifest is the last. Keys are whatever the store's own package reads (environment variables,
files in the home directory).
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from huggingface_hub.constants import HF_HOME

from draftsmith_core.errors import InputError, RunError, one_line
from draftsmith_core.io import atomic_file
from draftsmith_core.processes import is_main, on_main
from draftsmith_core.run_directory import hold, this_run
from draftsmith_core.sources import is_url

# Copied last, so that a store that has it has everything.
_LAST = "manifest.json"
_LOCK = ".lock"
log = logging.getLogger(__name__)


def check_store(url: str) -> None:
    """Refuse, before any work is done, a store that cannot be written. Raises InputError."""
    _open(url, "copy_to")


def copied(directory: Path, url: str | None) -> dict[str, str]:
    """`{"copied_to": url}` for a run's summary, after copying the files directly in `directory`; empty without a URL.

    Every process calls it, the main one copies. Raises RunError in one line; what is on disk is not touched.
    """
    if url is None:
        return {}
    store, path = _open(url, "copy_to")

    def copy() -> None:
        with _storing(f"copy_to {url}", f"{directory} is complete, and the same command copies it again"):
            _put(store, path, _visible(directory))

    on_main(copy)
    return {"copied_to": url}


@dataclass
class Workplace:
    """Where a run of `--out` writes: that directory, or where `out` is a URL, the copy on this machine."""

    out: str
    directory: Path = field(init=False)
    _store: Any = field(init=False, default=None)
    _path: str = field(init=False, default="")
    _known: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        if not is_url(self.out):
            self.directory = Path(self.out)
            return
        self._store, self._path = _open(self.out, "--out")
        name = f"{Path(self._path).name}-{hashlib.sha256(self.out.encode()).hexdigest()[:12]}"
        self.directory = Path(HF_HOME) / "draftsmith" / name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs away (`hold`), with what is in the store at hand, and send it all when the block succeeds.

        A second run on this machine is refused by the lock of the directory. One on another machine is refused as long
        as the first one's lock file is in the store, which stays there when that run is killed.
        """
        with hold(self.directory):
            if self._store is None:
                yield
                return
            on_main(self._lock)
            try:
                on_main(self._fetch)
                yield
                self.send()
            except InputError as error:
                raise InputError(str(error).replace(str(self.directory), self.out)) from None
            finally:
                if is_main():
                    with contextlib.suppress(Exception):  # this machine's own lock file does not stop it
                        self._store.rm_file(f"{self._path}/{_LOCK}")
            on_main(lambda: shutil.rmtree(self.directory))

    def put(self, file: Path) -> None:
        """Send a file of the directory to the store, if there is one; the process that made it calls it."""
        if self._store is not None:
            with self._storing():
                _put(self._store, self._path, [file])

    def send(self) -> None:
        """Make the store have what the directory has; every process calls it, the main one sends."""
        if self._store is not None:
            on_main(self._send)

    def _storing(self) -> contextlib.AbstractContextManager[None]:
        return _storing(f"--out {self.out}", f"{self.directory} keeps what was made, and the same command continues")

    def _lock(self) -> None:
        lock, holder, here = f"{self._path}/{_LOCK}", {}, this_run()
        with _storing(f"--out {self.out}", "", InputError):
            self._store.makedirs(self._path, exist_ok=True)
            if self._store.exists(lock):
                with contextlib.suppress(ValueError):  # cut short
                    holder = json.loads(self._store.cat_file(lock))
            if holder.get("host", here["host"]) != here["host"]:
                raise InputError(
                    f"process {holder.get('pid')} on {holder['host']} has been writing it since {holder.get('started')}"
                    f"; wait for it, or if it was killed delete {self.out.rstrip('/')}/{_LOCK}"
                )
            # Not a copy of the directory's own: a process that closes that file gives up its lock.
            self._store.pipe_file(lock, json.dumps(here).encode())
        log.warning("--out %s: is made in %s and copied from there, part by part", self.out, self.directory)

    def _fetch(self) -> None:
        with self._storing():
            for name in self._there():
                # A part that is here is whole, and need not come again.
                if not (_is_part(name) and (self.directory / name).exists()):
                    with atomic_file(self.directory / name) as temporary:
                        self._store.get_file(f"{self._path}/{name}", str(temporary))

    def _there(self) -> dict[str, int]:
        """Names and sizes of the files in the store."""
        self._store.invalidate_cache()
        entries = self._store.ls(self._path, detail=True) if self._store.exists(self._path) else []
        files = {Path(each["name"]).name: int(each["size"]) for each in entries if each["type"] == "file"}
        there = {name: size for name, size in files.items() if not name.startswith(".")}
        self._known |= there.keys()
        return there

    def _send(self) -> None:
        with self._storing():
            there, here = self._there(), _visible(self.directory)
            parts = {each for each in here if _is_part(each.name) and there.get(each.name) == each.stat().st_size}
            _put(self._store, self._path, [each for each in here if each not in parts])
            for name in self._known - {each.name for each in here}:
                self._store.rm_file(f"{self._path}/{name}")


def _open(url: str, option: str) -> tuple[Any, str]:
    if not is_url(url):
        raise InputError(f"{option}: {url!r} is no URL of a store; write one such as s3://BUCKET/DIR")
    if url.startswith(("http://", "https://")):
        raise InputError(f"{option}: {url}: the web can be read only; name a directory, or a store such as s3://BUCKET")
    try:
        store, path = fsspec.core.url_to_fs(url)
    except (ImportError, OSError, ValueError) as error:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "abfs", "file"))
        hint = f"; stores are {known} and others of fsspec" if isinstance(error, ValueError) else ""
        raise InputError(f"{option}: {url}: {one_line(error)}{hint}") from None
    return store, path.rstrip("/")


def _put(store: Any, path: str, files: list[Path]) -> None:
    store.makedirs(path, exist_ok=True)
    for file in sorted(files, key=lambda file: (file.name == _LAST, file.name)):
        store.put_file(str(file), f"{path}/{file.name}")


def _visible(directory: Path) -> list[Path]:
    return [file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")]


def _is_part(name: str) -> bool:
    return name.startswith("part-")


@contextmanager
def _storing(what: str, advice: str, kind: type[Exception] = RunError) -> Iterator[None]:
    """`kind`, in one line, for what goes wrong in the block: a store's package has errors of its own."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {one_line(error)}" + (f"; {advice}" if advice else "")) from None
