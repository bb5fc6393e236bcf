"""What is set for OpenMP and the C library before torch starts."""

import contextlib
import ctypes
import logging
import math
import os
import sys
from functools import cache
from pathlib import Path

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Parameters of malloc.h.
_MMAP_MAX = -4
_TRIM_THRESHOLD = -1
log = logging.getLogger(__name__)


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


@cache
def remark_spinning() -> None:
    """At the first use from Python, warn if torch was imported before and computes on a CPU:
    `brief_waiting` comes too late then.
    """
    torch = sys.modules.get("torch")
    chosen = any(name in os.environ for name in _WAITING)
    if torch is not None and not chosen and not torch.cuda.is_available():
        log.warning(
            "torch was imported first, so its waiting threads spin and slow a busy machine; write "
            "`from draftsmith import load_pair` above `import torch`, or set GOMP_SPINCOUNT=2000"
        )


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
