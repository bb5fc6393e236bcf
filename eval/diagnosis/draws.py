"""Random numbers at some positions of each text, the same for every draft."""

import math
from collections.abc import Sequence

from torch import Tensor

from draftsmith.core.sampling import generator, row_seed, uniforms
from draftsmith.eval.acceptance import Continuation, Place


def spread(length: int, count: int) -> list[int]:
    """`count` indices below `length`, or all of them, evenly spread."""
    count = min(count, length)
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def drawn_at(
    texts: Sequence[Continuation],
    counts: Sequence[int],
    shape: tuple[int, ...],
    what: str,
    seed: int,
) -> dict[Place, Tensor]:
    """Draw uniforms of a shape for `counts[text]` places spread over each text.

    Each text has its own stream, the same for every draft.
    """
    drawn: dict[Place, Tensor] = {}
    for number, text in enumerate(texts):
        places = spread(len(text.output_ids), counts[number])
        stream = generator(row_seed(seed, f"{text.id}/{what}"))
        values = uniforms([stream], len(places) * math.prod(shape))
        for index, place in enumerate(places):
            drawn[number, place] = values.view(len(places), *shape)[index]
    return drawn
