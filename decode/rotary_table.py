"""Rotary embedding read from a table instead of computed.

Legend: N positions, E elements of a head that are turned.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Other kinds choose their frequencies by the length of the input, so that no table holds.
_ROPES = ("default", "linear", "llama3", "yarn")
_FIRST = 256


def has_table(rotary: Any, kind: str, size: int) -> bool:
    """Whether a table holds for layers of this kind, and it turns `size` elements of a head."""
    types = rotary.rope_type
    if isinstance(types, dict):
        frequencies = getattr(rotary, f"{kind}_inv_freq")
        return types[kind] in _ROPES and 2 * len(frequencies) == size
    return types in _ROPES and 2 * len(rotary.inv_freq) == size


class RotaryTable:
    """Cosines and signed sines of positions, `[N, 2E]` by kind of layer, in the dtype and on the
    device of `like`.

    rotary: None for a model that rotates nothing.
    """

    def __init__(self, rotary: Any, kinds: Iterable[str], like: Tensor) -> None:
        self._rotary = rotary
        self._like = like
        empty_N2E = like.new_empty(0, 0)
        self._tables = dict.fromkeys(kinds, empty_N2E)
        self._known = 0

    def up_to(self, top: int) -> dict[str, Tensor]:
        """Return the tables of the positions up to `top`; cached until `top` grows."""
        if self._known <= top and self._rotary is not None:
            self._known = max(top + 1, 2 * self._known, _FIRST)
            for kind in self._tables:
                self._tables[kind] = self._table(kind)
        return self._tables

    def _table(self, kind: str) -> Tensor:
        positions_1N = torch.arange(self._known, device=self._like.device).unsqueeze(0)
        # That of a head has one kind, which it knows.
        if isinstance(getattr(self._rotary, "rope_type", None), dict):
            cos_1NE, sin_1NE = self._rotary(self._like, positions_1N, kind)
        else:
            cos_1NE, sin_1NE = self._rotary(self._like, positions_1N)
        # The sine carries the sign of the half that is rotated in.
        lower_NE, upper_NE = sin_1NE[0].chunk(2, dim=1)
        return torch.cat([cos_1NE[0], -lower_NE, upper_NE], dim=1)
