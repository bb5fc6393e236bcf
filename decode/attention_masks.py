"""Attention masks that are brought up to date instead of built: what a step changes is a few cells, not the context.

Legend: B rows of the mask (1 when all rows of a batch share it), Q most queries, q queries of a forward, C capacity
in cells, T cells of a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else the most negative finite value: eager attention adds its mask, a bool
    would be wrong.
    """
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def causal_mask(begin: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask `[1, 1, end - begin, end]` of the queries from cell `begin` on, in a sliding window or not."""
    cells_C = torch.arange(end, device=device)
    distance_qC = cells_C[begin:].unsqueeze(1) - cells_C
    allowed_qC = distance_qC >= 0
    if window is not None:
        allowed_qC &= distance_qC < window
    return additive(allowed_qC[None, None], dtype)


class GrowingMask:
    """The additive mask of rows with full attention whose prefixes grow: cell c of row b is seen when c is below the
    row's length, and the block behind the longest row as its tree says.

    Every query of a step shares the prefix part, so that the block's part is all that is written for a forward.
    """

    def __init__(self, rows: int, queries: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.queries = rows, queries
        self._hidden = torch.finfo(dtype).min
        self._mask_B1QC = torch.full((rows, 1, queries, capacity), self._hidden, dtype=dtype, device=device)
        self._lengths = [0] * rows
        self._dirty = (0, 0)

    def advance(self, lengths: Sequence[int], column: int) -> None:
        """Forget the last block and show the cells kept since."""
        begin, end = self._dirty
        self._mask_B1QC[..., begin:end] = self._hidden
        for row, (old, new) in enumerate(zip(self._lengths, lengths, strict=True)):
            # A block lies behind every row, so that nothing of a prefix has just been hidden.
            if new > old:
                self._mask_B1QC[row, :, :, old:new] = 0
            elif new < old:
                self._mask_B1QC[row, :, :, new:old] = self._hidden
        self._lengths = list(lengths)
        self._dirty = (column, column)

    def show(self, column: int, tree_RqT: Tensor) -> Tensor:
        """The mask `[B, 1, q, column + T]` for a block at `column` with this additive part: a view, valid until the
        next call.
        """
        queries, cells = tree_RqT.shape[1:]
        self._mask_B1QC[:, 0, :queries, column : column + cells] = tree_RqT
        self._dirty = (column, max(self._dirty[1], column + cells))
        return self._mask_B1QC[:, :, :queries, : column + cells]
