"""How many threads compute on a CPU, and how they wait for each other: settled before torch starts them.

GNU OpenMP, on which torch and our kernel run, lets a thread that waits spin for milliseconds before it sleeps. Where
others compute too, it spins on the core that the thread it waits for needs. Training and distillation wait seldom and
sleep at once. Decoding a small model waits tens of times a millisecond: where it is timed, a thread spins for some
microseconds first; where nothing but decoding is done, nothing is changed.
"""

import math
import os
from pathlib import Path

# By command, the variable that is set, unless the user has set one of `_WAITING`.
_WAITS = {
    "train": ("OMP_WAIT_POLICY", "PASSIVE"),
    "distill": ("OMP_WAIT_POLICY", "PASSIVE"),
    "align": ("GOMP_SPINCOUNT", "2000"),
    "demo": ("GOMP_SPINCOUNT", "2000"),
    "eval": ("GOMP_SPINCOUNT", "2000"),
}
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def settle_threads(command: str, control_groups: Path = Path("/sys/fs/cgroup")) -> None:
    """Set the variables of OpenMP that suit a command of draftsmith, where the user has not. Torch reads them once.

    The number of threads is that of the cores that this process may use. OpenMP finds it, but for the share of a core's
    time that a container may be held to. It does not follow how busy they are: another number of threads rounds
    otherwise, and a run that is continued must not.
    """
    if command in _WAITS and not any(name in os.environ for name in _WAITING):
        name, value = _WAITS[command]
        os.environ[name] = value
    share = _share(control_groups)
    if "OMP_NUM_THREADS" not in os.environ and share is not None and share < (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = str(max(1, math.floor(share)))


def _share(control_groups: Path) -> float | None:
    """How many cores' time a container may use (versions 2 and 1 of Linux's control groups); None without a limit."""
    try:
        quota, period = (control_groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (control_groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        except OSError:
            return None
    return float(quota) / float(period) if quota.strip() not in ("max", "-1") else None
