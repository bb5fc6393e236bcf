"""Weights on a CPU, packed once for the kernel (`decode.native`): in 16 bits if they fit, else in
32.

Decoding multiplies every weight matrix with 1 to 60 rows, and takes the time of reading the
weights. On other devices, or without a compiler, torch multiplies. Products are in fp32, also of
models in bf16 and fp16.

`take_over(model)` gives a model to its decoders. They put `PackedLinear` and the like in the place
of its modules, which halves its memory. A model that was not given away is never changed, and torch
multiplies it.

Legend: X rows, I inputs, O outputs of a linear layer.
"""

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.core.large_target import in_parts
from draftsmith.core.models import parameter_count
from draftsmith.core.transformers_api import Conv1D
from draftsmith.decode.native import Kernel, PackedMatrix, four_bit_state, kernel, pack_four_bits

# Smaller matrices stay in a core's cache, and the call itself costs more than packing saves.
_SMALLEST = 1 << 16
_KERNEL_PRODUCTS = ContextVar("kernel_products", default=False)
_PACKING = threading.Lock()
# A replaced module's attribute: the module in its place.
_PACKED_AS = "packed_as"


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
    """A linear layer with a packed weight, in the place of `own`. `weight` and `state_dict()` give
    the values; the parameter has their shape alone, but of 4-bit layers, which keep theirs.

    Between `kernel_products` the kernel multiplies; outside, torch does, as `own` would.
    """

    def __init__(self, own: nn.Module, place: PackedRows, parameter: nn.Parameter) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(own))
        self._parameters = own._parameters | {"weight": parameter}
        self.place = place
        # For those who need no more of the weight, which would be unpacked for them
        # (`drafts.heads.borrowed`).
        self.dtype = place.dtype

    def _values(self) -> Tensor:
        own = self._parameters["weight"]
        return self.place.values() if own is None or four_bit_state(own) is None else own

    weight: Any = property(_values)

    def forward(self, x: Tensor) -> Tensor:
        place = self.place
        if not _KERNEL_PRODUCTS.get() or not place.whole:
            return super().forward(x)
        matrix = place.matrix
        bias_O = self._parameters["bias"]
        x_XI = x.reshape(-1, matrix.inputs).float()
        y_XO = matrix.linear(x_XI.contiguous(), None if bias_O is None else bias_O.float())
        shape = (*x.shape[:-1], matrix.outputs)
        return y_XO.view(shape).to(x.dtype)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if four_bit_state(self._parameters["weight"]) is None:
            destination[prefix + "weight"] = self.weight


class PackedLinear(Packed, nn.Linear):
    """`nn.Linear` with a packed weight."""


class PackedConv1D(Packed, Conv1D):
    """transformers' `Conv1D` (GPT-2) with a packed weight."""


class PackedEmbedding(Packed, nn.Embedding):
    """`nn.Embedding` with a packed weight, also that of Gemma 2 and 3, which is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        ids_N = x.reshape(-1).long()
        rows_NI = self.place.matrix.rows(ids_N + self.place.first)
        embedded = rows_NI.unflatten(0, x.shape).to(self.dtype)
        scale = getattr(self, "embed_scale", None)
        return embedded if scale is None else embedded * scale.to(self.dtype)


_PACKED: dict[type[nn.Module], type[Packed]] = {
    nn.Linear: PackedLinear,
    Conv1D: PackedConv1D,
    nn.Embedding: PackedEmbedding,
}
_SCALED = ("Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding")


def _packed_kind(module: nn.Module) -> type[Packed] | None:
    """The class that takes the place of a module; None if it stays."""
    kind = type(module)
    if isinstance(module, Packed):
        return type(module)
    if kind.__name__ == "Linear4bit":
        return type("PackedLinear4bit", (Packed, kind), {})
    return PackedEmbedding if kind.__name__ in _SCALED else _PACKED.get(kind)


def is_four_bits(module: nn.Module) -> bool:
    """Whether this is a 4-bit layer of bitsandbytes that the kernel reads."""
    known = type(module).__name__ == "Linear4bit" and four_bit_state(module.weight) is not None
    return known and getattr(module, "compute_dtype", None) in (None, torch.float32)


class _Slot(NamedTuple):
    """Where a module stands."""

    parent: nn.Module
    name: str


class Packs:
    """The packed weights of a model that was taken over; of no model, if it packs nothing."""

    def __init__(self, model: nn.Module | None = None) -> None:
        # By parameter, the modules that hold it.
        self._slots: dict[nn.Parameter, list[_Slot]] = defaultdict(list)
        self._rows: PackedMatrix | None = None
        self.parameters = 0 if model is None else parameter_count(model)
        modules = [] if model is None else list(model.modules())
        parameters = [] if model is None else list(model.parameters())
        weights = [weight for weight in parameters if four_bit_state(weight) is None]
        # A model in several dtypes decides itself where it rounds.
        one_dtype = len({weight.dtype for weight in weights}) == 1
        self.native = one_dtype and all(map(_on_cpu, weights)) and kernel() is not None
        for parent in modules:
            for name, module in parent._modules.items():
                weight = None if module is None else module._parameters.get("weight")
                if weight is not None:
                    self._slots[weight].append(_Slot(parent, name))

    def matrix(
        self, linears: Sequence[nn.Module], *, any_size: bool = False
    ) -> PackedMatrix | None:
        """Put packed layers in the place of linear layers with the same input. Return their
        weights, one below the other; None if packing does not help.

        any_size: pack small ones too.
        """
        functions = kernel() if self.native else None
        if functions is None:
            return None
        with _PACKING:
            # Another thread may have packed them after the caller read the model.
            linears = [_current(linear) for linear in linears]
            known = _packed_together(linears)
            return known or self._packed(functions, linears, any_size=any_size)

    def _packed(
        self, functions: Kernel, linears: Sequence[nn.Module], *, any_size: bool
    ) -> PackedMatrix | None:
        weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
        four_bits = all(four_bit_state(weight) is not None for weight in weights)
        if not four_bits and not all(map(_packable, weights)):
            return None
        if not any_size and sum(weight.numel() for weight in weights) < _SMALLEST:
            return None
        if any(_packed_kind(linear) is None for linear in linears):
            return None
        transposed = isinstance(linears[0], Conv1D)
        if four_bits:
            matrix = pack_four_bits(functions, weights)
        else:
            rows = [weight.detach() for weight in weights]
            if transposed:
                rows = [weight.t() for weight in rows]
            whole_OI = rows[0] if len(rows) == 1 else torch.cat(rows)
            matrix = PackedMatrix(functions, whole_OI.contiguous())
        first = 0
        for linear, weight in zip(linears, weights, strict=True):
            dtype = torch.float32 if four_bits else weight.dtype
            count = linear.out_features if isinstance(linear, nn.Linear) else matrix.outputs
            self._replace(linear, PackedRows(matrix, first, count, dtype, transposed))
            first += count
        # glibc would keep much of the replaced weights.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return matrix

    def _replace(self, linear: nn.Module, place: PackedRows) -> None:
        """Put packed modules wherever the weight of a linear layer is held."""
        weight = linear._parameters["weight"]
        assert weight is not None
        slots = self._slots.pop(weight)
        if four_bit_state(weight) is None:
            # One number: others count parameters by their shapes.
            weight = nn.Parameter(weight.new_zeros(1).expand(weight.shape), requires_grad=False)
        self._slots[weight] = slots
        for parent, name in slots:
            module = parent.get_submodule(name)
            kind = _packed_kind(module)
            if kind is not None:
                packed = kind(module, place, weight)
                parent._modules[name] = packed
                module.__dict__[_PACKED_AS] = packed

    def rows(self, weight_DI: Tensor) -> PackedMatrix | None:
        """Return a weight that is no module's, packed at the first call."""
        functions = kernel() if self.native else None
        if functions is not None and self._rows is None and weight_DI.numel() >= _SMALLEST:
            self._rows = PackedMatrix(functions, weight_DI.detach().contiguous())
        return self._rows

    def prepare(self, model: nn.Module) -> None:
        """Pack the linear layers of a model or head for its own forward."""
        names = [name for name, _ in model.named_modules()] if self.native else []
        for name in names:
            module = model.get_submodule(name)
            # A layer with a forward of its own (a hook of accelerate, an adapter) is left alone.
            if "forward" in module.__dict__:
                continue
            # bitsandbytes unpacks the matrix at every call, so no size is too small.
            four_bits = is_four_bits(module)
            if four_bits or type(module) in (nn.Linear, Conv1D):
                self.matrix([module], any_size=four_bits)


_NOTHING = Packs()


def _current(module: nn.Module) -> nn.Module:
    """Return the module that stands in the place of this one now."""
    while _PACKED_AS in module.__dict__:
        module = module.__dict__[_PACKED_AS]
    return module


def _packed_together(linears: Sequence[nn.Module]) -> PackedMatrix | None:
    """Return the matrix of layers that were packed together before."""
    places = [linear.place for linear in linears if isinstance(linear, Packed)]
    if len(places) < len(linears) or len({id(place.matrix) for place in places}) > 1:
        return None
    rows = sum(place.count for place in places)
    matrix = places[0].matrix
    return matrix if places[0].first == 0 and rows == matrix.outputs else None


def packs_of(model: nn.Module) -> Packs:
    """Return the packed weights of a model, or of the head that it wraps."""
    for module in (model, *model.children()):
        if isinstance(packs := module.__dict__.get("_packs"), Packs):
            return packs
    return _NOTHING


def take_over(*models: nn.Module) -> None:
    """Let decoders put packed layers in the place of those of these models. Do not write to the
    models afterwards.

    Forwards, `state_dict()` and `module.weight` give the same values as before; parameters do not.
    A model that no device has whole is left as it is.
    """
    for model in models:
        if "_packs" not in model.__dict__ and not in_parts(model):
            model.__dict__["_packs"] = Packs(model)


class FusedLinear:
    """Linear layers with the same input, multiplied by the kernel (`matrix`, all weights, one below
    the other) or by torch. Made for one `generate` call.
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
