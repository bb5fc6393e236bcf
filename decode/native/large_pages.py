"""Memory for packed weights and caches, in pages of 2 MB where the system has them.

A forward reads every weight once, in order. With pages of 4 KB, the processor's prefetcher stops at
the end of each page: on a server CPU (AMD EPYC), large pages were 1.25 to 1.6 times as fast. Linux
gives them on request (`transparent_hugepage` is `madvise` or `always`); elsewhere this is ordinary
memory.
"""

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 2 << 20
# Small matrices of one model share areas of this size.
_AREA = 32 << 20
_ALIGNMENT = 128
_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)  # of the last area


def empty_bytes(size: int) -> Tensor:
    """Return an uninitialised uint8 tensor of `size` bytes."""
    global _rest
    if size >= _AREA:
        return _mapped(size)
    # An area outlives the mode in which it is made.
    with _lock, torch.inference_mode(False):
        taken = -(-size // _ALIGNMENT) * _ALIGNMENT
        if len(_rest) < taken:
            _rest = _mapped(_AREA)
        piece, _rest = _rest[:size], _rest[taken:]
    return piece


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros in the dtype and on the device of `like`. On a CPU they take memory only as it
    is written.
    """
    size = math.prod(shape) * like.element_size()
    # Less is not worth whole pages.
    if like.device.type != "cpu" or size < 4 * _PAGE:
        return like.new_zeros(shape)
    return _mapped(size).view(like.dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """Return zeros in a mapping of their own that begins with a large page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    # Large pages begin at multiples of their size. Not every kernel places a mapping there.
    pages = -(-size // _PAGE) + 1
    memory = mmap.mmap(-1, pages * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _PAGE
    return whole[first : first + size]
