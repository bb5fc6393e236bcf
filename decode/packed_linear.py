"""Linear layers for a handful of rows on a CPU, with weights that are packed once.

Decoding multiplies every weight matrix with 1 to 60 rows, and its time is the time of reading the weights. In fp32
they are packed for a kernel of our own (`decode.native`), which reads them once, in 16 bits where the checkpoint has no
more; the packed matrix then takes the parameter's place (`decode.packed_weight`). Where the kernel cannot be built,
and in half precision, oneDNN packs copies: the plain layer's library would repack the matrix at every call with several
rows. Which of them multiplies depends on the machine, dtype, size and number of rows alone, never on a timing, so that
runs repeat to the bit.

Legend: X rows, I inputs, O outputs of all fused layers together.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.native import PackedMatrix, kernel, release_freed_memory
from decode.native.four_bits import four_bit_state, pack_four_bits, stamp
from decode.packed_weight import can_be_packed, kernel_products, pack_weights

# oneDNN, measured on an AVX-512 server CPU with weights that no cache holds: below, the plain layer is as fast; above,
# the product itself is what costs. (Half precision is always packed.)
_FEWEST_ROWS, _MOST_ROWS = 4, 256
# Smaller fp32 matrices stay in a core's cache, and the call itself costs more than what packing saves.
_SMALLEST_NATIVE, _SMALLEST_ONEDNN = 1 << 16, 1 << 19
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packing_available(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this CPU, has oneDNN's packed linear layer for `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in _DTYPES:
        return False
    try:
        # Asked with a product, not a version: the operators are not part of torch's stable interface.
        weight = torch.ops.mkldnn._reorder_linear_weight.default(torch.ones(2, 2, dtype=dtype))
        product = torch.ops.mkldnn._linear_pointwise.default(
            torch.ones(4, 2, dtype=dtype), weight, None, "none", [], ""
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((product == 2).all())


class OneDnnLinear:
    """One or several linear layers with the same input as one matrix packed by oneDNN, `[X, I] -> [X, O]`.

    Packed at the first call, and again when a weight has changed: an optimizer step or `load_state_dict` is noticed,
    a write through `weight.data` is not, because torch does not count it.
    """

    def __init__(
        self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None], transposed: bool = False
    ) -> None:
        self.weights, self.biases, self.transposed = tuple(weights_OI), tuple(biases_O), transposed
        self._stamp: tuple[int, ...] = ()
        self.packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._run_binary = torch.ops.mkldnn._linear_pointwise.binary

    def same(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]) -> bool:
        """Whether these very tensors are the ones packed here."""
        mine, theirs = (*self.weights, *self.biases), (*weights_OI, *biases_O)
        return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))

    def _fresh(self) -> Tensor:
        stamp = tuple(
            number
            for tensor in (*self.weights, *self.biases)
            if tensor is not None
            for number in (tensor.data_ptr(), tensor._version)
        )
        if self.packed is None or stamp != self._stamp:
            weights = [weight.detach().t() if self.transposed else weight.detach() for weight in self.weights]
            weight_OI = (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight_OI)
            self._bias = _side_by_side([weight.shape[0] for weight in weights], self.biases, weight_OI)
            self._stamp = stamp
        return self.packed

    def __call__(self, x_XI: Tensor) -> Tensor:
        """All layers' outputs side by side."""
        output: Tensor = self._run(x_XI, self._fresh(), self._bias, "none", [], "")
        return output

    def plus(self, x_XI: Tensor, other_XO: Tensor) -> Tensor:
        """`self(x_XI) + other_XO`, added while the product is written."""
        output: Tensor = self._run_binary(x_XI, other_XO, self._fresh(), self._bias, "add")
        return output


def _side_by_side(outputs: Sequence[int], biases_O: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """One bias of all layers, zero for those without; None when none has one."""
    if all(bias is None for bias in biases_O):
        return None
    parts = zip(outputs, biases_O, strict=True)
    return torch.cat([like.new_zeros(count) if bias is None else bias.detach() for count, bias in parts])


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers with the same input: by the kernel (`matrix`), or plain, or by oneDNN where the caller says so.

    `weights_IO` are views of the weights, so that no product has to make one; empty beside a `matrix`. Valid until a
    weight changes: made for one `generate` call.
    """

    outputs: tuple[int, ...]
    matrix: PackedMatrix | None
    bias_O: Tensor | None
    weights_IO: tuple[Tensor, ...] = ()
    biases_O: tuple[Tensor | None, ...] = ()
    one_dnn: OneDnnLinear | None = None

    def parts(self, x_XI: Tensor, packed: bool) -> Sequence[Tensor]:
        """Each layer's outputs. `packed` chooses oneDNN over the plain layer."""
        if self.matrix is not None or (packed and self.one_dnn is not None):
            all_XO = self(x_XI, packed)
            return (all_XO,) if len(self.outputs) == 1 else all_XO.split(self.outputs, dim=1)
        pairs = zip(self.weights_IO, self.biases_O, strict=True)
        return [torch.mm(x_XI, w_IO) if bias is None else torch.addmm(bias, x_XI, w_IO) for w_IO, bias in pairs]

    def __call__(self, x_XI: Tensor, packed: bool) -> Tensor:
        """All outputs side by side, `[X, O]`."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O)
        if packed and self.one_dnn is not None:
            return self.one_dnn(x_XI)
        parts = self.parts(x_XI, packed)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    def plus(self, x_XI: Tensor, other_XO: Tensor, packed: bool) -> Tensor:
        """`self(x_XI) + other_XO`, added while the product is written; for one layer."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O, other_XO.contiguous())
        if packed and self.one_dnn is not None:
            return self.one_dnn.plus(x_XI, other_XO)
        sum_XO = torch.addmm(other_XO, x_XI, self.weights_IO[0])
        return sum_XO if self.biases_O[0] is None else sum_XO.add_(self.biases_O[0])


def _physical_memory() -> int:
    # Of all memory, not of what is free: the same machine always decides the same.
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Packs:
    """How the linear layers of one model are multiplied; shared by all runs of one decoder.

    fp32 parameters on a CPU are packed for the kernel when a run first needs them, in place of the model's own tensors
    (`native`). Else oneDNN's copies are made when a layer first meets several rows, and go with this object; not for
    a model that is larger than a quarter of the machine's memory. On other devices nothing is packed.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.dtype = next((parameter.dtype for parameter in parameters), torch.float32)
        on_cpu = {parameter.device.type for parameter in parameters} == {"cpu"}
        self.native = on_cpu and self.dtype == torch.float32 and kernel() is not None
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._one_dnn = on_cpu and not self.native and packing_available(self.dtype) and size <= _physical_memory() // 4
        self._copies: dict[str, OneDnnLinear] = {}
        self._matrices: dict[str, PackedMatrix] = {}
        # 4-bit matrices stand beside the model's own, which other code reads; with what they were packed from.
        self._four_bits: dict[str, tuple[tuple[int, ...], PackedMatrix]] = {}
        self._freed = False

    def one_dnn(self, rows: int) -> bool:
        """Whether oneDNN's packed layers should multiply this many rows."""
        fewest = _FEWEST_ROWS if self.dtype == torch.float32 else 1
        return self._one_dnn and fewest <= rows <= _MOST_ROWS

    def layer(
        self, name: str, weights: Sequence[Tensor], biases_O: Sequence[Tensor | None], *, any_size: bool = False
    ) -> FusedLinear:
        """Linear layers with the same input as one; `name` tells it from others of the model. `any_size`: the kernel
        is wanted for small ones too.
        """
        outputs = tuple((four_bit_state(weight) or weight).shape[0] for weight in weights)
        if (matrix := self._matrix(name, weights, False, any_size)) is not None:
            return FusedLinear(outputs, matrix, _side_by_side(outputs, biases_O, torch.empty(0)))
        copy = self._copy(name, weights, biases_O, False)
        views_IO = tuple(weight.detach().t() for weight in weights)
        return FusedLinear(outputs, None, None, views_IO, tuple(biases_O), copy)

    def _matrix(self, name: str, weights: Sequence[Tensor], transposed: bool, any_size: bool) -> PackedMatrix | None:
        """The weights packed for the kernel; None when that does not help or cannot be."""
        functions = kernel() if self.native else None
        if functions is None or (not any_size and sum(weight.numel() for weight in weights) < _SMALLEST_NATIVE):
            return None
        if all(four_bit_state(weight) is not None for weight in weights):
            known, now = self._four_bits.get(name), stamp(weights)
            if known is None or known[0] != now:
                known = self._four_bits[name] = now, pack_four_bits(functions, weights)
            return known[1]
        parameters = [weight for weight in weights if isinstance(weight, nn.Parameter) and can_be_packed(weight)]
        matrix = pack_weights(functions, parameters, transposed) if len(parameters) == len(weights) else None
        if matrix is not None and self._matrices.get(name) is not matrix:
            self._matrices[name] = matrix
            self._freed = True
        return matrix

    def settle(self) -> None:
        """To be called when the layers of a model have been asked for: gives back what the fp32 weights left free."""
        if self._freed:
            release_freed_memory()
        self._freed = False

    def _copy(
        self, name: str, weights: Sequence[Tensor], biases_O: Sequence[Tensor | None], transposed: bool
    ) -> OneDnnLinear | None:
        """oneDNN's copy of the weights; None when it would not help or could not be kept true to them."""
        if not self._one_dnn:
            return None
        # Tensors made in inference mode do not count their changes.
        if any(
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.is_inference()
            or tensor.dtype != self.dtype
            or tensor.device.type != "cpu"
            for tensor in (*weights, *(bias for bias in biases_O if bias is not None))
        ):
            return None
        if self.dtype == torch.float32 and sum(weight.numel() for weight in weights) < _SMALLEST_ONEDNN:
            return None
        known = self._copies.get(name)
        if known is None or not known.same(weights, biases_O):
            known = self._copies[name] = OneDnnLinear(weights, biases_O, transposed)
        return known

    def nbytes(self) -> int:
        """Bytes of packed values at present, those that took a parameter's place included."""
        matrices = [*self._matrices.values(), *(matrix for _, matrix in self._four_bits.values())]
        held = [layer.packed for layer in self._copies.values()] + [each.values for each in matrices]
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def prepare(self, model: nn.Module) -> None:
        """Pack the linear layers of a model that is going to be run through its own forward."""
        if self.native:
            for name, module in model.named_modules():
                four_bits = is_four_bits(module)
                if type(module) is nn.Linear or type(module) is Conv1D or four_bits:
                    # bitsandbytes writes a matrix out at every call, so that no size is too small.
                    self._matrix(name, (module.weight,), type(module) is Conv1D, any_size=four_bits)

    @contextmanager
    def inside(self, model: nn.Module, rows: int) -> Iterator[None]:
        """While this lasts, `model`'s own forward multiplies `rows` rows with packed weights."""
        if self.native:
            with kernel_products(), self._replaced(model):
                yield
        elif self.one_dnn(rows):
            with self._replaced(model):
                yield
        else:
            yield

    @contextmanager
    def _replaced(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, the kernel multiplies in 4-bit layers of `model` and oneDNN, if it is in use, in all linear
        layers; afterwards the model is as it was.
        """
        replaced: list[nn.Module] = []
        try:
            for name, module in model.named_modules() if self._one_dnn or self._four_bits else ():
                # A layer with a forward of its own (a hook of accelerate, an adapter) is left alone.
                if "forward" in module.__dict__:
                    continue
                if name in self._four_bits and is_four_bits(module):
                    module.__dict__["forward"] = _kernel_forward(self._four_bits[name][1], module.bias)
                    replaced.append(module)
                    continue
                if not self._one_dnn:
                    continue
                if type(module) is not nn.Linear and type(module) is not Conv1D:
                    continue
                copy = self._copy(name, (module.weight,), (module.bias,), type(module) is Conv1D)
                if copy is not None:
                    module.__dict__["forward"] = _module_forward(copy)
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                module.__dict__.pop("forward", None)


def is_four_bits(module: nn.Module) -> bool:
    """Whether this is a 4-bit layer of bitsandbytes that the kernel can take over."""
    known = type(module).__name__ == "Linear4bit" and four_bit_state(module.weight) is not None
    return known and getattr(module, "compute_dtype", None) in (None, torch.float32)


def _kernel_forward(matrix: PackedMatrix, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x_XI = x.reshape(-1, x.shape[-1]).float().contiguous()
        return matrix.linear(x_XI, bias_O).view(*x.shape[:-1], -1).to(x.dtype)

    return forward


def _module_forward(packed: OneDnnLinear) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        return packed(input)

    return forward
