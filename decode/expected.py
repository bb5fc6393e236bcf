"""Sizes and types of tensors that come from elsewhere: a part of one's own, or the caller of the
kernel, which would read beyond their ends.
"""

import torch
from torch import Tensor

from draftsmith.core.errors import InputError

CPU = torch.device("cpu")


def expect(
    what: str,
    tensor: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """Raise InputError, with what was expected and given, unless a tensor is of this shape and
    dtype, on this device.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"{what}: expected a tensor, got {type(tensor).__name__}")
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise InputError(f"{what}: expected {dtype} {list(shape)} on {device}, got {given}")
