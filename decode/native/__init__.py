"""A product of a few rows with a large matrix at the cost of reading the matrix: C, compiled where
it runs.

Decoding multiplies 1 to 60 rows with every weight of the model, so the time of a forward is the
time of reading the weights from memory. Libraries tuned for square products take 1.3 to 2.4 times
as long for 5 to 29 rows as for one, and read fp32 where a checkpoint has 16 or 4 bits. `linear.c`
is the product, `forward.c` a whole forward (`decode.kernel_forward`). The machine's own compiler
builds them within seconds for its own processor; the library stays in the user's cache directory,
named by what it was built from. Without a compiler, torch multiplies.

4-bit weights of bitsandbytes are read as they are: codes and scales. A value is an entry of a table
of 16 (nf4: QLoRA, arXiv 2305.14314; fp4 alike) times the scale of its block of inputs, which may be
quantised again. The kernel multiplies both in fp32 as bitsandbytes does, so that products equal
those with the unpacked matrix to the bit.

Legend: X rows, I inputs, O outputs of a linear layer.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.core.errors import RunError, first_line
from draftsmith.core.io import atomic_file
from draftsmith.decode.expected import expect
from draftsmith.decode.native import structures
from draftsmith.decode.native.large_pages import empty_bytes

_FILES = sorted(Path(__file__).parent.glob("*.[ch]"))
SOURCES = [path for path in _FILES if path.suffix == ".c"]
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
# How a packed matrix keeps its values; the numbers of the C source.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
_TILES = 4
_PAIRS = 5
_GROUP = 32  # inputs that both are packed in
_MOST_ROWS = 256
_BLOCK = 64  # inputs that share a scale, in the kernel
_TABLE_BYTES = 64


class Kernel:
    """The compiled functions: fp32 arithmetic on contiguous CPU tensors, with torch's own
    threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(
            name: str, arguments: list[type], result: type | None = None
        ) -> Callable[..., int]:
            declared = library[f"draftsmith_{name}"]
            declared.argtypes = arguments
            declared.restype = result
            return declared

        pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        four = [pointer] * 4
        five = [pointer] * 5
        self.packed_bytes = function("packed_bytes", [kind, size, size], size)
        self.lanes: int = function("lanes", [], size)()
        self.rows = function("rows", [kind, pointer, pointer, pointer, size, size])
        self.linear = function("linear", [kind, *five, size, size, size, pointer])
        self.room = function("room", [kind, size, size], size)
        # Whether bf16 is multiplied by tile registers.
        self.tiles = bool(function("tiles", [], kind)())
        # Whether a model that computes in bf16 is multiplied by pairs. Tiles lose nothing of it.
        self.pairs = not self.tiles and bool(function("pairs", [], kind)())
        self.largest = function("largest", [pointer, size, size, size, pointer, pointer])
        self.draws = function("draws", [pointer, pointer, size, size, size, pointer])
        self.siblings = function("siblings", [*four, size, size, size, pointer], kind)
        # Called with structures by reference (`decode.kernel_forward`).
        self.scratch = function("scratch", [pointer, pointer], size)
        self.forward = function("forward", [pointer, pointer], kind)
        theirs = (size * len(structures.SHARED))()
        function("sizes", [pointer])(theirs)
        if [*theirs] != [ctypes.sizeof(shared) for shared in structures.SHARED]:
            raise OSError("model.h and structures.py differ")


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor begins, for a C function; None for none."""
    return None if tensor is None else tensor.data_ptr()


class PackedMatrix:
    """A matrix `[O, I]` in the order in which the kernel reads it, in the narrowest dtype that
    holds it exactly.

    The kernel widens values to fp32 in registers, so products do not depend on the dtype. Where the
    processor has tile registers, it multiplies bf16 by them: the same products, summed in another
    order. Where it has none but multiplies pairs of bf16 numbers, a matrix that is given in bf16 is
    multiplied so, with inputs rounded to bf16, as torch does.
    """

    def __init__(self, functions: Kernel, weight_OI: Tensor) -> None:
        outputs, inputs = weight_OI.shape
        narrow_OI = narrowest(weight_OI)
        if functions.tiles and narrow_OI.dtype == torch.bfloat16 and narrow_OI.isfinite().all():
            self._fill_pairs(functions, narrow_OI, _TILES)
            return
        if functions.pairs and weight_OI.dtype == torch.bfloat16:
            self._fill_pairs(functions, narrow_OI, _PAIRS)
            return
        width = self._hold(functions, outputs, inputs, narrow_OI.dtype)
        # Panels of outputs, input by input; the surplus columns of the last panel are zero. In
        # bf16, those of two vectors of the processor alternate.
        apart = 2 if narrow_OI.dtype == torch.bfloat16 else 1
        shape = (-1, width // functions.lanes // apart, apart, functions.lanes, inputs)
        surplus = -outputs % width
        padded_OI = F.pad(narrow_OI, (0, 0, 0, surplus)) if surplus else narrow_OI
        panels = self.values.view(-1, inputs, shape[1], functions.lanes, apart)
        split_OI = padded_OI.reshape(shape)
        panels.copy_(split_OI.permute(0, 4, 1, 3, 2))

    def _fill_pairs(self, functions: Kernel, narrow_OI: Tensor, kind: int) -> None:
        outputs, inputs = narrow_OI.shape
        width = self._hold(functions, outputs, inputs, torch.bfloat16, kind)
        surplus = (0, -inputs % _GROUP, 0, -outputs % width)
        padded_OI = F.pad(narrow_OI, surplus) if any(surplus) else narrow_OI
        pairs = padded_OI.reshape(-1, width, padded_OI.shape[1] // 2, 2)
        self.values.view(len(pairs), -1, width, 2).copy_(pairs.transpose(1, 2))

    @staticmethod
    def of_codes(functions: Kernel, codes: Tensor, scales: Tensor, table: Tensor) -> "PackedMatrix":
        """codes: uint8 `[O, I / 2]`, the first in a byte's upper half. scales: `[O, I / 64]`.
        table: 16 values.
        """
        made = PackedMatrix.__new__(PackedMatrix)
        outputs = codes.shape[0]
        inputs = 2 * codes.shape[1]
        width = made._hold(functions, outputs, inputs, torch.uint8)
        surplus = (0, 0, 0, -outputs % width)
        blocks = inputs // _BLOCK
        codes_OI = F.pad(_unpacked(codes), surplus)
        by_column = codes_OI.view(-1, width, blocks, _BLOCK).permute(0, 2, 3, 1)
        lower, upper = by_column.chunk(2, dim=3)
        scales_OI = F.pad(scales.float(), surplus)
        by_panel = scales_OI.view(-1, width, blocks)
        columns = by_panel.transpose(1, 2).contiguous()
        # The table; then by panel and block a scale for each column, and the codes input by input,
        # two in a byte.
        table = table.float().contiguous()
        made.values[:_TABLE_BYTES] = table.view(torch.uint8)
        panels = made.values[_TABLE_BYTES:].view(len(columns), blocks, -1)
        panels[..., : 4 * width] = columns.view(torch.uint8)
        panels[..., 4 * width :] = (lower | upper << 4).flatten(2)
        return made

    def _hold(
        self,
        functions: Kernel,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        kind: int | None = None,
    ) -> int:
        """Allocate the values, and return the outputs of a panel."""
        self._functions = functions
        # How its values are kept, as the C source numbers it.
        self.kind = _KINDS[dtype] if kind is None else kind
        self.outputs = outputs
        self.inputs = inputs
        size = functions.packed_bytes(self.kind, outputs, inputs)
        self.values = empty_bytes(size).view(dtype)
        return functions.packed_bytes(0, 1, 1) // 4

    def __deepcopy__(self, memo: object) -> "PackedMatrix":
        return self  # never written to: copies of a model share it

    def linear(
        self, x_XI: Tensor, bias_O: Tensor | None = None, other_XO: Tensor | None = None
    ) -> Tensor:
        """`x W^T + bias + other`, `[X, O]`, of contiguous fp32. A row's bits do not depend on other
        rows or threads.
        """
        rows = x_XI.shape[0]
        expect("x_XI", x_XI, (rows, self.inputs), torch.float32)
        if other_XO is not None:
            expect("other_XO", other_XO, (rows, self.outputs), torch.float32)
        y_XO = x_XI.new_empty(rows, self.outputs)
        room = x_XI.new_empty(self._functions.room(self.kind, rows, self.inputs) // 2)
        for begin in range(0, rows, _MOST_ROWS):
            self._functions.linear(
                self.kind,
                x_XI.data_ptr() + 4 * begin * self.inputs,
                self.values.data_ptr(),
                address(bias_O),
                None if other_XO is None else other_XO.data_ptr() + 4 * begin * self.outputs,
                y_XO.data_ptr() + 4 * begin * self.outputs,
                min(rows - begin, _MOST_ROWS),
                self.inputs,
                self.outputs,
                room.data_ptr(),
            )
        return y_XO

    def rows(self, ids_N: Tensor) -> Tensor:
        """Return rows of the matrix, fp32 `[N, I]`. IndexError for a row that does not exist."""
        ids_N = ids_N.contiguous()
        expect("ids_N", ids_N, (len(ids_N),), torch.long)
        low, high = map(int, ids_N.aminmax()) if ids_N.numel() else (0, 0)
        if not 0 <= low <= high < self.outputs:
            raise IndexError(f"rows {low} to {high} of a matrix that has {self.outputs}")
        rows_NI = torch.empty(len(ids_N), self.inputs, dtype=torch.float32)
        self._functions.rows(
            self.kind,
            self.values.data_ptr(),
            ids_N.data_ptr(),
            rows_NI.data_ptr(),
            len(ids_N),
            self.inputs,
        )
        return rows_NI


def _unpacked(codes: Tensor) -> Tensor:
    """Return the two codes of each byte, the upper half first, `[O, I]`."""
    return torch.stack([codes >> 4, codes & 15], dim=2).flatten(1)


def four_bit_state(weight: object) -> Any:
    """Return bitsandbytes' scales and shape of a 4-bit weight that the kernel reads; None for any
    other.

    The weight must be on the CPU, multiplied in fp32, and have rows of whole blocks.
    """
    state = getattr(weight, "quant_state", None)
    if state is None or not isinstance(weight, Tensor) or weight.device.type != "cpu":
        return None
    repacked = weight.dtype != torch.uint8 or getattr(state, "packing_format_for_cpu", False)
    if repacked or state.dtype != torch.float32 or len(state.shape) != 2:
        return None
    whole_blocks = state.blocksize % _BLOCK == 0 and state.shape[1] % state.blocksize == 0
    return state if whole_blocks else None


def pack_four_bits(functions: Kernel, weights: Sequence[Tensor]) -> PackedMatrix:
    """Return one matrix of all weights, one below the other; `four_bit_state` accepted each."""
    states = [four_bit_state(weight) for weight in weights]
    inputs = states[0].shape[1]
    codes = torch.cat([weight.detach().reshape(-1, inputs // 2) for weight in weights])
    parts = []
    for state in states:
        scales = state.absmax.float()
        if state.nested:
            nested = state.state2
            absmax = nested.absmax.float()
            outer = absmax.repeat_interleave(nested.blocksize)
            codes_of_scales = state.absmax.reshape(-1).long()
            inner = nested.code.float()[codes_of_scales]
            scales = inner * outer[: len(inner)] + state.offset
        scales = scales.view(-1, inputs // state.blocksize)
        parts.append(scales.repeat_interleave(state.blocksize // _BLOCK, dim=1))
    return PackedMatrix.of_codes(functions, codes, torch.cat(parts), states[0].code)


def narrowest(weight_OI: Tensor) -> Tensor:
    """Return the same values in bf16 or fp16 if that dtype holds each of them to the bit, else
    `weight_OI` itself.
    """
    if weight_OI.dtype == torch.float32:
        for narrow in (_upper_half, Tensor.half):
            # Most matrices that do not fit show it in their first rows.
            if _is_kept(narrow(weight_OI[:4]), weight_OI[:4]):
                narrow_OI = narrow(weight_OI)
                if _is_kept(narrow_OI, weight_OI):
                    return narrow_OI
    return weight_OI


def _upper_half(weight_OI: Tensor) -> Tensor:
    # bf16 is the upper half of fp32. By bits, because torch's conversion does not keep every NaN.
    weight_OI = weight_OI.contiguous()
    bits_OI = weight_OI.view(torch.int32) >> 16
    return bits_OI.to(torch.int16).view(torch.bfloat16)


def _is_kept(narrow_OI: Tensor, weight_OI: Tensor) -> bool:
    again_OI = narrow_OI.float().contiguous()
    weight_OI = weight_OI.contiguous()
    return torch.equal(again_OI.view(torch.int32), weight_OI.view(torch.int32))


def kernel() -> Kernel | None:
    """Return the kernel, built if it is not cached; None if it cannot be built or gives wrong
    products.
    """
    kernel_or_reason = _kernel_or_reason()
    return kernel_or_reason if isinstance(kernel_or_reason, Kernel) else None


def missing_kernel(device: torch.device | str = "cpu") -> str | None:
    """Return one line for the user if decoding on this device is slower for want of the kernel,
    else None.
    """
    if torch.device(device).type != "cpu" or kernel() is not None:
        return None
    return f"decoding without its compiled kernel, several times slower: {_kernel_or_reason()}"


@cache
def _kernel_or_reason() -> Kernel | str:
    # With another OpenMP runtime than torch's, two pools of threads would compete for the cores.
    if platform.system() != "Linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "it needs Linux and a torch with GNU's OpenMP"
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler found; install gcc, or set CC"
    try:
        built = Kernel(_load(compiler))
    except subprocess.CalledProcessError as error:
        words = " ".join(error.stderr.decode(errors="replace").split())
        return f"{compiler} cannot build it: {words[-400:] or first_line(error)}"
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return f"{compiler} cannot build it: {first_line(error)}"
    return built if _is_right(built) else f"{compiler} built it wrongly"


def _load(compiler: str) -> ctypes.CDLL:
    """Build the library, or load it from the cache if it is there whole: its last 32 bytes are its
    hash.
    """
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=30
    ).stdout
    sources = [path.read_bytes() for path in _FILES]
    built_from = b"\0".join([*sources, version, " ".join(_FLAGS).encode(), _processor()])
    key = hashlib.sha256(built_from).hexdigest()
    directory = _private_cache()
    cached = None if directory is None else directory / f"linear-{key[:16]}.so"
    if cached and (library := _cached(cached)):
        return library
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / "linear.so"
        command = [compiler, *_FLAGS, "-o", str(built), *map(str, SOURCES)]
        # Takes seconds; on a busy machine, minutes.
        subprocess.run(command, capture_output=True, check=True, timeout=300)
        content = built.read_bytes()
        if cached:
            # A full disk is no cache.
            with suppress(RunError), atomic_file(cached) as unfinished:
                digest = hashlib.sha256(content).digest()
                unfinished.write_bytes(content + digest)
                unfinished.chmod(0o600)
        return ctypes.CDLL(str(built))


def _private_cache() -> Path | None:
    """Return the directory of built libraries, where no other user can put one; None if there is
    none.
    """
    # RuntimeError: no HOME, and a user without an entry, as in containers.
    with suppress(OSError, RuntimeError):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = cache.absolute() / "draftsmith"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Fails if the directory is another user's.
        directory.chmod(0o700)
        return directory
    return None


def _cached(library: Path) -> ctypes.CDLL | None:
    """Load a library that is this user's own, that only he can write, and that is whole."""
    with suppress(OSError):
        made = library.stat()
        is_own = made.st_uid == os.geteuid() and not made.st_mode & 0o022
        content = library.read_bytes()
        if is_own and hashlib.sha256(content[:-32]).digest() == content[-32:]:
            return ctypes.CDLL(str(library))
    return None


def _processor() -> bytes:
    """What `-march=native` depends on."""
    names = (b"model name", b"flags", b"CPU part", b"Features")
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
    return platform.machine().encode()


def _is_right(built: Kernel) -> bool:
    """Whether it multiplies as torch does: odd sizes, bias and sum, from fp32, bf16, fp16 and 4
    bits.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    weight_OI = random(83, 320)
    bias_O = random(83)
    other_XO = random(7, 83)
    weights = [weight_OI[:, :301].to(dtype).float() for dtype in list(_KINDS)[:3]]
    matrices = [PackedMatrix(built, weight) for weight in weights]
    weights.append(weights[1])
    matrices.append(PackedMatrix(built, weights[1].bfloat16()))
    codes = torch.randint(0, 256, (83, 160), generator=generator, dtype=torch.uint8)
    scales = weight_OI[:, :5].abs()
    table = weight_OI[0, :16]
    values_OI = table[_unpacked(codes).long()]
    weights.append(values_OI * scales.repeat_interleave(_BLOCK, dim=1))
    matrices.append(PackedMatrix.of_codes(built, codes, scales, table))
    for weight, matrix in zip(weights, matrices, strict=True):
        # Which some kinds round to.
        x_XI = random(7, matrix.inputs).bfloat16().float()
        wanted = F.linear(x_XI, weight, bias_O) + other_XO
        product = matrix.linear(x_XI, bias_O, other_XO)
        if not torch.allclose(product, wanted, atol=1e-4, rtol=1e-5):
            return False
        if not torch.equal(matrix.rows(torch.arange(83)), weight):
            return False
    return True
