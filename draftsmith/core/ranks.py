"""The processes that a launcher started: which one this is, and work for one of them or for all.

Nothing heavy is imported until processes meet, so that commands can ask who they are before they
load torch.
"""

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from safetensors import SafetensorError

from draftsmith.core.errors import (
    DraftsmithError,
    InputError,
    LauncherError,
    RunError,
    one_line,
    printable,
)
from draftsmith.core.terminal import StandardError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Key of the first failure.
_FAILED = "draftsmith/failed"
# Neighbouring ranks that hold one target together.
_together = 1
# Whether the main process is in `from_main`.
_others_wait = False
# Where the processes that met count their failures.
_store: "Store | None" = None
# The error that was raised in all processes.
_error_of_all: Exception | None = None


def launched() -> int:
    """Number of processes that the launcher started (environment variable WORLD_SIZE)."""
    return max(1, _number("WORLD_SIZE", 1))


def hold_together(count: int) -> None:
    """Let groups of `count` neighbouring processes hold one target each: all processes of a group
    do the same work.
    """
    global _together
    _together = count


def groups() -> int:
    """Over how many groups of processes work is divided: all processes, unless some hold a target
    together.
    """
    return max(1, launched() // _together)


def own_group() -> int:
    """The group of this process."""
    return _rank() // _together


def leads_group() -> bool:
    """Whether this process writes what its group made."""
    return _rank() % _together == 0


def _rank() -> int:
    return _number("RANK", 0)


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


def launcher_error(problem: str) -> LauncherError:
    """Return an error that names the variables to unset."""
    given = " ".join(name for name in _VARIABLES if os.environ.get(name))
    return LauncherError(f"{problem}; if no launcher started this process, unset {given}")


def check_launcher() -> None:
    """Raise LauncherError if the launcher's variables are wrong or incomplete, as leftovers are."""
    given = {name: value for name in _VARIABLES if (value := os.environ.get(name))}
    for name, value in given.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise launcher_error(f"{name}={value}: not a number")
    missing = [name for name in _VARIABLES if name not in given and name != "LOCAL_RANK"]
    if missing and (launched() > 1 or _rank() > 0):
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        raise launcher_error(f"{shown} without {', '.join(missing)}")
    if _rank() >= launched():
        raise launcher_error(f"RANK={_rank()}: WORLD_SIZE is only {launched()}")


def meet(store: "Store") -> None:
    """Let failures be counted in a store that all processes have."""
    global _store
    _store = store


def have_met() -> bool:
    """Whether all processes have come."""
    return _store is not None


def failed(reason: str) -> str | None:
    """Return the reason of the process that failed first, in the first of each machine to fail.

    reason: of this process. The others have the same one, or lost their connection to the first.
    """
    assert _store is not None
    machine = os.environ.get("GROUP_RANK") or socket.gethostname()
    try:
        first = _store.compare_set(_FAILED, "", reason)
        return first.decode() if _store.add(f"{_FAILED}/{machine}", 1) == 1 else None
    except RuntimeError:  # the store ended with its process
        return reason


def leads_machine() -> bool:
    """Whether this process is the first of its machine."""
    return _number("LOCAL_RANK", _rank()) == 0


def lost_others(error: BaseException) -> bool:
    """Whether an error says that the connection to another process ended."""
    if not have_met():
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "/gloo/" in str(error)


def whose(error: BaseException) -> str:
    """Return the rank that an error is of, to print before it; "" if it is of all."""
    if launched() == 1 or error is _error_of_all or not (have_met() or _rank()):
        return ""
    return f"rank {_rank()}: "


def is_main() -> bool:
    """Whether this is the process of rank 0, which writes files and messages for all."""
    return _rank() == 0


def say(line: str) -> None:
    """Print to standard error, in the main process only."""
    if is_main():
        error = StandardError()
        error.write(printable(line) + "\n")
        error.flush()


def require_single_process(command: str) -> None:
    """Raise InputError if a command that runs in one process was launched in several."""
    if launched() > 1:
        raise InputError(
            f"runs in one process, but {launched()} were launched; call `draftsmith {command}` "
            "directly"
        )


def on_main(work: Callable[[], object]) -> None:
    """As `from_main`, without a result."""

    def run() -> None:
        work()

    from_main(run)


def from_main(work: Callable[[], T]) -> T:
    """Run `work` on the main process while the others wait; return its result, or raise its error,
    in all of them.

    Propagates project errors and OSError; unreadable safetensors become RunError. Nested calls run
    at once, because the other processes already wait.
    """
    global _others_wait, _error_of_all
    if _others_wait:
        return work()
    result: T | None = None
    failure: Exception | None = None
    if is_main():
        _others_wait = True
        try:
            result = work()
        except (DraftsmithError, OSError) as error:
            failure = error
        except SafetensorError as error:
            failure = RunError(one_line(error))
        finally:
            _others_wait = False
    if launched() > 1:
        from accelerate.utils import broadcast_object_list

        ended = [result, failure]
        broadcast_object_list(ended)
        result, failure = cast("tuple[T | None, Exception | None]", ended)
        _error_of_all = failure
    if failure is not None:
        raise failure
    return cast(T, result)


def with_target(work: Callable[[], T]) -> T:
    """Run `work`, which calls the target, on the main process while the others wait; in all of
    them, where they hold it together.
    """
    return from_main(work) if groups() == launched() else work()


def from_each(work: Callable[[], T]) -> list[T]:
    """Run `work` in every process; return all results, by rank, in all of them.

    A project error of one process is raised in all, with its rank. Within `from_main` the main
    process works alone.
    """
    global _error_of_all
    if launched() == 1 or _others_wait:
        return [work()]
    from accelerate.utils import gather_object

    value: T | None = None
    failure: InputError | RunError | None = None
    try:
        value = work()
    except (InputError, RunError) as error:
        failure = error
    outcomes = gather_object([(value, failure)])
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            _error_of_all = type(failed)(f"rank {rank}: {failed}")
            raise _error_of_all
    return [value for value, _ in outcomes]


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    from_each(lambda: None)


def divided(count: int, work: Callable[[int], T]) -> list[T]:
    """`[work(0), ..., work(count - 1)]` in every process: each index is worked on by one group
    of them, in turn.

    All processes must call it with the same `count`; it waits for the slowest. An InputError or
    RunError of one process is raised in all. Within `from_main`, where the others wait, the main
    process does it all.
    """
    if _others_wait:
        return [work(index) for index in range(count)]
    merged: dict[int, T] = {}
    for part in from_each(
        lambda: {index: work(index) for index in range(own_group(), count, groups())}
    ):
        merged |= part
    return [merged[index] for index in range(count)]
