"""Random numbers at some positions of each text, the same for every draft."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.core.sampling import generator, row_seed, uniforms
from draftsmith.eval.acceptance import Positions


class Drawn(NamedTuple):
    """Chosen positions, and uniforms for each, `[n, ...]`."""

    chosen: list[int]
    uniforms: Tensor


def spread(length: int, count: int) -> list[int]:
    """`count` indices below `length`, or all of them, evenly spread."""
    count = min(count, length)
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def drawn_at(
    at: Positions, counts: Sequence[int], shape: tuple[int, ...], what: str, seed: int
) -> Drawn:
    """Choose `counts[text]` positions spread over each text, and draw uniforms of a shape there.

    Each text has its own stream, the same for every draft.
    """
    chosen: list[int] = []
    values = []
    first = 0
    for text, length, count in zip(at.texts, at.lengths, counts, strict=True):
        indices = spread(length, count)
        stream = generator(row_seed(seed, f"{text.id}/{what}"))
        drawn = uniforms([stream], len(indices) * math.prod(shape))
        values.append(drawn.view(len(indices), *shape))
        chosen += [first + index for index in indices]
        first += length
    return Drawn(chosen, torch.cat(values))
