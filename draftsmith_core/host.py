"""What is set for OpenMP and the C library before torch starts."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

# By command, the variable of OpenMP to set, unless the user has set one of `_WAITING`.
_PASSIVE, _SPIN = ("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "2000")
_WAITS = {"train": _PASSIVE, "distill": _PASSIVE, "align": _SPIN, "demo": _SPIN, "eval": _SPIN}
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of malloc.h


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
    number of threads is that of the cores or of the container's share; it does not follow the load,
    because another number rounds otherwise.
    """
    if command in _WAITS and not any(name in os.environ for name in _WAITING):
        name, value = _WAITS[command]
        os.environ[name] = value
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        quota, period = (control_groups / "cpu.max").read_text().split()
        share = math.floor(float(quota) / float(period))
        if share < (os.cpu_count() or 1):
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
