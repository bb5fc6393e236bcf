"""The order of training data: an endless stream of shuffled epochs, with replay and several domains mixed in.

A domain is one source of `data`; general data to replay is one more.

Legend: K domains.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from train.data import Examples


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


def units(
    examples: Examples, start: int, stop: int, seed: int, fraction: float = 0.0, temperature: float = 1.0
) -> npt.NDArray[np.int64]:
    """Unit indices of places `start`..`stop` in the endless stream, `fraction` of them replay, evenly spread.

    Place g is replay when floor((g + 1) f) > floor(g f): it depends on the place alone, so it is the same however a
    step is divided (law 6) and wherever a run resumes. Data and replay are each reshuffled in every epoch of their own.
    temperature: how domains of the data are mixed (`shares`). Without replay and at 1 this is `order`.
    """
    if examples.replay_from is None:
        return _of_domains(examples, len(examples), start, stop, seed, temperature)
    main, general = examples.replay_from, len(examples) - examples.replay_from
    # How many replay units come before each place. The small summand makes floor(10 * 0.1) 1 in spite of rounding.
    before = np.floor(np.arange(start, stop + 1) * fraction + 1e-9).astype(np.int64)
    is_replay = np.diff(before) > 0
    found = np.empty(stop - start, dtype=np.int64)
    if (~is_replay).any():
        first, last = start - int(before[0]), stop - int(before[-1])
        found[~is_replay] = _of_domains(examples, main, first, last, seed, temperature)
    if is_replay.any():
        # Another seed: with the same permutation for both, the same rows would meet in every epoch.
        found[is_replay] = main + order(general, int(before[0]), int(before[-1]), seed + 2**32)
    return found


def _of_domains(
    examples: Examples, count: int, start: int, stop: int, seed: int, temperature: float
) -> npt.NDArray[np.int64]:
    """Unit indices of places `start`..`stop`: `order` of the first `count` units, or, at another temperature than 1,
    every domain in epochs of its own.
    """
    if temperature == 1 or examples.domains is None:
        return order(count, start, stop, seed)
    rows = [np.flatnonzero(examples.domains[:count] == domain) for domain in np.unique(examples.domains[:count])]
    found = np.empty(stop - start, dtype=np.int64)
    for number, (places, first, last) in enumerate(
        drawn(shares([len(each) for each in rows], temperature), start, stop)
    ):
        if last > first:
            # Seeds of their own, as for replay.
            found[places] = rows[number][order(len(rows[number]), first, last, seed + (number + 2) * 2**32)]
    return found
