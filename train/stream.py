"""The order of training data: an endless stream of shuffled epochs that depends on the position in
it alone.

So a resumed run needs to know its step and nothing else, and a step has the same units however it
is divided (law 6).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftsmith.train.data import Examples, Indices


def order(count: int, start: int, stop: int, seed: int) -> Indices:
    """Row indices of positions `start`..`stop` in the endless stream of freshly shuffled epochs."""
    pieces = []
    for epoch in range(start // count, math.ceil(stop / count)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(count)
        first = epoch * count
        pieces.append(shuffled[max(start - first, 0) : stop - first])
    return np.concatenate(pieces)


def shares(counts: Sequence[int], temperature: float) -> list[float]:
    """Share of each domain: proportional to size^(1 / temperature) (arXiv 1907.05019, section
    4.1).
    """
    # Divide by the largest first: a small temperature would overflow.
    sizes = [(count / max(counts)) ** (1 / temperature) for count in counts]
    return [size / sum(sizes) for size in sizes]


class Draw(NamedTuple):
    """Positions of the stream that a domain fills, with `first`..`last` of its own stream.

    positions: counted from the first position that was asked for.
    """

    positions: Indices
    first: int
    last: int


def drawn(shares: Sequence[float], start: int, stop: int) -> list[Draw]:
    """Divide the positions `start`..`stop` of the stream among domains with these shares.

    The first domain takes position g if floor((g + 1) p) > floor(g p), so its positions are evenly
    spread; the others divide the remaining positions in the same way.
    """
    positions = np.arange(stop - start)
    left = sum(shares)
    draws = []
    for share in shares:
        # How many positions this domain has before each remaining one. 1e-9 keeps rounding from
        # lowering a floor by one.
        expected = np.arange(start, stop + 1) * min(1.0, share / (left or 1.0))
        before = np.floor(expected + 1e-9).astype(np.int64)
        taken = np.diff(before) > 0
        draw = Draw(positions[taken], int(before[0]), int(before[-1]))
        draws.append(draw)
        positions = positions[~taken]
        left -= share
        start -= draw.first
        stop -= draw.last
    return draws


class _Domain(NamedTuple):
    """Units that are shuffled among themselves, and their share of the stream."""

    units: Indices
    share: float
    seed: int


def units(
    examples: Examples,
    start: int,
    stop: int,
    seed: int,
    fraction: float = 0.0,
    temperature: float = 1.0,
) -> Indices:
    """Unit indices of positions `start`..`stop` in the endless stream, `fraction` of them replay,
    evenly spread.

    Data and replay are each reshuffled in every epoch of their own. temperature: mixes domains of
    the data (`shares`).
    """
    main = len(examples) if examples.replay_from is None else examples.replay_from
    # Each domain has its own seed: with one for two, their same rows would meet in every epoch.
    domains = [_Domain(np.arange(main), 1 - fraction, seed)]
    if temperature != 1 and examples.domains is not None:
        domain_of = examples.domains[:main]
        members = [np.flatnonzero(domain_of == domain) for domain in np.unique(domain_of)]
        parts = shares([len(own) for own in members], temperature)
        domains = []
        for own, part in zip(members, parts, strict=True):
            own_seed = seed + (len(domains) + 2) * 2**32
            domains.append(_Domain(own, (1 - fraction) * part, own_seed))
    if examples.replay_from is not None:
        domains.insert(0, _Domain(np.arange(main, len(examples)), fraction, seed + 2**32))
    result = np.empty(stop - start, dtype=np.int64)
    draws = drawn([domain.share for domain in domains], start, stop)
    for domain, draw in zip(domains, draws, strict=True):
        if draw.last > draw.first:
            index = order(len(domain.units), draw.first, draw.last, domain.seed)
            result[draw.positions] = domain.units[index]
    return result
