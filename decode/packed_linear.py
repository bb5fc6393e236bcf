"""Linear layers for a handful of rows on a CPU, with weights that are packed once.

Decoding multiplies every weight matrix with 1 to 60 rows, and its time is the time of reading the weights. In fp32
they are packed for a kernel of our own (`decode.native`), which reads them once, in 16 bits where the checkpoint has no
more; the packed matrix then takes the parameter's place (`decode.packed_weight`). Where the kernel cannot be built,
and in half precision, oneDNN packs copies: the plain layer's library would repack the matrix at every call with several
rows. Which of them multiplies depends on the machine, dtype, size and number of rows alone, never on a timing, so that
runs repeat to the bit.

Legend: X rows, I inputs, O outputs of all fused layers together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.native import PackedMatrix, kernel, release_freed_memory
from decode.native.four_bits import four_bit_state, pack_four_bits, stamp
from decode.packed_weight import can_be_packed, kernel_products, pack_weights

# Smaller fp32 matrices stay in a core's cache, and the call itself costs more than what packing saves.
_SMALLEST_NATIVE = 1 << 16


def _side_by_side(outputs: Sequence[int], biases_O: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """One bias of all layers, zero for those without; None when none has one."""
    if all(bias is None for bias in biases_O):
        return None
    parts = zip(outputs, biases_O, strict=True)
    return torch.cat([like.new_zeros(count) if bias is None else bias.detach() for count, bias in parts])


@dataclass(frozen=True)
class FusedLinear:
    """Linear layers with the same input, multiplied by the kernel (`matrix`) or by torch.

    `weights_IO` are views of the weights, so that no product has to make one; empty beside a `matrix`. Valid until a
    weight changes: made for one `generate` call.
    """

    outputs: tuple[int, ...]
    matrix: PackedMatrix | None
    bias_O: Tensor | None
    weights_IO: tuple[Tensor, ...] = ()
    biases_O: tuple[Tensor | None, ...] = ()

    def parts(self, x_XI: Tensor) -> Sequence[Tensor]:
        """Each layer's outputs."""
        if self.matrix is not None:
            all_XO = self(x_XI)
            return (all_XO,) if len(self.outputs) == 1 else all_XO.split(self.outputs, dim=1)
        pairs = zip(self.weights_IO, self.biases_O, strict=True)
        return [torch.mm(x_XI, w_IO) if bias is None else torch.addmm(bias, x_XI, w_IO) for w_IO, bias in pairs]

    def __call__(self, x_XI: Tensor) -> Tensor:
        """All outputs side by side, `[X, O]`."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O)
        parts = self.parts(x_XI)
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    def plus(self, x_XI: Tensor, other_XO: Tensor) -> Tensor:
        """`self(x_XI) + other_XO`, added while the product is written; for one layer."""
        if self.matrix is not None:
            return self.matrix.linear(x_XI.contiguous(), self.bias_O, other_XO.contiguous())
        sum_XO = torch.addmm(other_XO, x_XI, self.weights_IO[0])
        return sum_XO if self.biases_O[0] is None else sum_XO.add_(self.biases_O[0])


class Packs:
    """How the linear layers of one model are multiplied; shared by all runs of one decoder.

    fp32 parameters on a CPU are packed for the kernel when a run first needs them, in place of the model's own tensors
    (`native`). In other dtypes and on other devices nothing is packed.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        on_cpu = {parameter.device.type for parameter in parameters} == {"cpu"}
        self.native = on_cpu and parameters[0].dtype == torch.float32 and kernel() is not None
        self._matrices: dict[str, PackedMatrix] = {}
        # 4-bit matrices stand beside the model's own, which other code reads; with what they were packed from.
        self._four_bits: dict[str, tuple[tuple[int, ...], PackedMatrix]] = {}
        self._freed = False

    def layer(
        self, name: str, weights: Sequence[Tensor], biases_O: Sequence[Tensor | None], *, any_size: bool = False
    ) -> FusedLinear:
        """Linear layers with the same input as one; `name` tells it from others of the model. `any_size`: the kernel
        is wanted for small ones too.
        """
        outputs = tuple((four_bit_state(weight) or weight).shape[0] for weight in weights)
        if (matrix := self._matrix(name, weights, False, any_size)) is not None:
            return FusedLinear(outputs, matrix, _side_by_side(outputs, biases_O, torch.empty(0)))
        return FusedLinear(outputs, None, None, tuple(weight.detach().t() for weight in weights), tuple(biases_O))

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

    def nbytes(self) -> int:
        """Bytes of packed values at present, those that took a parameter's place included."""
        matrices = [*self._matrices.values(), *(matrix for _, matrix in self._four_bits.values())]
        return sum(each.values.numel() * each.values.element_size() for each in matrices)

    def prepare(self, model: nn.Module) -> None:
        """Pack the linear layers of a model that is going to be run through its own forward."""
        if self.native:
            for name, module in model.named_modules():
                four_bits = is_four_bits(module)
                if type(module) is nn.Linear or type(module) is Conv1D or four_bits:
                    # bitsandbytes writes a matrix out at every call, so that no size is too small.
                    self._matrix(name, (module.weight,), type(module) is Conv1D, any_size=four_bits)

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, `model`'s own forward multiplies with packed weights."""
        if self.native:
            with kernel_products(), self._replaced(model):
                yield
        else:
            yield

    @contextmanager
    def _replaced(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, the kernel multiplies in 4-bit layers of `model`; afterwards the model is as it was."""
        replaced: list[nn.Module] = []
        try:
            for name, module in model.named_modules() if self._four_bits else ():
                # A layer with a forward of its own (a hook of accelerate, an adapter) is left alone.
                if "forward" not in module.__dict__ and name in self._four_bits and is_four_bits(module):
                    module.__dict__["forward"] = _kernel_forward(self._four_bits[name][1], module.bias)
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
