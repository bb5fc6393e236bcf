"""The kernel, built for each kind of processor that can run here."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from draftsmith.decode import native
from draftsmith.decode.native import Kernel, kernel

built = pytest.mark.skipif(
    kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime"
)

# The instructions that the source can be built for here, by a name that /proc/cpuinfo has; sse2 has
# no vector instruction for fp16 and no fused multiply-add. What has to be compiled is slow.
BUILDS = {"native": "-march=native", "f16c": "-march=haswell", "sse2": "-march=x86-64"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "native" else pytest.mark.slow) for name in BUILDS
    ],
)
def library(request, tmp_path_factory):
    """The kernel built for one of `BUILDS`."""
    own, flag = kernel(), BUILDS[request.param]
    known = ["native", *Path("/proc/cpuinfo").read_text().split()]
    if own is None or request.param not in known:
        pytest.skip("this processor, or its compiler, cannot build or run that")
    if flag in native._FLAGS:
        return own
    path = tmp_path_factory.mktemp("kernel") / "kernel.so"
    flags = [flag if each.startswith("-march") else each for each in native._FLAGS]
    subprocess.run(["cc", *flags, "-o", path, *native.SOURCES], check=True)
    return Kernel(ctypes.CDLL(str(path)))
