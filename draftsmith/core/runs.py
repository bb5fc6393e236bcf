"""A run of a command: it locks its directory, and resumes what a killed run left.

    with Run(out) as run:  # SIGTERM and Ctrl-C end the block with a note
        ...  # load and check; nothing is written yet
        run.begin("train", identity, command)  # lock, write run.json; or InputError
        answer = run.step("cells/abc.json", make)  # the object that make() gave, read from the file
        part = run.step("part-00000.parquet", make)  # the file, or make(temporary path)
        draft = run.step("start/", make)  # the directory, or make(temporary directory)
        with run.journal(".rows.jsonl") as journal:  # rows appended one by one
            journal.rows, journal.append(row)
        run.finish("steps", 8)

A step is written whole (temporary name, fsync, rename), so the next run finds each step finished or
missing. A damaged step is named in a warning and made again. With
several processes, `who` says which of them make a step: "main" (the others wait) or "all" (every
process calls `make`, the main one writes).
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from draftsmith.core.errors import ChangedError, InputError, without_secrets
from draftsmith.core.hub import quiet
from draftsmith.core.io import (
    Damaged,
    JsonObject,
    atomic_dir,
    canonical_json,
    check_spelling,
    is_whole,
    kept_json,
    make_dir,
    parse_line,
    read_json,
    remove_empty,
    remove_leftovers,
    sealed_file,
    sealed_line,
    write_sealed,
    writing,
)
from draftsmith.core.launcher import as_typed, without_fsdp_variable
from draftsmith.core.ranks import check_launcher, from_each, from_main, leads_group, on_main
from draftsmith.core.records import (
    RUN,
    agree,
    difference,
    note,
    note_progress,
    paths_of,
    read_run,
    versions,
)
from draftsmith.core.signals import StopSignal, Terminated, terminable

log = logging.getLogger(__name__)

_STEP = "a finished step"
_LOCK = ".draftsmith-lock"
# Seconds until a file server shows one node the new file of another.
_SHOWN_S = 35.0


class Run:
    """What one command writes to `out`, a directory or (`file=True`) one file. See the module."""

    stop: StopSignal

    def __init__(self, out: Path | str, *, file: bool = False) -> None:
        self.out = Path(out)
        check_spelling(self.out)
        self._file = file
        self.directory = self.out.parent if file else self.out
        self.resumed = False
        self._locked = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_launcher()
        self.stop = self._stack.enter_context(terminable())
        self._stack.enter_context(without_fsdp_variable())
        self._stack.enter_context(quiet())
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt | Terminated):
            error.add_note("run the same command again to resume")
        self._stack.close()

    def lock(self) -> None:
        """Lock `out`, if it is not locked yet; see `hold`."""
        if not self._locked:
            self._stack.enter_context(hold(self.out, file=self._file))
        self._locked = True

    def begin(
        self,
        stage: str,
        identity: Mapping[str, object],
        command: str,
        inputs: JsonObject,
        *,
        replace: bool = False,
    ) -> bool:
        """Lock `out` and claim it; return whether this resumes a run. See `hold` and `claim`. Raise
        InputError if a process has another identity.
        """
        agree(dict(identity))
        self.lock()
        self.resumed = from_main(
            lambda: claim(self.out, stage, identity, command, inputs, replace=replace)
        )
        return self.resumed

    def progress(self, unit: str, done: int, of: int | None = None) -> None:
        """Record how far the run is."""
        note_progress(self.out, unit, done, of)

    def finish(self, unit: str, done: int) -> None:
        """Record that the run is finished."""
        note(self.out, progress={"unit": unit, "done": done, "of": done}, finished=True)

    def finished(self, name: str) -> bool:
        """Whether the step `name` is finished; one that is damaged is deleted, with a warning."""
        path = self.directory / name
        if name.endswith(".json"):
            return bool(kept_json(path, _STEP))
        return path.is_dir() or is_whole(path)

    def step(
        self, name: str, make: Callable[..., Any], *, who: Literal["main", "all"] = "main"
    ) -> Any:
        """Return the finished step `name`, or make it.

        If `name` ends in `.json`, save and return the object `make()`. Otherwise
        `make(temporary)` fills the file or directory (`NAME/`), and its path is returned.
        """
        path = self.directory / name
        is_json = name.endswith(".json")

        def write(make: Callable[..., Any] = make) -> None:
            if self.finished(name):
                return
            with writing(path):
                if is_json:
                    write_sealed(path, make())
                    return
                whole = atomic_dir if name.endswith("/") else sealed_file
                with whole(path) as temporary:
                    make(temporary)

        if who == "main" or from_main(lambda: self.finished(name)):
            on_main(write)
        else:
            value = make()
            on_main(lambda: write(lambda: value))
        return read_json(path, _STEP) if is_json else path

    def journal(self, name: str, head: object = None) -> "Journal":
        """Open a file of rows that are appended one by one. A journal with another `head` is
        started anew.
        """
        return Journal(self.directory / name, head)


class Journal(contextlib.AbstractContextManager["Journal"]):
    """JSON rows in a file. `rows` has those of an earlier run. A line that a kill cut short is
    dropped; so are, with a warning, a damaged line and those after it.
    """

    def __init__(self, path: Path, head: object = None) -> None:
        # Processes that hold a target together read the same rows, and one writes.
        self.path = path if leads_group() else Path(os.devnull)
        lines, self.rows = _whole_lines(path)
        first = [] if head is None else [_json_line(head)]
        if lines[: len(first)] != first:
            lines = []
            self.rows = []
        del self.rows[: len(first)]
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            if leads_group():
                self._file.truncate(sum(map(len, lines)))
            if not lines:
                self._file.writelines(first)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def append(self, row: object) -> None:
        with writing(self.path):
            self._file.write(_json_line(row))
            self._file.flush()

    def remove(self) -> None:
        self.close()
        if leads_group():
            self.path.unlink(missing_ok=True)


def _whole_lines(path: Path) -> tuple[list[bytes], list[Any]]:
    """Return the lines of a journal up to a damaged one, and their values."""
    data = path.read_bytes() if path.exists() else b""
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_line(line))
        except Damaged:
            log.warning("%s:%d: is damaged; making again what it kept from there on", path, number)
            break
    return lines[: len(rows)], rows


def _json_line(value: object) -> bytes:
    return sealed_line(canonical_json(value).encode())


@contextmanager
def hold(out: Path, *, file: bool = False) -> Iterator[None]:
    """Lock the directory (or `file`) `out` while the block runs; make the directory if it is
    missing, and remove it again if the block leaves it empty.

    Every process of a launch calls it, and the main one locks. The lock is the kernel's, so it ends
    with its process. If another run holds the lock, raise InputError in every process, with its
    host and process id; likewise if a process does not see the lock, because `out` is not shared.
    """
    path = out.with_name(f".{out.name}{_LOCK}") if file else out / _LOCK
    descriptors: list[int] = []
    made: list[Path] = []

    def lock() -> bytes:
        made.extend(make_dir(path.parent))
        with writing(out):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise InputError(
                f"--out {out}: {holder or 'another run'} is writing it; wait for it, or choose "
                "another --out"
            ) from None
        except OSError as error:
            log.warning(
                "%s: its file system has no locks (%s); start no second run there",
                out,
                error.strerror,
            )
        descriptors.append(descriptor)
        content = f"process {os.getpid()} on {socket.gethostname()}".encode()
        with writing(out):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        return content

    try:
        content = from_main(lock)
        from_each(lambda: _check_shared(path, content))
        yield
    finally:
        for descriptor in descriptors:
            path.unlink(missing_ok=True)
            os.close(descriptor)
        remove_empty(made)


def _check_shared(lock: Path, content: bytes) -> None:
    """Raise InputError unless this process finds the lock of the main one."""
    deadline = time.monotonic() + _SHOWN_S
    while not lock.exists() or lock.read_bytes() != content:
        if time.monotonic() > deadline:
            raise InputError(
                f"--out: {lock.parent} lacks what rank 0 wrote there; name a directory that all "
                "processes share"
            )
        time.sleep(0.1)


def holder(out: Path) -> str | None:
    """Return the process that writes the directory `out` now, as `hold` names it; None if there is
    none.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(out / _LOCK, flags)
    except OSError:
        return None
    try:
        # A shared lock is refused only while a run holds its own.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 4096, 0).decode(errors="replace") or "another run"
    finally:
        os.close(descriptor)
    return None


def claim(
    directory: Path,
    stage: str,
    identity: Mapping[str, object],
    command: str,
    inputs: JsonObject,
    *,
    replace: bool = False,
) -> bool:
    """Claim `directory` for a run, and write its record; return whether it goes on with one.

    stage: what the run makes. identity: everything that decides the result; JSON. command: what
    began the run, or goes on with it now. inputs: options that are known by their content. replace:
    put this identity in place of another. If the identities differ, raise ChangedError naming the
    first key that differs.
    """
    remove_leftovers(directory)
    current = json.loads(canonical_json(dict(identity)))  # JSON turns tuples into lists
    kept = read_run(directory)
    differs = difference(kept["identity"], current) if kept else None
    if differs and not replace:
        raise ChangedError(
            f"--out {directory}: was made with other options: {differs}; choose another --out or "
            "delete the directory"
        )
    values: list[object] = []
    inputs = without_secrets({"out": str(directory)} | inputs)
    finished = kept.get("finished") and not differs
    if finished and kept.get("inputs") == inputs:
        return True
    for value in inputs.values():
        values += value if isinstance(value, list) else [value]
    begun: JsonObject = {"progress": None, "finished": False}
    record = ({} if differs else kept) | {
        "stage": stage,
        "command": without_secrets(as_typed(command)),
        "identity": current,
        "inputs": inputs,
        "paths": paths_of(values, directory) | {inputs["out"]: "."},
        "versions": kept["versions"] if finished else versions(),
    }
    if begun | record != kept:
        write_sealed(directory / RUN, begun | record)
    return bool(kept)


def record_finished(
    directory: Path, stage: str, identity: JsonObject, command: str, inputs: JsonObject
) -> None:
    """Write the record of a command that is done at once. The `out` of `inputs` is where the
    directory will lie.
    """
    claim(directory, stage, identity, command, inputs)
    note(directory, progress={"unit": "draft", "done": 1, "of": 1}, finished=True)
