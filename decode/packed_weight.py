"""Model parameters whose values are kept packed, in place of the fp32 tensor.

The engine multiplies with matrices in the order of its own kernel (`decode.native`), in 16 bits where the checkpoint
has no more. Keeping the fp32 tensor beside that would take one and a half times the memory instead of half. So the
parameter itself becomes a `PackedWeight`: the same Python object (an optimizer, a tied layer or a head that holds it
sees the change), which says it is an fp32 parameter of its shape, and gives every reader the values it always had:

* `F.linear` and the like get an fp32 copy for the length of the call, `F.embedding` copies of its rows, so any forward
  of the model gives the bits that it would give unpacked. Inside `kernel_products()` linear layers use the kernel
  instead, which is faster and rounds differently.
* Anything else (`.data`, `state_dict()`, an optimizer's step, a forward that records gradients, `copy.deepcopy`,
  pickling) turns it back into the ordinary fp32 parameter first. The next decoding packs it again.

Legend: X rows, I inputs, O outputs of a linear layer.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode.native import Kernel, PackedMatrix

_KERNEL_PRODUCTS = ContextVar("kernel_products", default=False)


@contextmanager
def kernel_products() -> Iterator[None]:
    """While this lasts, linear layers with packed weights multiply with the kernel, whoever calls them."""
    before = _KERNEL_PRODUCTS.set(True)
    try:
        yield
    finally:
        _KERNEL_PRODUCTS.reset(before)


@dataclass(frozen=True)
class Place:
    """A parameter's values: rows `first` to `first + count` of `matrix`, or their transposed, `[I, O]`."""

    matrix: PackedMatrix
    first: int
    count: int
    transposed: bool

    def values(self) -> Tensor:
        """The parameter's values, a new fp32 tensor."""
        rows_OI = self.matrix.rows(torch.arange(self.first, self.first + self.count))
        return rows_OI.t().contiguous() if self.transposed else rows_OI

    @property
    def whole(self) -> bool:
        """Whether the matrix holds nothing else."""
        return self.count == self.matrix.outputs


class PackedWeight(nn.Parameter):
    """A parameter that stands for the values at its `place`; see the module's docstring. Made by `pack_weights`."""

    place: Place

    @staticmethod
    def __new__(cls, like: Tensor, place: Place) -> "PackedWeight":
        """Shape, dtype and gradient of `like`, and what was attached to it."""
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, requires_grad=like.requires_grad
        )
        made.__dict__.update(like.__dict__, place=place, _is_param=True)
        made.grad = like.grad
        return made

    def __init__(self, like: Tensor, place: Place) -> None:
        """All is done by `__new__`: `nn.Parameter` has no `__init__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        unpack(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        unpack(self)
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every operation of torch that is called with a packed parameter comes here first."""
        options = dict(kwargs or {})
        if func in _ABOUT_IT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        packed = [value for value in _tensors((args, options)) if isinstance(value, PackedWeight)]
        recorded = torch.is_grad_enabled() and any(weight.requires_grad for weight in packed)
        if func in _PRODUCTS and not recorded:
            shortcut = _PRODUCTS[func] if func is F.embedding or _KERNEL_PRODUCTS.get() else None
            if shortcut is not None and (product := shortcut(*args, **options)) is not None:
                return product
            return func(*map(_plain, args), **{key: _plain(value) for key, value in options.items()})
        for weight in packed:
            unpack(weight)
        return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What did not come through `__torch_function__`: reading is right, writing would be lost."""
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func}: writes to a packed weight; call decode.packed_weight.unpack_model(model) before"
            )
        options = {key: _plain(value) for key, value in (kwargs or {}).items()}
        return func(*map(_plain, args), **options)


def _plain(value: Any) -> Any:
    return value.place.values() if isinstance(value, PackedWeight) else value


def _tensors(value: Any) -> Iterator[Any]:
    """Everything inside lists, tuples and dicts of arguments."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    else:
        yield value


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002 - torch's names
    if not isinstance(weight, PackedWeight) or not weight.place.whole or input.dtype != torch.float32:
        return None
    x_XI = input.reshape(-1, input.shape[-1]).contiguous()
    return weight.place.matrix.linear(x_XI, bias).view(*input.shape[:-1], -1)


def _addmm(bias: Tensor, input: Tensor, weight: Any) -> Tensor | None:  # noqa: A002
    # Transformers' Conv1D, whose weight is [I, O].
    if not isinstance(weight, PackedWeight) or not weight.place.transposed or bias.ndim != 1:
        return None
    return weight.place.matrix.linear(input.contiguous(), bias)


def _embedding(
    input: Tensor,  # noqa: A002
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    # Padding matters to gradients only; a largest norm is enforced by writing to the weight.
    if not isinstance(weight, PackedWeight) or weight.place.transposed or max_norm is not None:
        return None
    rows_N = input.reshape(-1).long() + weight.place.first
    return weight.place.matrix.rows(rows_N).view(*input.shape, -1)


# Operations that only read a weight and return nothing that shares its memory, and how the kernel does them.
_PRODUCTS: dict[Any, Any] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.mm: None,
    torch.matmul: None,
    Tensor.matmul: None,
    Tensor.__matmul__: None,
}


# What can be answered without the values.
_QUESTIONS = """
    shape dtype device layout requires_grad grad grad_fn is_leaf ndim is_cuda is_meta is_sparse is_quantized is_mps
    is_xpu is_nested itemsize nbytes _backward_hooks
""".split()
_ABOUT_IT = frozenset(
    {getattr(Tensor, name).__get__ for name in _QUESTIONS}
    | {getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")}
    | {Tensor.requires_grad_}
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device}
    | {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference, Tensor.__len__, Tensor.__hash__}
)


def can_be_packed(weight: object) -> bool:
    """Whether this is an fp32 parameter in CPU memory that nothing else than Python refers to."""
    if type(weight) is PackedWeight:
        return True
    return (
        type(weight) is nn.Parameter
        and weight.ndim == 2
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and not weight.is_inference()
        and weight._backward_hooks is None
    )


def pack_weights(functions: Kernel, weights: Sequence[Tensor], transposed: bool = False) -> PackedMatrix | None:
    """One matrix of all weights, their outputs below each other, in place of the weights themselves.

    Weights that are packed like this already keep their matrix. `transposed`: they are `[I, O]`. None where torch does
    not let a parameter be exchanged (an autograd graph, or a weak reference, holds it); the weights are then ordinary.
    """
    if (known := _packed_together(weights, transposed)) is not None:
        return known
    for weight in weights:
        unpack(weight)
    # Ordinary tensors, although decoding runs in inference mode: who trains the model later needs them.
    with torch.inference_mode(False), torch.no_grad():
        values = [weight.data.t() if transposed else weight.data for weight in weights]
        matrix = PackedMatrix(functions, (values[0] if len(values) == 1 else torch.cat(values)).contiguous())
        first = 0
        for weight, value_OI in zip(weights, values, strict=True):
            place = Place(matrix, first, value_OI.shape[0], transposed)
            if not _exchange(weight, PackedWeight(weight, place)):
                for other in weights:
                    unpack(other)
                return None
            first += place.count
    return matrix


def _packed_together(weights: Sequence[Tensor], transposed: bool) -> PackedMatrix | None:
    first, matrix = 0, None
    for weight in weights:
        if not isinstance(weight, PackedWeight):
            return None
        place = weight.place
        matrix = matrix or place.matrix
        if place != Place(matrix, first, place.count, transposed):
            return None
        first += place.count
    return matrix if matrix is not None and first == matrix.outputs else None


def unpack(weight: Tensor) -> None:
    """Make a packed parameter the ordinary one that it was; nothing to do for any other."""
    if not isinstance(weight, PackedWeight):
        return
    with torch.inference_mode(False), torch.no_grad():
        ordinary = nn.Parameter(weight.place.values(), requires_grad=weight.requires_grad)
        ordinary.grad = weight.grad
        ordinary.__dict__.update({key: value for key, value in weight.__dict__.items() if key not in _OWN})
    if not _exchange(weight, ordinary):
        raise RuntimeError("a packed weight is held by an autograd graph or a weak reference and cannot be unpacked")


_OWN = ("place", "_is_param")


def unpack_model(model: nn.Module) -> None:
    """Make all parameters of a model ordinary ones again."""
    for parameter in model.parameters():
        unpack(parameter)


def _exchange(weight: Tensor, other: nn.Parameter) -> bool:
    """Put `other` in the place of `weight`, for everybody who holds `weight`; False where torch refuses."""
    try:
        torch.utils.swap_tensors(weight, other)
    except RuntimeError:
        return False
    return True
