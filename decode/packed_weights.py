"""Weights on a CPU, packed once for the kernel (`decode.native`): in 16 bits if they fit, else in
32.

Decoding multiplies every weight matrix with 1 to 60 rows, and takes the time of reading the
weights. On other devices, or without a compiler, torch multiplies. Products are in fp32, also of
models in bf16 and fp16.

A model that is handed in is not changed: packed weights stand beside its own, for the lean forward
of the LLaMA family; other architectures run their own forward. `take_over(model)` gives a model to
its decoders: packed weights replace its own, which halves its memory, and every architecture
multiplies with them.

Legend: X rows, I inputs, O outputs of a linear layer.
"""

import ctypes
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.native import PackedMatrix, four_bit_state, kernel, pack_four_bits

# Smaller matrices stay in a core's cache, and the call itself costs more than packing saves.
_SMALLEST = 1 << 16
_SAMPLE = 64  # values of a weight that are compared to notice a change
_KERNEL_PRODUCTS = ContextVar("kernel_products", default=False)


@contextmanager
def kernel_products() -> Iterator[None]:
    """Let packed modules multiply with the kernel. Outside, they compute what their own weights
    would, to the bit.
    """
    before = _KERNEL_PRODUCTS.set(True)
    try:
        yield
    finally:
        _KERNEL_PRODUCTS.reset(before)


@dataclass(eq=False)
class Place:
    """Where a weight of `dtype` is: rows `first` to `first + count` of `matrix`, or their transpose
    `[I, O]`.
    """

    matrix: PackedMatrix
    first: int
    count: int
    dtype: torch.dtype
    transposed: bool = False
    _last: "weakref.ref[Tensor] | None" = None

    @property
    def whole(self) -> bool:
        """Whether the matrix holds nothing else."""
        return self.count == self.matrix.outputs

    def values(self) -> Tensor:
        """Return the weight: one tensor as long as anybody holds it, so that a tied weight is saved
        once.
        """
        values = self._last() if self._last is not None else None
        if values is None:
            rows_OI = self.matrix.rows(torch.arange(self.first, self.first + self.count)).to(
                self.dtype
            )
            values = rows_OI.t().contiguous() if self.transposed else rows_OI
            self._last = weakref.ref(values)
        return values


class _KernelForward(nn.Module):
    place: Place

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.place.matrix
        if not _KERNEL_PRODUCTS.get() or not self.place.whole:
            return super().forward(x)
        bias: Any = None if self.bias is None else self.bias.float()
        x_XI = x.reshape(-1, matrix.inputs).float().contiguous()
        return matrix.linear(x_XI, bias).view(*x.shape[:-1], matrix.outputs).to(x.dtype)


class _Packed(nn.Module):
    """A module whose parameter `weight` has only the shape; the values are at `place`."""

    place: Place

    weight: Any = property(lambda self: self.place.values())
    # For those who need no more than that of the weight, which would be unpacked for them
    # (drafts.heads.borrowed).
    dtype: Any = property(lambda self: self.place.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class PackedLinear(_KernelForward, _Packed, nn.Linear):
    """`nn.Linear` with a packed weight."""


class PackedConv1D(_KernelForward, _Packed, Conv1D):
    """transformers' `Conv1D` (GPT-2) with a packed weight."""


class PackedEmbedding(_Packed, nn.Embedding):
    """`nn.Embedding` with a packed weight, shared with the output projection."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.place.matrix.rows(ids.reshape(-1).long() + self.place.first)
        return rows.view(*ids.shape, -1).to(self.place.dtype)


_PACKED: dict[type, type] = {
    nn.Linear: PackedLinear,
    Conv1D: PackedConv1D,
    nn.Embedding: PackedEmbedding,
}


def is_four_bits(module: nn.Module) -> bool:
    """Whether this is a 4-bit layer of bitsandbytes that the kernel reads."""
    known = type(module).__name__ == "Linear4bit" and four_bit_state(module.weight) is not None
    return known and getattr(module, "compute_dtype", None) in (None, torch.float32)


class Packs:
    """The packed weights of one model, shared by its decoders (`packs_of`)."""

    def __init__(self, model: nn.Module, *, owned: bool = False) -> None:
        weights = [weight for weight in model.parameters() if four_bit_state(weight) is None]
        # A model in several dtypes decides itself where it rounds.
        self.native = all(map(_on_cpu, weights)) and len({weight.dtype for weight in weights}) < 2
        self.native = self.native and kernel() is not None
        self.owned = owned and self.native
        # Matrices that replaced nothing, with the stamp of their weights.
        self._beside: dict[str, tuple[object, PackedMatrix]] = {}
        self._sharing: dict[int, list[nn.Module]] = {}
        for module in model.modules() if self.owned else ():
            if (weight := module._parameters.get("weight")) is not None:
                self._sharing.setdefault(id(weight), []).append(module)
        self._sharing = {id(module): group for group in self._sharing.values() for module in group}
        self._freed = False

    def matrix(
        self, name: str, linears: Sequence[nn.Module], *, any_size: bool = False
    ) -> PackedMatrix | None:
        """Return the weights of linear layers with the same input as one matrix; None if packing
        does not help.

        name: key of the matrix in its model. any_size: pack small ones too.
        """
        functions = kernel() if self.native else None
        if functions is None:
            return None
        places = [linear.place for linear in linears if isinstance(linear, _Packed)]
        if len(places) == len(linears) and len({id(place.matrix) for place in places}) == 1:
            first, matrix = places[0].first, places[0].matrix
            if first == 0 and sum(place.count for place in places) == matrix.outputs:
                return matrix
        weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
        four_bits = all(four_bit_state(weight) is not None for weight in weights)
        plain = [
            type(w) in (nn.Parameter, Tensor) and w.ndim == 2 and not w.is_inference()
            for w in weights
        ]
        if not four_bits and not (all(plain) and all(map(_on_cpu, weights))):
            return None
        if not any_size and sum(weight.numel() for weight in weights) < _SMALLEST:
            return None
        holders = [
            holder for linear in linears for holder in self._sharing.get(id(linear), (None,))
        ]
        replaceable = self.owned and all(
            type(holder) in (*_PACKED, *_PACKED.values())
            and getattr(holder, "max_norm", None) is None
            for holder in holders
        )
        stamp = None if replaceable else _stamp(weights)
        if stamp is not None and name in self._beside and self._beside[name][0] == stamp:
            return self._beside[name][1]
        transposed = isinstance(linears[0], Conv1D)
        if four_bits:
            matrix = pack_four_bits(functions, weights)
        else:
            values = [weight.detach().t() if transposed else weight.detach() for weight in weights]
            matrix = PackedMatrix(
                functions, (values[0] if len(values) == 1 else torch.cat(values)).contiguous()
            )
            del values
        if stamp is not None:
            self._beside[name] = stamp, matrix
            return matrix
        first = 0
        for linear, weight in zip(linears, weights, strict=True):
            place = Place(
                matrix, first, weight.shape[1 if transposed else 0], weight.dtype, transposed
            )
            first += place.count
            # The parameter itself has the shape and NaN; `module.weight` and `state_dict()` give
            # the values.
            nothing = torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape)
            stand_in = nn.Parameter(nothing, requires_grad=False)
            for holder in self._sharing[id(linear)]:
                holder._parameters["weight"] = stand_in
                holder.place = place  # type: ignore[assignment]
                holder.__class__ = _PACKED.get(type(holder), type(holder))
        self._freed = True
        return matrix

    def prepare(self, model: nn.Module) -> None:
        """Pack the linear layers of a model or head for its own forward."""
        if self.native and not self.owned and model.dtype != torch.float32:
            dtype = str(model.dtype).removeprefix("torch.")
            advice = "load it in float32, or call decode.take_over(model)"
            warnings.warn(
                f"{type(model).__name__} in {dtype} decodes slowly on a CPU; {advice}", stacklevel=2
            )
        for name, module in model.named_modules() if self.owned else ():
            # A layer with a forward of its own (a hook of accelerate, an adapter) is left alone.
            if "forward" in module.__dict__:
                continue
            if is_four_bits(module):
                # bitsandbytes unpacks the matrix at every call, so no size is too small.
                matrix = self.matrix(name, [module], any_size=True)
                if matrix is not None and not isinstance(module, _KernelForward):
                    module.place = Place(matrix, 0, matrix.outputs, torch.float32)
                    module.__class__ = type("Linear4bit", (_KernelForward, type(module)), {})
            elif type(module) in (nn.Linear, Conv1D):
                self.matrix(name, [module])

    def settle(self) -> None:
        """Give the memory of replaced weights back to the system: glibc would keep much of it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if self._freed else None
        self._freed = False
        if trim is not None:
            trim(0)

    def nbytes(self) -> int:
        """Bytes of the packed weights beside the model's own."""
        return sum(matrix.values.nbytes for _, matrix in self._beside.values())


_SHARED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Packs]]" = weakref.WeakKeyDictionary()


def packs_of(model: nn.Module) -> Packs:
    """Return the packed weights of a model: the same object while a decoder holds it."""
    # A head is wrapped for its runner.
    for module in (model, *model.children()):
        if isinstance(owned := module.__dict__.get("_packs"), Packs):
            return owned
    reference = _SHARED.get(model)
    packs = reference() if reference is not None else None
    if packs is None:
        packs = Packs(model)
        _SHARED[model] = weakref.ref(packs)
    return packs


def take_over(*models: nn.Module) -> None:
    """Let decoders replace the weights of these models by packed ones. Do not write to the models
    afterwards.

    Forwards, `state_dict()` and `module.weight` give the same values as before; parameters do not.
    """
    for model in models:
        if "_packs" not in model.__dict__:
            model.__dict__["_packs"] = Packs(model, owned=True)


class FusedLinear:
    """Linear layers with the same input, multiplied by the kernel (`matrix`, all weights, one below
    the other) or by torch. Valid until a weight changes: made for one `generate` call.
    """

    def __init__(
        self, linears: Sequence[nn.Module], matrix: PackedMatrix | None, dtype: torch.dtype
    ) -> None:
        layers: list[Any] = list(linears)
        self.matrix, self.outputs = matrix, [layer.out_features for layer in layers]
        self._biases_O = [
            None if layer.bias is None else layer.bias.detach().to(dtype) for layer in layers
        ]
        self._weights_IO, self.bias_O = [], None
        if matrix is None:
            self._weights_IO = [layer.weight.detach().to(dtype).t() for layer in layers]
        elif any(bias is not None for bias in self._biases_O):
            pairs = zip(self.outputs, self._biases_O, strict=True)
            self.bias_O = torch.cat(
                [torch.zeros(count) if bias is None else bias for count, bias in pairs]
            )

    def parts(self, x_XI: Tensor) -> Sequence[Tensor]:
        """Each layer's outputs."""
        if self.matrix is not None:
            return torch.split(self(x_XI), self.outputs, dim=1)
        pairs = zip(self._weights_IO, self._biases_O, strict=True)
        return [
            torch.mm(x_XI, w_IO) if bias is None else torch.addmm(bias, x_XI, w_IO)
            for w_IO, bias in pairs
        ]

    def __call__(self, x_XI: Tensor) -> Tensor:
        """All outputs side by side, `[X, O]`."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O)
        parts = self.parts(x_XI)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    def plus(self, x_XI: Tensor, other_XO: Tensor) -> Tensor:
        """`self(x_XI) + other_XO` of a single layer, added while the product is written."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O, other_XO.contiguous())
        sum_XO = torch.addmm(other_XO, x_XI, self._weights_IO[0])
        return sum_XO if self._biases_O[0] is None else sum_XO.add_(self._biases_O[0])


def _on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )


def _stamp(weights: Sequence[Tensor]) -> object:
    """Changes when a weight is replaced or written to; a write through `.data` must change the
    sampled values.
    """
    states = [state for weight in weights if (state := four_bit_state(weight)) is not None]
    tensors = [*weights, *(state.absmax for state in states)]
    samples = [tensor.detach().reshape(-1)[:: tensor.numel() // _SAMPLE + 1] for tensor in tensors]
    sums = [float(sample.sum(dtype=torch.float32)) for sample in samples]
    return [
        (tensor.data_ptr(), tensor._version, total)
        for tensor, total in zip(tensors, sums, strict=True)
    ]
