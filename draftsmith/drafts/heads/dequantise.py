"""Weights of 8 bits and of 4 (NVFP4, MXFP4), in which others publish heads, as fp32.

A value is multiplied by the scale of its tensor, its row, or its block, under the names of
compressed-tensors and ModelOpt (`weight_scale`) and of DeepSeek (`weight_scale_inv`, which is no
inverse).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject

_SCALES = ("_scale", "_scale_inv")
_ZERO_POINT = "_zero_point"
# Of activations and caches, which are not rounded here.
_UNUSED = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale")
# Tensors of ids, not of weights.
_IDS = ("d2t", "t2d")
_BLOCK = 128
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = torch.cat((_E2M1, -_E2M1))


def dequantised(file: Path, tensors: Mapping[str, Tensor], config: JsonObject) -> dict[str, Tensor]:
    """The tensors of a head in `file`, without scales. Raise InputError for a weight that has none.

    config: its config.json, whose `quantization_config` may name the size of blocks.
    """
    tensors = _without_four_bits(tensors)
    quantization: JsonObject = config.get("quantization_config") or {}
    blocks: Sequence[int] = quantization.get("weight_block_size") or (_BLOCK, _BLOCK)
    coded = {name for name, tensor in tensors.items() if _is_coded(name, tensor)}
    beside = {name + ending for name in coded for ending in (*_SCALES, _ZERO_POINT)}
    own = {}
    for name, tensor in tensors.items():
        if name in beside or name.endswith(_UNUSED):
            continue
        own[name] = tensor
        if name not in coded:
            continue
        given = [tensors[name + ending] for ending in _SCALES if name + ending in tensors]
        scale = _spread(given[0], tensor.shape, blocks) if given else None
        zero = tensors.get(name + _ZERO_POINT)
        eight_bits = tensor.dtype == torch.int8 or tensor.is_floating_point()
        if scale is None or not eight_bits or (zero is not None and zero.any()):
            method = quantization.get("quant_method")
            by = f" of 'quantization_config' {method}" if method else ""
            raise InputError(
                f"{file}: '{name}' is {str(tensor.dtype).removeprefix('torch.')}{by} without a "
                "scale that can be read; use the head in 16 bits, or FP8 or int8 with weight_scale"
            )
        own[name] = tensor.float() * scale
    return own


def _without_four_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace weights of two E2M1 codes a byte, low one first, by their values.

    NVFP4 has an FP8 scale for 16 values and one of the tensor, which ModelOpt multiplies by
    (`weight_scale_2`) and compressed-tensors divides by (`weight_global_scale`); MXFP4 a power of
    two for 32.
    """
    own = dict(tensors)
    for name, codes in tensors.items():
        base = name.removesuffix("_packed")
        scale = tensors.get(f"{base}_scale")
        if codes.dtype != torch.uint8 or scale is None or scale.dtype.itemsize != 1:
            continue
        group = 2 * codes.shape[-1] // scale.shape[-1]
        if group == 32:
            scale = torch.exp2(scale.view(torch.uint8).float() - 127)
        elif group == 16:
            scale = scale.view(torch.float8_e4m3fn).float()
        else:
            continue
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = _E2M1[nibbles.long()] * scale.repeat_interleave(group, dim=-1)
        values *= own.pop(f"{base}_scale_2", torch.ones(()))
        values /= own.pop(f"{base}_global_scale", torch.ones(()))
        del own[name], own[f"{base}_scale"]
        own[base] = values
    return own


def _is_coded(name: str, tensor: Tensor) -> bool:
    if name.endswith((*_SCALES, _ZERO_POINT, *_IDS)) or tensor.dtype == torch.bool:
        return False
    return not tensor.is_floating_point() or tensor.dtype.itemsize == 1


def _spread(scale: Tensor, shape: Sequence[int], blocks: Sequence[int]) -> Tensor | None:
    """The scale of each value, or one that broadcasts; None if it does not fit the shape."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.dim() != len(shape):
        return None
    for place, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
        if count in (1, size):
            continue
        # Of experts in one tensor, blocks are in the last two dimensions.
        known = blocks[place - len(shape)] if place >= len(shape) - 2 else 1
        fits = [step for step in (known, size // count) if -(-size // step) == count]
        if not fits:
            return None
        scale = scale.repeat_interleave(fits[0], dim=place).narrow(place, 0, size)
    return scale
