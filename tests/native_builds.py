"""The kernel as the compiler builds it for other processors. A build takes seconds, so that all test processes of a run
share it.
"""

import ctypes
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from decode import native
from decode.native import Kernel, kernel

# The instructions that the source can be built for here; sse2 has no vector instruction for fp16 and no fused
# multiply-add. The processor that runs the tests has to know them.
BUILDS = {"avx512f": "-march=native", "asimd": "-march=native", "f16c": "-march=haswell", "sse2": "-march=x86-64"}
# For parametrize: what has to be compiled is slow.
PARAMETERS = [
    pytest.param(name, marks=() if flag == "-march=native" else pytest.mark.slow) for name, flag in BUILDS.items()
]


def processor_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


def built_for(name: str, factory: pytest.TempPathFactory) -> Kernel:
    """The kernel built for one of `BUILDS`; skips where it cannot be built or run."""
    own = kernel()
    if own is None or name not in processor_flags():
        pytest.skip("this processor, or its compiler, cannot build or run that")
    if BUILDS[name] in native._FLAGS:
        return own
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    library = shared / f"kernel-{name}.so"
    with (shared / f"kernel-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            flags = [flag for flag in native._FLAGS if not flag.startswith("-march")]
            unfinished = library.with_suffix(".part")
            subprocess.run(["cc", BUILDS[name], *flags, "-o", unfinished, native.SOURCE], check=True)
            unfinished.rename(library)
    return Kernel(ctypes.CDLL(str(library)))
