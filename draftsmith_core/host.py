"""What is set for OpenMP and the C library before torch starts."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

# The variable of OpenMP to set by command, unless the user has set one of `_WAITING`.
_WAITS = {
    "train": "OMP_WAIT_POLICY",
    "distill": "OMP_WAIT_POLICY",
    "align": "GOMP_SPINCOUNT",
    "demo": "GOMP_SPINCOUNT",
    "eval": "GOMP_SPINCOUNT",
}
_VALUES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Parameters of malloc.h.
_MMAP_MAX = -4
_TRIM_THRESHOLD = -1


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of any size for the next tensors, until the process ends.

    By default it maps each large block anew, and the kernel clears its pages again: a fifth of an
    evaluation's time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def settle_threads(command: str, control_groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Set the variables of OpenMP that suit a command, unless the user has set them. Torch reads
    them once.

    Waiting threads of GNU OpenMP spin for milliseconds, on cores that other threads need. Training
    and distillation wait seldom and sleep at once; timed decoding spins for microseconds. The
    number of threads is that of the cores or of the container's share. It ignores the current load:
    a different thread count changes rounding.
    """
    if command in _WAITS and not any(name in os.environ for name in _WAITING):
        name = _WAITS[command]
        os.environ[name] = _VALUES[name]
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        limit = (control_groups / "cpu.max").read_text()
        quota, period = limit.split()
        share = math.floor(float(quota) / float(period))
        if share < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
