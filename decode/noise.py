"""Noise that belongs to a place in an answer, for target and draft alike.

Legend: B rows, D depths, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.sampling import Sampling, gumbel, noised


@dataclass(eq=False)
class Noise:
    """The noise of a batch's next tokens, drawn when it is first read."""

    sampling: Sampling
    vocabulary: int
    device: torch.device

    def move(self, seeds: Sequence[int], places: Sequence[int]) -> None:
        """Begin a step. seeds: those that the rows' generators began with. places: tokens
        of their answers so far.
        """
        self._seed_B = torch.tensor(seeds, device=self.device)
        self._place_B = torch.tensor(places, device=self.device)
        self._drawn: list[Tensor] = []

    def at(self, depth: int) -> Tensor:
        """`[B, V]`, for the token below a node of this depth."""
        for later in range(len(self._drawn), depth + 1):
            self._drawn.append(gumbel(self._seed_B, self._place_B + later, self.vocabulary))
        return self._drawn[depth]

    def down_to(self, depth: int) -> Tensor:
        """`[B, D, V]`, from the root down to this depth."""
        return torch.stack([self.at(level) for level in range(depth + 1)], dim=1)

    def added(self, logits_BeV: Tensor, depth: int) -> Tensor:
        """Log-probabilities at nodes of this depth, and their noise."""
        noise_B1V = self.at(depth).unsqueeze(1).to(logits_BeV.device)
        return noised(logits_BeV, self.sampling, noise_B1V)
