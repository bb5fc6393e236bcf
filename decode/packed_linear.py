"""Linear layers for a handful of rows on a CPU: weights packed once, and a plain layer for one row.

Verifying a tree multiplies every weight matrix with 5 to 60 rows. The plain layer's library repacks the matrix at
every such call, which costs more than the product. In fp32 a matrix packed beforehand is multiplied by a kernel of our
own (`decode.native`) at nearly the cost of reading it, or by oneDNN where that kernel cannot be built; in half
precision by oneDNN. Which way is taken depends on the machine, dtype, size and rows alone, never on a timing, so that
runs repeat to the bit.

Legend: X rows, I inputs, O outputs of all fused layers together.

The packed copies belong to a `Packs`, which belongs to a decoder: the model is not touched, and the copies go when
the decoder goes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.native import MOST_ROWS, kernel

# Measured on an AVX-512 server CPU with weights that no cache holds: below, the plain layer is as fast; above, the
# product itself is what costs. (Half precision is always packed.)
_FEWEST_ROWS_NATIVE, _FEWEST_ROWS_ONEDNN = 2, 4
# A smaller model may live in a cache, where the plain layer keeps up for two and three rows.
_LARGE_BYTES = 1 << 26
# Smaller fp32 matrices stay in a core's cache, and the call itself costs more than repacking them.
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


class PackedLinear:
    """One or several linear layers with the same input as one packed matrix, `[X, I] -> [X, O]`.

    Packed at the first call, and again when a weight has changed: an optimizer step or `load_state_dict` is noticed,
    a write through `weight.data` is not, because torch does not count it.
    """

    def __init__(
        self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None], transposed: bool = False
    ) -> None:
        self.weights, self.biases, self.transposed = tuple(weights_OI), tuple(biases_O), transposed
        self._stamp: tuple[int, ...] = ()
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self.outputs = sum(weight.shape[1 if transposed else 0] for weight in self.weights)
        self._native = kernel() if self.weights[0].dtype == torch.float32 else None
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
        if self._packed is None or stamp != self._stamp:
            weights = [weight.detach().t() if self.transposed else weight.detach() for weight in self.weights]
            weight_OI = (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()
            reorder = torch.ops.mkldnn._reorder_linear_weight.default
            self._packed = reorder(weight_OI) if self._native is None else self._native.pack(weight_OI)
            self._bias = None
            if any(bias is not None for bias in self.biases):
                self._bias = torch.cat(
                    [
                        weight.new_zeros(weight.shape[0]) if bias is None else bias.detach()
                        for weight, bias in zip(weights, self.biases, strict=True)
                    ]
                )
            self._stamp = stamp
        return self._packed

    def __call__(self, x_XI: Tensor) -> Tensor:
        """All layers' outputs side by side."""
        packed = self._fresh()
        if self._native is not None:
            rows_XI = x_XI.reshape(-1, x_XI.shape[-1]).contiguous()
            return self._native.linear(rows_XI, packed, self.outputs, self._bias, None).view(*x_XI.shape[:-1], -1)
        output: Tensor = self._run(x_XI, packed, self._bias, "none", [], "")
        return output

    def plus(self, x_XI: Tensor, other_XO: Tensor) -> Tensor:
        """`self(x_XI) + other_XO`, added while the product is written."""
        packed = self._fresh()
        if self._native is not None:
            return self._native.linear(x_XI.contiguous(), packed, self.outputs, self._bias, other_XO.contiguous())
        output: Tensor = self._run_binary(x_XI, other_XO, packed, self._bias, "add")
        return output


def _physical_memory() -> int:
    # Of all memory, not of what is free: the same machine always decides the same.
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Packs:
    """The packed layers of one model, by name; shared by all runs of one decoder and gone with it.

    Nothing is packed before a layer first meets several rows. A model that does not qualify (another device, dtype
    or kind of tensor, or larger than a quarter of the machine's memory) has no packed layers.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.dtype = next((parameter.dtype for parameter in parameters), torch.float32)
        devices = {parameter.device.type for parameter in parameters}
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self.available = devices == {"cpu"} and packing_available(self.dtype) and size <= _physical_memory() // 4
        self._large = size >= _LARGE_BYTES
        self.native = self.available and self.dtype == torch.float32 and kernel() is not None
        self._packed: dict[str, PackedLinear] = {}

    def useful(self, rows: int) -> bool:
        """Whether this many rows should go through packed layers."""
        if self.dtype != torch.float32:
            fewest = 1
        else:
            fewest = _FEWEST_ROWS_NATIVE if self.native and self._large else _FEWEST_ROWS_ONEDNN
        return self.available and fewest <= rows <= MOST_ROWS

    def layer(
        self, name: str, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None], transposed: bool = False
    ) -> PackedLinear | None:
        """The packed layer of that name for these tensors (`transposed`: they are `[I, O]`); None when packing does
        not help or could not be kept true to them.
        """
        if not self.available:
            return None
        tensors = [*weights_OI, *(bias for bias in biases_O if bias is not None)]
        # Tensors made in inference mode do not count their changes.
        if any(
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.is_inference()
            or tensor.dtype != self.dtype
            or tensor.device.type != "cpu"
            for tensor in tensors
        ):
            return None
        smallest = _SMALLEST_NATIVE if self.native else _SMALLEST_ONEDNN
        if self.dtype == torch.float32 and sum(weight.numel() for weight in weights_OI) < smallest:
            return None
        known = self._packed.get(name)
        if known is None or not known.same(weights_OI, biases_O):
            known = self._packed[name] = PackedLinear(weights_OI, biases_O, transposed)
        return known

    def nbytes(self) -> int:
        """Bytes held by packed copies at present."""
        held = [layer._packed for layer in self._packed.values() if layer._packed is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, the linear layers of `model` run packed; afterwards the model is as it was."""
        replaced: list[nn.Module] = []
        try:
            for name, module in model.named_modules():
                # A layer with a forward of its own (a hook of accelerate, an adapter) is left alone.
                if "forward" in module.__dict__:
                    continue
                if type(module) is not nn.Linear and type(module) is not Conv1D:
                    continue
                packed = self.layer(name, (module.weight,), (module.bias,), type(module) is Conv1D)
                if packed is not None:
                    module.__dict__["forward"] = _module_forward(packed)
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                module.__dict__.pop("forward", None)


def _module_forward(packed: PackedLinear) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        return packed(input)

    return forward
