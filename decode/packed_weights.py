"""Weights on a CPU, packed once for the kernel (`decode.native`): in 16 bits if they fit, else in
32.

Decoding multiplies every weight matrix with 1 to 60 rows, and takes the time of reading the
weights. On other devices, or without a compiler, torch multiplies. Products are in fp32, also of
models in bf16 and fp16.

A model that is handed in is not changed: packed weights stand beside its own, for the lean forward
of the families that it knows (`families`); other architectures run their own forward.
`take_over(model)` gives a model to its decoders: packed weights replace its own, which halves its
memory, and every architecture multiplies with them.

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

from draftsmith.core.device_map import in_parts
from draftsmith.decode.native import PackedMatrix, four_bit_state, kernel, pack_four_bits

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
class PackedRows:
    """A weight of `dtype` in a packed matrix: rows `first` to `first + count` of `matrix`, or
    their transpose `[I, O]`.
    """

    matrix: PackedMatrix
    first: int
    count: int
    dtype: torch.dtype
    transposed: bool = False
    copied: bool = False  # whether the module keeps the weight too
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
            numbers = torch.arange(self.first, self.first + self.count)
            values = self.matrix.rows(numbers).to(self.dtype)
            if self.transposed:
                values = values.t().contiguous()
            self._last = weakref.ref(values)
        return values


class Packed(nn.Module):
    """A module with a packed weight, which it got as a new `__class__`: who holds it need not know.

    Its states, with what `module.weight` and `state_dict()` give:

        plain       own class                    its parameter
        taken over  `PackedLinear`, ...          values unpacked from `place`; the parameter has the
                                                 shape only, and NaN
        4 bits      `Packed` and its own class   its parameter, which `place` copies

    Between `kernel_products`, the kernel multiplies; outside, its own class does.
    """

    place: PackedRows

    # For those who need no more of the weight, which would be unpacked for them
    # (`drafts.heads.borrowed`).
    dtype: Any = property(lambda self: self.place.dtype)

    def _values(self) -> Tensor | None:
        return self._parameters["weight"] if self.place.copied else self.place.values()

    weight: Any = property(_values)

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        matrix = place.matrix
        if isinstance(self, nn.Embedding):
            ids_N = x.reshape(-1).long()
            rows_NI = matrix.rows(ids_N + place.first)
            return rows_NI.unflatten(0, x.shape).to(place.dtype)
        if not _KERNEL_PRODUCTS.get() or not place.whole:
            return super().forward(x)
        bias_O = self._parameters["bias"]
        x_XI = x.reshape(-1, matrix.inputs).float()
        y_XO = matrix.linear(x_XI.contiguous(), None if bias_O is None else bias_O.float())
        shape = (*x.shape[:-1], matrix.outputs)
        return y_XO.view(shape).to(x.dtype)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.place.copied:
            destination[prefix + "weight"] = self.weight


class PackedLinear(Packed, nn.Linear):
    """`nn.Linear` with a packed weight."""


class PackedConv1D(Packed, Conv1D):
    """transformers' `Conv1D` (GPT-2) with a packed weight."""


class PackedEmbedding(Packed, nn.Embedding):
    """`nn.Embedding` with a packed weight, shared with the output projection."""


class PackedScaled(PackedEmbedding):
    """The embedding of Gemma 2 and 3, which is scaled: its own forward reads the dtype of `weight`,
    which would unpack it.
    """

    embed_scale: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.embed_scale.to(self.dtype)


PACKED: dict[type, type] = {
    nn.Linear: PackedLinear,
    Conv1D: PackedConv1D,
    nn.Embedding: PackedEmbedding,
}
KINDS = {PackedScaled, *PACKED.values()}
_SCALED = ("Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding")


def _packed_kind(module: nn.Module) -> type | None:
    """The class of this module once its weight is packed; None if it must keep its own."""
    kind = type(module)
    if kind.__name__ in _SCALED:
        return PackedScaled
    return kind if kind in KINDS else PACKED.get(kind)


def is_four_bits(module: nn.Module) -> bool:
    """Whether this is a 4-bit layer of bitsandbytes that the kernel reads."""
    known = type(module).__name__ == "Linear4bit" and four_bit_state(module.weight) is not None
    return known and getattr(module, "compute_dtype", None) in (None, torch.float32)


class Packs:
    """The packed weights of one model, shared by its decoders (`packs_of`)."""

    def __init__(self, model: nn.Module, *, owned: bool = False) -> None:
        weights = [weight for weight in model.parameters() if four_bit_state(weight) is None]
        # A model in several dtypes decides itself where it rounds.
        one_dtype = len({weight.dtype for weight in weights}) < 2
        self.native = one_dtype and all(map(_on_cpu, weights)) and kernel() is not None
        self.owned = owned and self.native
        # Matrices that replaced nothing, with the stamp of their weights.
        self._beside: dict[str, tuple[list[float], PackedMatrix]] = {}
        self._modules = list(model.modules()) if self.owned else []

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
        known = _packed_together(linears)
        if known is not None:
            return known
        weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
        four_bits = all(four_bit_state(weight) is not None for weight in weights)
        if not four_bits and not all(map(_packable, weights)):
            return None
        if not any_size and sum(weight.numel() for weight in weights) < _SMALLEST:
            return None
        holders = [self._holders(linear) for linear in linears]
        kinds = [map(_packed_kind, modules) for modules in holders]
        replaces = self.owned and all(holders) and all(map(all, kinds))
        stamp = [] if replaces else _stamp(weights)
        known_stamp, known = self._beside.get(name, (None, None))
        if known_stamp == stamp:
            return known
        transposed = isinstance(linears[0], Conv1D)
        if four_bits:
            matrix = pack_four_bits(functions, weights)
        else:
            rows = [weight.detach() for weight in weights]
            if transposed:
                rows = [weight.t() for weight in rows]
            whole_OI = rows[0] if len(rows) == 1 else torch.cat(rows)
            matrix = PackedMatrix(functions, whole_OI.contiguous())
        if not replaces:
            self._beside[name] = (stamp, matrix)
            return matrix
        first = 0
        for modules, weight in zip(holders, weights, strict=True):
            count = weight.shape[1 if transposed else 0]
            place = PackedRows(matrix, first, count, weight.dtype, transposed)
            first += count
            nothing = weight.new_full((1,), torch.nan).expand(weight.shape)
            stand_in = nn.Parameter(nothing, requires_grad=False)
            for holder in modules:
                holder._parameters["weight"] = stand_in
                _give_place(holder, place, _packed_kind(holder) or type(holder))
        _give_back()
        return matrix

    def _holders(self, linear: nn.Module) -> list[nn.Module]:
        """The modules of the model that hold the parameter of one of them."""
        weight = linear._parameters.get("weight")
        return [module for module in self._modules if module._parameters.get("weight") is weight]

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
                if matrix is not None and not isinstance(module, Packed):
                    place = PackedRows(matrix, 0, matrix.outputs, torch.float32, copied=True)
                    _give_place(module, place, type("Linear4bit", (Packed, type(module)), {}))
            elif type(module) in (nn.Linear, Conv1D):
                self.matrix(name, [module])

    def nbytes(self) -> int:
        """Bytes of the packed weights beside the model's own."""
        return sum(matrix.values.nbytes for _, matrix in self._beside.values())


def _give_back() -> None:
    """Give free memory back to the system: glibc would keep much of the replaced weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _packed_together(linears: Sequence[nn.Module]) -> PackedMatrix | None:
    """Return the matrix of layers that were packed together before."""
    places = [linear.place for linear in linears if isinstance(linear, Packed)]
    if len(places) < len(linears) or len({id(place.matrix) for place in places}) > 1:
        return None
    rows = sum(place.count for place in places)
    matrix = places[0].matrix
    return matrix if places[0].first == 0 and rows == matrix.outputs else None


def _give_place(module: nn.Module, place: PackedRows, kind: type) -> None:
    module.place = place  # type: ignore[assignment]
    module.__class__ = kind


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
    A model that no device has whole is left as it is.
    """
    for model in models:
        if "_packs" not in model.__dict__ and not in_parts(model):
            model.__dict__["_packs"] = Packs(model, owned=True)


class FusedLinear:
    """Linear layers with the same input, multiplied by the kernel (`matrix`, all weights, one below
    the other) or by torch. Valid until a weight changes: made for one `generate` call.
    """

    def __init__(
        self, linears: Sequence[nn.Module], matrix: PackedMatrix | None, dtype: torch.dtype
    ) -> None:
        layers: list[Any] = list(linears)
        self.matrix = matrix
        self.outputs: list[int] = [layer.out_features for layer in layers]
        self.bias_O: Tensor | None = None
        self._biases_O: list[Tensor | None] = [
            None if layer.bias is None else layer.bias.detach().to(dtype) for layer in layers
        ]
        self._weights_IO: list[Tensor] = []
        if matrix is None:
            self._weights_IO = [layer.weight.detach().to(dtype).t() for layer in layers]
        elif any(bias is not None for bias in self._biases_O):
            pairs = zip(self.outputs, self._biases_O, strict=True)
            biases = [torch.zeros(count) if bias is None else bias for count, bias in pairs]
            self.bias_O = torch.cat(biases)

    def parts(self, x_XI: Tensor) -> Sequence[Tensor]:
        """Each layer's outputs."""
        if self.matrix is not None:
            return self(x_XI).split(self.outputs, dim=1)
        pairs = zip(self._weights_IO, self._biases_O, strict=True)
        return [_product(x_XI, w_IO, bias_O) for w_IO, bias_O in pairs]

    def __call__(self, x_XI: Tensor) -> Tensor:
        """All outputs side by side, `[X, O]`."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O)
        if len(self.outputs) == 1:
            return self.parts(x_XI)[0]
        if torch.compiler.is_compiling():
            return torch.cat(list(self.parts(x_XI)), dim=1)
        # Written side by side, which saves a kernel.
        out_XO = x_XI.new_empty(len(x_XI), sum(self.outputs))
        slots = out_XO.split(self.outputs, dim=1)
        for slot, w_IO, bias_O in zip(slots, self._weights_IO, self._biases_O, strict=True):
            _product(x_XI, w_IO, bias_O, out=slot)
        return out_XO

    def plus(self, x_XI: Tensor, other_XO: Tensor) -> Tensor:
        """`self(x_XI) + other_XO` of a single layer, added while the product is written."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O, other_XO.contiguous())
        sum_XO = _product(x_XI, self._weights_IO[0], other_XO)
        return sum_XO if self._biases_O[0] is None else sum_XO.add_(self._biases_O[0])


def _product(
    x_XI: Tensor, weight_IO: Tensor, added: Tensor | None, out: Tensor | None = None
) -> Tensor:
    if added is None:
        return torch.mm(x_XI, weight_IO, out=out)
    if torch.compiler.is_compiling():
        # inductor makes a product of one row a reduction and fuses the sum, but leaves `addmm`.
        return torch.mm(x_XI, weight_IO) + added
    return torch.addmm(added, x_XI, weight_IO, out=out)


def _on_cpu(weight: Tensor) -> bool:
    known = (torch.float32, torch.bfloat16, torch.float16)
    return weight.device.type == "cpu" and weight.dtype in known


def _packable(weight: Tensor) -> bool:
    plain = type(weight) in (nn.Parameter, Tensor) and not weight.is_inference()
    return plain and weight.ndim == 2 and _on_cpu(weight)


def _stamp(weights: Sequence[Tensor]) -> list[float]:
    """Changes when a weight is replaced or written to; a write through `.data` must change the
    sampled values.
    """
    stamp: list[float] = []
    states = [state for weight in weights if (state := four_bit_state(weight)) is not None]
    for tensor in [*weights, *(state.absmax for state in states)]:
        values = tensor.detach().reshape(-1)
        step = len(values) // _SAMPLE + 1
        sample_sum = values[::step].sum(dtype=torch.float32)
        stamp += [tensor.data_ptr(), tensor._version, float(sample_sum)]
    return stamp
