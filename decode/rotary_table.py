"""Rotary embedding read from a table instead of computed.

Legend: N positions, E head size.
"""

from typing import Any

import torch
from torch import Tensor

# Other kinds choose their frequencies by the length of the input, so that no table holds.
_ROPES = ("default", "linear", "llama3", "yarn")
_FIRST = 256


def has_table(rotary: Any, size: int) -> bool:
    """Whether a table holds for this rotary module, and it turns all elements of a head of
    `size`.
    """
    return rotary.rope_type in _ROPES and 2 * len(rotary.inv_freq) == size


class RotaryTable:
    """Cosines and signed sines of positions, `[N, 2E]`, in the dtype and on the device of
    `like`.
    """

    def __init__(self, rotary: Any, like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        self._table_N2E = like.new_empty(0, 0)

    def up_to(self, top: int) -> Tensor:
        """Return the table of the positions up to `top`; cached until `top` grows."""
        known = len(self._table_N2E)
        if known <= top:
            count = max(top + 1, 2 * known, _FIRST)
            positions_1N = torch.arange(count, device=self._like.device).unsqueeze(0)
            cos_1NE, sin_1NE = self._rotary(self._like, positions_1N)
            # The sine carries the sign of the half that is rotated in.
            lower_NE, upper_NE = sin_1NE[0].chunk(2, dim=1)
            self._table_N2E = torch.cat([cos_1NE[0], -lower_NE, upper_NE], dim=1)
        return self._table_N2E
