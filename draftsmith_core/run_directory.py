"""What a run writes belongs to that run: one at a time, and only a run of the same options continues it.

with hold(out):                                           # no other run writes here at the same time
    continued = claim(out, identity, what="distilled set")  # and what is there is of the same run
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.io import make_dir, read_json, remove_leftovers, write_json_atomic
from draftsmith_core.processes import Terminated, on_main
from draftsmith_core.provenance import difference

log = logging.getLogger(__name__)

# Record locks belong to the process, so the kernel would give a second run inside this one the same lock.
_held: set[Path] = set()


@contextmanager
def hold(out: Path, option: str = "--out", *, file: bool = False) -> Iterator[None]:
    """Keep other runs away from the directory `out` (made where it is missing) or `file` `out` while the block runs.

    Every process of a launch calls it; the main one locks. The lock is the kernel's, on `.lock` in the directory or
    `.NAME.lock` beside the file, so it ends with its process however that ends, and what a killed run left does not
    stop the next one. Raises InputError, in every process, that names host and process id of the run that holds it.
    """
    path = out.with_name(f".{out.name}.lock") if file else out / ".lock"
    descriptor: int | None = None
    made: list[Path] = []

    def take() -> None:
        nonlocal descriptor, made
        made = [each for each in (path.parent, *path.parent.parents) if not each.exists()]
        make_dir(path.parent, option)
        try:
            descriptor = _lock(path, f"{option} {out}")
        except OSError as error:
            raise InputError(f"{option} {out}: cannot be written ({error.strerror})") from None

    on_main(take)
    try:
        yield
        made = []
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            _held.discard(path.resolve())
        # A run that was refused leaves no directory in which there is nothing.
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()


def _lock(path: Path, out: str) -> int | None:
    """Take the lock; an open file descriptor, or None where the file system has no locks."""
    if path.resolve() in _held:
        raise InputError(f"{out}: another run in this process is writing it; choose another")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        holder = _holder(descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (EACCES, EAGAIN):
                raise InputError(
                    f"{out}: process {holder.get('pid')} on {holder.get('host')} has been writing it since "
                    f"{holder.get('started')}; wait for it, stop it, or choose another"
                ) from None
            log.warning("%s: its file system has no locks (%s); start no second run there", out, error.strerror)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # the run that held it has just ended and deleted the file; try again
    here = this_run()
    if holder.get("host", here["host"]) != here["host"]:
        # Locks of some network file systems end at the machine; on all others this run has the right to go on.
        pid, there = holder.get("pid"), holder["host"]
        log.warning("%s: was being written by process %s on %s; make sure that it has ended", out, pid, there)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(here).encode(), 0)
    _held.add(path.resolve())
    return descriptor


def this_run() -> dict[str, Any]:
    """What a lock file says of the run that holds it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}


def _holder(descriptor: int) -> dict[str, Any]:
    """What a lock file says of its holder; empty for a new file, or one whose writing was cut short."""
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def claim(
    directory: Path,
    identity: Mapping[str, Any],
    *,
    what: str,
    option: str = "--out",
    records: Sequence[str] = ("run.json",),
    advice: Mapping[str, str] | None = None,
) -> bool:
    """Make `directory` this run's own, or make sure it is. True when a run of this identity is there already.

    identity: everything that decides what comes out; JSON. what: the artifact, for messages. records: files that hold
    an identity; a new run writes the last of them. advice: what to do when a key of the identity differs.
    Raises InputError that names the first key that differs, with both values.
    """
    make_dir(directory, option)
    remove_leftovers(directory)
    # What is compared is what was written: JSON turns tuples into lists.
    here = json.loads(json.dumps(dict(identity)))
    for name in records:
        if (directory / name).exists():
            record = read_json(directory / name, f"the record of a {what}")
            there = record.get("identity", record)  # training runs used to be recorded without the key
            differs = difference(there, here)
            if differs is None:
                return True
            fix = (advice or {}).get(differs.split(" ")[0], "delete the directory")
            raise InputError(
                f"{option} {directory}: holds another {what}: its {differs}; choose another {option} or {fix}"
            )
    write_json_atomic(directory / records[-1], {"identity": here})
    return False


@contextmanager
def keeping(kept: Callable[[], bool]) -> Iterator[None]:
    """Put a note on Ctrl-C and SIGTERM in the block that says whether the same command will find something done.

    The front door prints the note. kept: whether anything is on disk that a second run would not do again.
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        stop.add_note("the same command continues where it was" if kept() else "nothing was kept")
        raise
