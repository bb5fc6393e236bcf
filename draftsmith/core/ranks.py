"""The processes that a launcher started: which one this is, and work for one of them or for all.

Nothing heavy is imported until processes meet, so that commands can ask who they are before they
load torch.
"""

import os
from collections.abc import Callable
from typing import TypeVar, cast

from safetensors import SafetensorError

from draftsmith.core.errors import DraftsmithError, InputError, RunError, one_line, printable
from draftsmith.core.terminal import StandardError

T = TypeVar("T")
# Whether the main process is in `from_main`.
_others_wait = False


def launched() -> int:
    """Number of processes that the launcher started (environment variable WORLD_SIZE)."""
    count = os.environ.get("WORLD_SIZE") or 1
    return max(1, int(count))


def _rank() -> int:
    rank = os.environ.get("RANK") or 0
    return int(rank)


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
    global _others_wait
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
    if failure is not None:
        raise failure
    return cast(T, result)


def divided(count: int, work: Callable[[int], T]) -> list[T]:
    """`[work(0), ..., work(count - 1)]` in every process: each index is worked on by one of them,
    in turn.

    All processes must call it with the same `count`; it waits for the slowest. An InputError or
    RunError of one process is raised in all. Within `from_main`, where the others wait, the main
    process does it all.
    """
    if launched() == 1 or _others_wait:
        return [work(index) for index in range(count)]
    from accelerate.utils import gather_object

    values: dict[int, T] = {}
    failure: DraftsmithError | None = None
    try:
        for index in range(_rank(), count, launched()):
            values[index] = work(index)
    except DraftsmithError as error:
        failure = error
    merged: dict[int, T] = {}
    for part, failed in gather_object([(values, failure)]):
        if failed is not None:
            raise failed
        merged |= part
    return [merged[index] for index in range(count)]
