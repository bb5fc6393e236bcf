"""Weights of 8 bits, in which others publish heads, as fp32.

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
_UNUSED = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")
# Tensors of ids, not of weights.
_IDS = ("d2t", "t2d")
_BLOCK = 128


def dequantised(file: Path, tensors: Mapping[str, Tensor], config: JsonObject) -> dict[str, Tensor]:
    """The tensors of a head in `file`, without scales. Raise InputError for a weight that has none.

    config: its config.json, whose `quantization_config` may name the size of blocks.
    """
    quantization: JsonObject = config.get("quantization_config") or {}
    blocks: Sequence[int] = quantization.get("weight_block_size") or (_BLOCK, _BLOCK)
    coded = {name for name, tensor in tensors.items() if _is_coded(name, tensor)}
    beside = {name + ending for name in coded for ending in (*_SCALES, _ZERO_POINT)}
    own: dict[str, Tensor] = {}
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
