"""What a run writes belongs to that run: one at a time, and only a run of the same options continues it.

with hold(out, "--out"):                              # no other run writes here at the same time
    continued = claim(out, identity, what="distilled set")      # and what is there is of the same run
    ...
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import sys
import threading
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

# A run that holds a lock touches its file this often. Three times that without a touch, on another machine, is dead.
_HEARTBEAT_S = 20.0
# Record locks belong to the process: a second run inside this one would be given the lock again.
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

    def take() -> None:
        nonlocal descriptor
        make_dir(path.parent, option)
        try:
            descriptor = _lock(path, f"{option} {out}")
        except OSError as error:
            raise InputError(f"{option} {out}: cannot be written ({error.strerror})") from None

    on_main(take)
    done = threading.Event()
    if descriptor is not None:
        threading.Thread(target=_touch, args=(path, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody deleted it, or the whole directory
                path.unlink()
            os.close(descriptor)
            _held.discard(path.resolve())


def _lock(path: Path, out: str) -> int | None:
    """Take the lock; an open file descriptor, or None where the file system has no locks."""
    if path.resolve() in _held:
        raise InputError(f"{out}: another run in this process is writing it; choose another")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno in (EACCES, EAGAIN):
                raise _busy(out, holder) from None
            log.warning("%s: its file system has no locks (%s); start no second run there", out, error.strerror)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # the run that held it has just ended and taken the file away; try again
    try:
        _wait_for_other_machine(path, out, _holder(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    text = json.dumps(
        {
            "host": socket.gethostname(),
            "boot": _boot(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    _held.add(path.resolve())
    return descriptor


def _holder(descriptor: int) -> dict[str, Any]:
    """What a lock file says of its holder; empty for a new file, or one whose writing was cut short."""
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _busy(out: str, holder: Mapping[str, Any]) -> InputError:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
    since = f" since {holder['started']}" if "started" in holder else ""
    return InputError(f"{out}: {who} has been writing it{since}; wait for it, stop it, or choose another")


def _boot() -> str:
    """Tells one running kernel from another where Linux says so: containers have host names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _wait_for_other_machine(path: Path, out: str, holder: Mapping[str, Any]) -> None:
    """InputError when the holder named in a lock file that could be locked is alive on another machine.

    Some network file systems lock within one machine only. There the file's modification time tells.
    """
    same = holder.get("host") == socket.gethostname() or (holder.get("boot") and holder.get("boot") == _boot())
    if not holder or same:
        return
    seconds = 3 * _HEARTBEAT_S
    sys.stderr.write(
        f"{out}: was being written by process {holder.get('pid')} on {holder.get('host')}; "
        f"waiting {seconds:.0f} s to see whether it still is\n"
    )
    before, end = path.stat().st_mtime_ns, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(_HEARTBEAT_S / 10)
        if path.stat().st_mtime_ns != before:
            raise _busy(out, holder)


def _touch(path: Path, done: threading.Event) -> None:
    while not done.wait(_HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(path)


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
