"""Memory for packed weights, in pages of 2 MB where the system has them.

A forward reads every weight once, in order, and with pages of 4 KB the processor's prefetcher stops at each page's end
and the address of each page is looked up anew: on a server CPU (AMD EPYC) the same bytes came 1.25 to 1.6 times as fast
from large pages. Linux gives them to whoever asks (`transparent_hugepage` is `madvise` or `always`); elsewhere, or
where it is `never`, this is ordinary memory.
"""

import mmap
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

_PAGE = 2 << 20
# Matrices of one model lie side by side in areas of this size, so that not each of them leaves part of a page unused.
_AREA = 32 << 20
_ALIGNMENT = 128


@dataclass
class _Area:
    """Memory of which `used` of `size` bytes are handed out. The tensors hold it: it is freed with the last of them."""

    memory: weakref.ref[mmap.mmap]
    size: int
    used: int

    def take(self, size: int) -> Tensor | None:
        """The next `size` bytes, or None where there are not as many left."""
        memory = self.memory()
        if memory is None or self.used + size > self.size:
            return None
        taken = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=self.used)
        self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken


_lock = threading.Lock()
_open: _Area | None = None


def empty_bytes(size: int) -> Tensor:
    """A uint8 tensor of `size` bytes, which may hold anything."""
    global _open
    if not hasattr(mmap, "MADV_HUGEPAGE") or size == 0:
        return torch.empty(size, dtype=torch.uint8)
    with _lock:
        taken = None if _open is None else _open.take(size)
        if taken is None:
            # Large pages begin at multiples of their size, and not every kernel places a mapping there by itself.
            length = -(-max(size, _AREA) // _PAGE) * _PAGE + _PAGE
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel that was built without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
            _open = _Area(weakref.ref(memory), length, first)
            taken = _open.take(size)
        assert taken is not None
        return taken
