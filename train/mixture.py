"""Several domains in one training run: how often each is drawn.

A domain is one source of `data`; general data to replay is one more.

Legend: K domains.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def order(count: int, start: int, stop: int, seed: int) -> npt.NDArray[np.int64]:
    """Row indices of places `start`..`stop` in the endless stream of freshly shuffled epochs.

    A pure function of its arguments, so a resumed run needs to know its step and nothing else.
    """
    pieces = []
    for epoch in range(start // count, math.ceil(stop / count)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(count)
        low, high = max(start - epoch * count, 0), min(stop - epoch * count, count)
        pieces.append(shuffled[low:high])
    return np.concatenate(pieces)


def shares(counts_K: Sequence[int], temperature: float) -> list[float]:
    """How often each domain is drawn: in proportion to size^(1 / temperature) (arXiv 1907.05019, section 4.1)."""
    # Divided by the largest first: a small temperature would overflow.
    sizes = [(count / max(counts_K)) ** (1 / temperature) for count in counts_K]
    return [size / sum(sizes) for size in sizes]


def drawn(shares_K: Sequence[float], start: int, stop: int) -> list[tuple[npt.NDArray[np.int64], int, int]]:
    """Of each domain: which of the places `start`..`stop` of the endless stream are its own, counted from `start`, and
    how many of its own come before them and up to their end.

    The first domain takes place g where floor((g + 1) p) > floor(g p), so that its places are evenly spread; the others
    divide what is left in the same way. It depends on the place alone, as the places of replay do.
    """
    places, left, found = np.arange(stop - start), sum(shares_K), []
    for share in shares_K:
        # How many of this domain come before each place that is left. The summand makes up for rounding.
        before = np.floor(np.arange(start, stop + 1) * min(1.0, share / left) + 1e-9).astype(np.int64)
        own = np.diff(before) > 0
        found.append((places[own], int(before[0]), int(before[-1])))
        places, left = places[~own], left - share
        start, stop = start - int(before[0]), stop - int(before[-1])
    return found
