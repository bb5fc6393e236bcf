"""Memory of packed weights: handed out without overlap, freed with its tensors, large pages where Linux has them."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from decode.native import large_pages
from decode.native.large_pages import empty_bytes, zeros

SMAPS = Path("/proc/self/smaps")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_rest", torch.empty(0, dtype=torch.uint8))


def test_pieces_do_not_overlap_and_begin_at_cache_lines() -> None:
    # The last is larger than what is left of an area, and than an area.
    sizes = [1, 1000, 128, 5 << 20, 30 << 20, 0, 33 << 20]
    pieces = [empty_bytes(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == sizes
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)


@pytest.mark.skipif(not SMAPS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_large_pages_are_asked_for_and_the_weights_begin_one() -> None:
    piece = empty_bytes(8 << 20).fill_(1)
    assert piece.data_ptr() % (2 << 20) == 0
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", SMAPS.read_text(), re.DOTALL | re.MULTILINE)
    (flags,) = [flags for begin, end, flags in mappings if int(begin, 16) <= piece.data_ptr() < int(end, 16)]
    assert "hg" in flags.split()


def test_without_large_pages_it_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty_bytes(1000).fill_(3).sum() == 3000


@pytest.mark.parametrize("shape", [(2, 3), (3, 5, 1 << 19)])
def test_zeros_are_zeros_in_memory_of_their_own(shape: tuple[int, ...]) -> None:
    first, second = (zeros(shape, torch.empty(0)) for _ in range(2))
    assert first.shape == shape and first.dtype == torch.float32 and not first.any()
    first.fill_(1)
    assert not second.any() and not zeros(shape, torch.empty(0)).any()
