"""A product of a few rows with a large matrix at the cost of reading the matrix: `linear.c`, compiled where it runs.

Verification multiplies 2 to 60 rows with every weight of the target. Libraries tuned for square products take 1.3 to
2.4 times as long for 5 to 29 rows as for one on a CPU whose memory is the limit. The kernel is 100 lines of C, built in
a fraction of a second by the machine's own compiler for the machine's own processor, and kept in the user's cache
directory under a name that says what it was built from. Without a compiler there is none, and callers fall back.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from draftsmith_core.io import atomic_file, sha256_file, write_text_atomic

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("linear.c")
MOST_ROWS = 256
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-shared", "-fPIC")


class Kernel:
    """The compiled functions. fp32 and contiguous CPU tensors only; threads are torch's own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._padded, self._pack, self._linear = (
            library.draftsmith_padded,
            library.draftsmith_pack,
            library.draftsmith_linear,
        )
        self._padded.argtypes, self._padded.restype = [size], size
        self._pack.argtypes, self._pack.restype = [pointer, pointer, size, size], None
        self._linear.argtypes, self._linear.restype = [*[pointer] * 5, *[size] * 3], None

    def pack(self, weight_OI: Tensor) -> Tensor:
        """The weights in the order in which the kernel reads them, flat."""
        outputs, inputs = weight_OI.shape
        packed: Tensor = torch.empty(self._padded(outputs) * inputs)
        self._pack(weight_OI.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed

    def linear(
        self, x_XI: Tensor, packed: Tensor, outputs: int, bias_O: Tensor | None, other_XO: Tensor | None
    ) -> Tensor:
        """`x W^T + bias + other`, `[X, O]`, for at most `MOST_ROWS` rows."""
        rows, inputs = x_XI.shape
        y_XO = x_XI.new_empty(rows, outputs)
        self._linear(
            x_XI.data_ptr(),
            packed.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            None if other_XO is None else other_XO.data_ptr(),
            y_XO.data_ptr(),
            rows,
            inputs,
            outputs,
        )
        return y_XO


@cache
def kernel() -> Kernel | None:
    """The kernel, built if it never was on this machine; None where it cannot be or is not right."""
    # Compiled with OpenMP as torch is: with another runtime two pools of threads would fight for the cores.
    if platform.system() != "Linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    try:
        built = Kernel(_load(compiler))
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("no native linear layer: %s", error)
        return None
    return built if _right(built) else None


def _load(compiler: str) -> ctypes.CDLL:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    key = hashlib.sha256(
        b"\0".join([SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), _processor()])
    ).hexdigest()
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith" / f"linear-{key[:16]}.so"
    seal = cached.with_suffix(".sha256")
    # Loading a torn library would kill the process, so a kept one is only taken whole.
    if cached.is_file() and seal.is_file() and seal.read_text() == sha256_file(cached):
        return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "linear.so"
        command = [compiler, *_FLAGS, "-o", str(library), str(SOURCE)]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(cached) as beside:
                shutil.copyfile(library, beside)
            write_text_atomic(seal, sha256_file(library))
        except OSError as error:
            log.info("the native linear layer is not kept: %s", error)
        return ctypes.CDLL(str(library))


def _processor() -> bytes:
    """What tells processors apart that `-march=native` builds differently for."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.machine().encode()
    names = (b"model name", b"flags", b"CPU part", b"Features")
    return b"\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _right(built: Kernel) -> bool:
    """Whether it multiplies as torch does: odd sizes, bias, and a sum to add to."""
    generator = torch.Generator().manual_seed(0)
    weight_OI, x_XI = torch.randn(83, 301, generator=generator), torch.randn(7, 301, generator=generator)
    bias_O, other_XO = torch.randn(83, generator=generator), torch.randn(7, 83, generator=generator)
    wanted = torch.nn.functional.linear(x_XI, weight_OI, bias_O) + other_XO
    got = built.linear(x_XI, built.pack(weight_OI), 83, bias_O, other_XO)
    return bool(torch.allclose(got, wanted, atol=1e-4, rtol=1e-5))
