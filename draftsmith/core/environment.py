"""What a process has once: its environment, its threads and its memory. A library call gives it
back as it was; a command sets it before torch starts.
"""

import contextlib
import ctypes
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    _GeneratorContextManager,
    contextmanager,
)
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Parameters of malloc.h.
_MMAP_MAX = -4
_TRIM_THRESHOLD = -1
log = logging.getLogger(__name__)


def shared(
    change: Callable[P, AbstractContextManager[T]],
) -> Callable[P, _GeneratorContextManager[T]]:
    """Let calls that overlap, also in several threads, share one change to the process: the first
    one in makes it, the last one out undoes it.
    """
    lock = Lock()
    stack = ExitStack()
    values: list[T] = []

    @contextmanager
    def entered(*args: P.args, **options: P.kwargs) -> Iterator[T]:
        with lock:
            values.append(values[0] if values else stack.enter_context(change(*args, **options)))
        try:
            yield values[0]
        finally:
            with lock:
                values.pop()
                if not values:
                    stack.close()

    return entered


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment inside the block, and no others."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of any size for the next tensors, until the process ends.

    By default it maps each large block anew, and the kernel clears its pages again: a fifth of an
    evaluation's time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def brief_waiting() -> dict[str, str]:
    """Variables that let waiting threads spin for microseconds, then sleep; none if the user chose
    otherwise.

    By default GNU OpenMP spins for milliseconds, on cores that other threads need. Torch reads the
    variable once, when it is imported: none after that.
    """
    chosen = "torch" in sys.modules or any(name in os.environ for name in _WAITING)
    return {} if chosen else {"GOMP_SPINCOUNT": "2000"}


def limit_threads(control_groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Use as many threads as the container's share has cores, unless the user has set the number.

    It ignores the current load: a different thread count changes rounding.
    """
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        limit = (control_groups / "cpu.max").read_text()
        quota, period = limit.split()
        share = math.floor(float(quota) / float(period))
        if share < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
