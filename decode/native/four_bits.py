"""4-bit weights of bitsandbytes for the kernel: their codes and scales as they are, in the order of its own reading.

A value is an entry of a table of 16 (nf4: QLoRA, arXiv 2305.14314; fp4 alike) times the scale of its block of inputs;
the scales may be quantised again. The kernel multiplies both in fp32 as bitsandbytes does when it writes the matrix
out, so products equal, to the bit, those of the kernel with that matrix. bitsandbytes itself is not needed here.

Legend: I inputs, O outputs of a linear layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.native import Kernel, PackedMatrix

BLOCK = 64  # inputs that share a scale, in the kernel


def four_bit_state(weight: object) -> Any:
    """bitsandbytes' scales and shape of a 4-bit weight that the kernel can read; None for any other.

    It has to lie on the CPU, to be multiplied in fp32, and to have rows of whole blocks.
    """
    state = getattr(weight, "quant_state", None)
    if state is None or not isinstance(weight, Tensor) or weight.device.type != "cpu" or weight.dtype != torch.uint8:
        return None
    if getattr(state, "packing_format_for_cpu", False) or state.dtype != torch.float32 or len(state.shape) != 2:
        return None
    return state if state.blocksize % BLOCK == 0 and state.shape[1] % state.blocksize == 0 else None


def scales(state: Any) -> Tensor:
    """The scale of every block of values, fp32, one after another."""
    absmax: Tensor = state.absmax
    if not state.nested:
        return absmax.float()
    again = state.state2
    outer = again.absmax.float().repeat_interleave(again.blocksize)[: absmax.numel()]
    found: Tensor = again.code.float()[absmax.reshape(-1).long()] * outer + state.offset
    return found


def pack_four_bits(functions: Kernel, weights: Sequence[Tensor]) -> PackedMatrix:
    """One matrix of all weights, their outputs below each other; `four_bit_state` has accepted each."""
    states = [four_bit_state(weight) for weight in weights]
    inputs = states[0].shape[1]
    codes = torch.cat([weight.detach().reshape(-1, inputs // 2) for weight in weights])
    parts = [scales(state).view(-1, inputs // state.blocksize) for state in states]
    spread = [
        part.repeat_interleave(state.blocksize // BLOCK, dim=1) for part, state in zip(parts, states, strict=True)
    ]
    return PackedMatrix.of_codes(functions, codes, torch.cat(spread), states[0].code)


def stamp(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Changes when a weight or its scales are exchanged or written to."""
    tensors = [tensor for weight in weights for tensor in (weight, four_bit_state(weight).absmax)]
    return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))
