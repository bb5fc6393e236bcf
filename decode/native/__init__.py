"""A product of a few rows with a large matrix at the cost of reading the matrix: `linear.c`, compiled where it runs.

Decoding multiplies 1 to 60 rows with every weight of the model, so the time of a forward is the time of reading the
weights from memory. Libraries tuned for square products take 1.3 to 2.4 times as long for 5 to 29 rows as for one, and
read fp32 where a checkpoint has 16 bits. The kernel is 200 lines of C, built within seconds by the machine's own
compiler for the machine's own processor, and kept in the user's cache directory under a name that says what it was
built from. Without a compiler there is none, and callers fall back.

Legend: X rows, I inputs, O outputs of a linear layer.
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
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-shared", "-fPIC")
# How a packed matrix keeps its values; the numbers of the C source.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST_ROWS = 256


class Kernel:
    """The compiled functions. fp32 arithmetic, contiguous CPU tensors only; the threads are torch's own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.padded, self.pack = library.draftsmith_padded, library.draftsmith_pack
        self.rows, self.linear = library.draftsmith_rows, library.draftsmith_linear
        self.padded.argtypes, self.padded.restype = [size], size
        self.pack.argtypes, self.pack.restype = [kind, pointer, pointer, size, size], None
        self.rows.argtypes, self.rows.restype = [kind, pointer, pointer, pointer, size, size], None
        self.linear.argtypes, self.linear.restype = [kind, *[pointer] * 5, *[size] * 3], None


class PackedMatrix:
    """A matrix `[O, I]` in the order in which the kernel reads it, in the narrowest dtype that holds it exactly.

    That is bf16 or fp16 where every value survives the way there and back bit for bit, else fp32. The kernel widens
    to fp32 in registers, so products do not depend on it.
    """

    def __init__(self, functions: Kernel, weight_OI: Tensor) -> None:
        self._functions = functions
        self.outputs, self.inputs = weight_OI.shape
        narrow_OI = narrowest(weight_OI).contiguous()
        self.values = torch.empty(functions.padded(self.outputs) * self.inputs, dtype=narrow_OI.dtype)
        self._kind = _KINDS[narrow_OI.dtype]
        functions.pack(self._kind, narrow_OI.data_ptr(), self.values.data_ptr(), self.outputs, self.inputs)

    def linear(self, x_XI: Tensor, bias_O: Tensor | None = None, other_XO: Tensor | None = None) -> Tensor:
        """`x W^T + bias + other`, `[X, O]`; contiguous fp32. A row's bits do not depend on other rows or threads."""
        rows = x_XI.shape[0]
        y_XO = x_XI.new_empty(rows, self.outputs)
        for begin in range(0, rows, _MOST_ROWS):
            self._functions.linear(
                self._kind,
                x_XI.data_ptr() + 4 * begin * self.inputs,
                self.values.data_ptr(),
                None if bias_O is None else bias_O.data_ptr(),
                None if other_XO is None else other_XO.data_ptr() + 4 * begin * self.outputs,
                y_XO.data_ptr() + 4 * begin * self.outputs,
                min(rows - begin, _MOST_ROWS),
                self.inputs,
                self.outputs,
            )
        return y_XO

    def rows(self, ids_N: Tensor) -> Tensor:
        """Rows of the matrix as they were, fp32 `[N, I]`. IndexError for one that it does not have."""
        ids_N = ids_N.contiguous()
        if ids_N.numel() and not 0 <= int(ids_N.min()) <= int(ids_N.max()) < self.outputs:
            raise IndexError(f"rows {int(ids_N.min())} to {int(ids_N.max())} of a matrix that has {self.outputs}")
        rows_NI = torch.empty(len(ids_N), self.inputs)
        pointers = (self.values.data_ptr(), ids_N.data_ptr(), rows_NI.data_ptr())
        self._functions.rows(self._kind, *pointers, len(ids_N), self.inputs)
        return rows_NI


def release_freed_memory() -> None:
    """Hand freed memory back to the system: glibc would keep much of what the fp32 weights leave behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def narrowest(weight_OI: Tensor) -> Tensor:
    """The same values in bf16 or fp16 where that dtype holds every one of them to the bit, else `weight_OI` itself."""
    for convert in (_to_bfloat16, _to_float16):
        # Most matrices that do not fit show it in their first rows.
        if convert(weight_OI[:4]) is not None and (narrow_OI := convert(weight_OI)) is not None:
            return narrow_OI
    return weight_OI


def _to_bfloat16(weight_OI: Tensor) -> Tensor | None:
    # bf16 is the upper half of fp32. By bits, because torch's conversion does not keep every NaN.
    bits_OI = weight_OI.contiguous().view(torch.int32)
    return None if (bits_OI & 0xFFFF).any() else (bits_OI >> 16).to(torch.int16).view(torch.bfloat16)


def _to_float16(weight_OI: Tensor) -> Tensor | None:
    half_OI = weight_OI.to(torch.float16)
    back_OI, bits_OI = half_OI.float().view(torch.int32), weight_OI.contiguous().view(torch.int32)
    return half_OI if torch.equal(back_OI, bits_OI) else None


@cache
def kernel() -> Kernel | None:
    """The kernel, built if it is not in the cache yet; None where it cannot be built or gives wrong products."""
    # Only where torch itself runs on GNU OpenMP: with another runtime, two pools of threads would fight for the cores.
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
    # Loading a library that was cut short (a full disk, a killed copy) would kill the process: check it first.
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
    """Everything about the processor that `-march=native` may build differently for."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.machine().encode()
    names = (b"model name", b"flags", b"CPU part", b"Features")
    return b"\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))


def _right(built: Kernel) -> bool:
    """Whether it multiplies as torch does: odd sizes, bias, and a sum to add to, from fp32, bf16 and fp16."""
    generator = torch.Generator().manual_seed(0)
    weight_OI, x_XI = torch.randn(83, 301, generator=generator), torch.randn(7, 301, generator=generator)
    bias_O, other_XO = torch.randn(83, generator=generator), torch.randn(7, 83, generator=generator)
    for dtype in _KINDS:
        weight_OI = weight_OI.to(dtype).float()
        matrix = PackedMatrix(built, weight_OI)
        wanted = torch.nn.functional.linear(x_XI, weight_OI, bias_O) + other_XO
        got = matrix.linear(x_XI, bias_O, other_XO)
        if not torch.allclose(got, wanted, atol=1e-4, rtol=1e-5):
            return False
        if not torch.equal(matrix.rows(torch.arange(83)), weight_OI):
            return False
    return True
