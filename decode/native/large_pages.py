"""Memory for packed weights and caches, in pages of 2 MB where the system has them.

A forward reads every weight once, in order. With pages of 4 KB, the processor's prefetcher stops at the end of each
page: on a server CPU (AMD EPYC), large pages were 1.25 to 1.6 times as fast. Linux gives them on request
(`transparent_hugepage` is `madvise` or `always`); elsewhere this is ordinary memory.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

_PAGE = 2 << 20
# Matrices of one model share areas of this size, so that few pages are partly unused.
_AREA = 32 << 20
_ALIGNMENT = 128
# Zeros of fewer bytes are not worth whole pages.
_WORTHWHILE = 4 * _PAGE


@dataclass
class _Area:
    """Memory of which `used` of `size` bytes are taken. The tensors own it: it is freed with the last of them."""

    memory: weakref.ref[mmap.mmap]
    size: int
    used: int

    def take(self, size: int) -> Tensor | None:
        """Return the next `size` bytes, or None if fewer are left."""
        memory = self.memory()
        if memory is None or self.used + size > self.size:
            return None
        taken = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=self.used)
        self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken


_lock = threading.Lock()
_open: _Area | None = None


def empty_bytes(size: int) -> Tensor:
    """Return an uninitialised uint8 tensor of `size` bytes."""
    global _open
    if not hasattr(mmap, "MADV_HUGEPAGE") or size == 0:
        return torch.empty(size, dtype=torch.uint8)
    with _lock:
        taken = None if _open is None else _open.take(size)
        if taken is None:
            memory, first = _mapped(max(size, _AREA))
            _open = _Area(weakref.ref(memory), len(memory), first)
            taken = _open.take(size)
        assert taken is not None
        return taken


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in a mapping of their own, which takes memory as it is written; small ones in ordinary memory."""
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < _WORTHWHILE:
        return torch.zeros(*shape, dtype=dtype)
    memory, first = _mapped(size)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first).view(dtype).view(*shape)


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """Return a new mapping of zeros that holds `size` bytes from its first large page on, and that page's offset."""
    # Large pages begin at multiples of their size. Not every kernel places a mapping there.
    memory = mmap.mmap(-1, -(-size // _PAGE) * _PAGE + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
