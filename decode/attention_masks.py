"""Attention masks. Those of growing rows are updated: a step changes a few slots, not the whole context.

Legend: B rows of the mask (1 when all rows of a batch share it), Q most queries, q queries of a forward, C capacity
in slots, T slots of a block. A slot is the place of one token in the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else the most negative finite value. Eager attention adds its mask, so a bool would be wrong."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def causal_mask(begin: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask `[1, 1, end - begin, end]` of the queries from slot `begin` on."""
    slots_C = torch.arange(end, device=device)
    distance_qC = slots_C[begin:].unsqueeze(1) - slots_C
    allowed_qC = distance_qC >= 0
    if window is not None:
        allowed_qC &= distance_qC < window
    return additive(allowed_qC[None, None], dtype)


class GrowingMask:
    """The additive mask of rows with full attention. A row sees the slots below its length; in the block behind the
    longest row, the tree decides. All queries see the same prefix, so a forward writes only the block's part.
    """

    def __init__(self, rows: int, queries: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.queries = rows, queries
        self._hidden = torch.finfo(dtype).min
        self._mask_B1QC = torch.full((rows, 1, queries, capacity), self._hidden, dtype=dtype, device=device)
        self._lengths = [0] * rows
        self._dirty = (0, 0)

    def advance(self, lengths: Sequence[int], column: int) -> None:
        """Hide the last block and show the slots that were kept of it."""
        begin, end = self._dirty
        self._mask_B1QC[..., begin:end] = self._hidden
        for row, (old, new) in enumerate(zip(self._lengths, lengths, strict=True)):
            # Blocks begin behind the longest row: hiding the last one hid nothing of a prefix.
            if new > old:
                self._mask_B1QC[row, :, :, old:new] = 0
            elif new < old:
                self._mask_B1QC[row, :, :, new:old] = self._hidden
        self._lengths = list(lengths)
        self._dirty = (column, column)

    def show(self, column: int, tree_RqT: Tensor) -> Tensor:
        """Return the mask `[B, 1, q, column + T]` of a block at `column`: a view, valid until the next call."""
        queries, width = tree_RqT.shape[1:]
        self._mask_B1QC[:, 0, :queries, column : column + width] = tree_RqT
        self._dirty = (column, max(self._dirty[1], column + width))
        return self._mask_B1QC[:, :, :queries, : column + width]
