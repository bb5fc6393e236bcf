"""The order of training data: an endless stream of shuffled epochs, with replay and several domains mixed in.

Every function here depends on the place in the stream alone. So a resumed run needs to know its step and nothing else,
and a step has the same units however it is divided (law 6).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from train.data import Examples

Indices = npt.NDArray[np.int64]


def order(count: int, start: int, stop: int, seed: int) -> Indices:
    """Row indices of places `start`..`stop` in the endless stream of freshly shuffled epochs."""
    pieces = []
    for epoch in range(start // count, math.ceil(stop / count)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(count)
        pieces.append(shuffled[max(start - epoch * count, 0) : min(stop - epoch * count, count)])
    return np.concatenate(pieces)


def shares(counts: Sequence[int], temperature: float) -> list[float]:
    """Share of each domain: proportional to size^(1 / temperature) (arXiv 1907.05019, section 4.1)."""
    # Divide by the largest first: a small temperature would overflow.
    sizes = [(count / max(counts)) ** (1 / temperature) for count in counts]
    return [size / sum(sizes) for size in sizes]


def drawn(shares: Sequence[float], start: int, stop: int) -> list[tuple[Indices, int, int]]:
    """For each domain: its places among `start`..`stop`, counted from `start`, and the number of its places before them
    and up to their end.

    The first domain takes place g if floor((g + 1) p) > floor(g p), so its places are evenly spread; the others divide
    the remaining places in the same way.
    """
    places, left, result = np.arange(stop - start), sum(shares), []
    for share in shares:
        # Places of this domain before each remaining place. The summand makes floor(10 * 0.1) 1 in spite of rounding.
        before = np.floor(np.arange(start, stop + 1) * min(1.0, share / (left or 1.0)) + 1e-9).astype(np.int64)
        taken = np.diff(before) > 0
        result.append((places[taken], int(before[0]), int(before[-1])))
        places, left = places[~taken], left - share
        start, stop = start - int(before[0]), stop - int(before[-1])
    return result


def units(
    examples: Examples, start: int, stop: int, seed: int, fraction: float = 0.0, temperature: float = 1.0
) -> Indices:
    """Unit indices of places `start`..`stop` in the endless stream, `fraction` of them replay, evenly spread.

    Data and replay are each reshuffled in every epoch of their own. temperature: mixes domains of the data (`shares`).
    """
    if examples.replay_from is None:
        return _of_domains(examples, len(examples), start, stop, seed, temperature)
    main, general = examples.replay_from, len(examples) - examples.replay_from
    replay, data = drawn([fraction, 1 - fraction], start, stop)
    result = np.empty(stop - start, dtype=np.int64)
    if len(data[0]):
        result[data[0]] = _of_domains(examples, main, data[1], data[2], seed, temperature)
    if len(replay[0]):
        # Another seed: with the same permutation for both, the same rows would meet in every epoch.
        result[replay[0]] = main + order(general, replay[1], replay[2], seed + 2**32)
    return result


def _of_domains(examples: Examples, count: int, start: int, stop: int, seed: int, temperature: float) -> Indices:
    """`order` of the first `count` units; with a temperature, every domain in epochs of its own."""
    if temperature == 1 or examples.domains is None:
        return order(count, start, stop, seed)
    rows = [np.flatnonzero(examples.domains[:count] == domain) for domain in np.unique(examples.domains[:count])]
    result = np.empty(stop - start, dtype=np.int64)
    for number, (places, first, last) in enumerate(drawn(shares([*map(len, rows)], temperature), start, stop)):
        if last > first:
            # Seeds of their own, as for replay.
            result[places] = rows[number][order(len(rows[number]), first, last, seed + (number + 2) * 2**32)]
    return result
