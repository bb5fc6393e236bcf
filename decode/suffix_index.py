"""A suffix index over token sequences: what followed these tokens in a corpus, and how often.

Legend: n positions of the joined text, c occurrences, L tokens of a continuation, rank: an index
into the sorted positions.

Positions in the joined documents are sorted by the tokens *before* them, read backwards, so that
positions after the same tokens are neighbours. The sort is prefix doubling (Manber and Myers 1993)
in which only groups that still tie are sorted again (Larsson and Sadakane 2007).
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
# Above this many occurrences, continuations are counted on an even sample: frequencies are off by
# some 3 %, but the cost of a lookup does not grow with them.
SAMPLE = 256


@dataclass(frozen=True, eq=False)
class SuffixIndex:
    """Token sequences and the order of their positions.

    text_n: each document followed by a separator. positions: those with a token before and after
    them in the same document.
    """

    text_n: NDArray[np.int32]
    positions: NDArray[np.int32]

    @staticmethod
    def build(documents: Sequence[Sequence[int]]) -> "SuffixIndex":
        """Index documents of token ids; about 8 bytes per token when built, some 80 while
        building.
        """
        if sum(map(len, documents)) + len(documents) >= 2**31:
            raise ValueError("suffix index: 2**31 tokens or more; index a part of the corpus")
        pieces = [np.array([*document, SEPARATOR]) for document in documents or [()]]
        text_n = np.concatenate(pieces).astype(np.int32)
        positions = len(text_n) - suffix_array(text_n[::-1])
        positions = positions[positions < len(text_n)]
        inside = (text_n[positions] >= 0) & (text_n[positions - 1] >= 0)
        positions = positions[inside]
        return SuffixIndex(text_n, positions.astype(np.int32))

    @property
    def largest(self) -> int:
        """The largest token id, -1 when there is none."""
        return int(self.text_n.max())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text_n.tobytes()).hexdigest()

    def match(self, suffix: Sequence[int]) -> int:
        """Return how many of the last tokens of `suffix` occur together, with a token after them,
        in some document.
        """
        query = list(suffix)[::-1]
        at = self._rank(bisect_left, query)
        longest = 0
        for rank in range(max(at - 1, 0), min(at + 1, len(self.positions))):
            before = self._before(rank, len(query))
            longest = max(longest, len(commonprefix([query, before])))
        return longest

    def continuations(
        self, suffix: Sequence[int], length: int, count: int
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return the `count` most frequent continuations of `suffix` with their occurrences, the
        most frequent first.

        They are `length` tokens long, or end with their document.
        """
        query = list(suffix)[::-1]
        low = self._rank(bisect_left, query)
        high = self._rank(bisect_right, query)
        starts_c = self.positions[low:high]
        if high - low > SAMPLE:
            sampled = np.linspace(low, high - 1, SAMPLE).astype(np.int64)
            starts_c = self.positions[sampled]
        reach_cL = np.minimum(starts_c[:, None] + np.arange(length), len(self.text_n) - 1)
        # Tokens plus one, so that 0 marks the end of a document; as big-endian bytes, which sort in
        # the same order.
        codes_cL = self.text_n[reach_cL] + 1
        codes_cL *= np.logical_and.accumulate(codes_cL > 0, axis=1)
        keys_c = codes_cL.astype(">i4").view(f"V{4 * length}")
        counts = Counter(keys_c.ravel().tolist())
        # Ties go by the tokens, so that the answer does not depend on the order of the documents.
        ranked = sorted((-times, key) for key, times in counts.items())
        best = ranked[:count]
        joined = b"".join(key for _, key in best)
        best_cL = np.frombuffer(joined, dtype=">i4").reshape(-1, length)
        found: list[tuple[tuple[int, ...], int]] = []
        for codes, (less, _) in zip(best_cL.tolist(), best, strict=True):
            found.append((tuple(code - 1 for code in codes if code), -less))
        return found

    def _rank(self, bisect: Callable[..., int], query: list[int]) -> int:
        ranks = range(len(self.positions))
        return bisect(ranks, query, key=lambda rank: self._before(rank, len(query)))

    def _before(self, rank: int, length: int) -> list[int]:
        # Up to `length` tokens before a position, the nearest first.
        position = int(self.positions[rank])
        before = self.text_n[max(position - length, 0) : position]
        return before[::-1].tolist()


def suffix_array(text_n: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the starts of all suffixes, in the order of the suffixes; an end comes before any
    value.
    """
    size = len(text_n)
    values, codes_n = np.unique(text_n, return_inverse=True)
    # Several tokens fit one 64-bit key, so the first sort already compares that many.
    bits = int(len(values)).bit_length()
    span = min(63 // bits, max(size, 1)) if bits else 1
    keys_n = np.zeros(size, dtype=np.int64)
    for shift in range(span):
        keys_n <<= bits
        keys_n[: size - shift] += codes_n[shift:] + 1
    order_n = np.argsort(keys_n)
    keys_n = keys_n[order_n]
    # The rank of a suffix is where its group of ties begins. A last entry of -1 sorts ends of the
    # text first.
    ranks_n = np.full(size + 1, -1, dtype=np.int64)
    ranks = np.arange(size)
    members = order_n
    while True:
        new_group = keys_n[1:] != keys_n[:-1]
        first = np.concatenate([[True], new_group])[: len(ranks)]
        group = np.cumsum(first) - 1
        ranks_n[members] = ranks[first][group]
        last = np.concatenate([new_group, [True]])[: len(ranks)]
        alone = first & last
        ranks = ranks[~alone]
        if not len(ranks):
            return order_n
        members = order_n[ranks]
        beyond = np.minimum(members + span, size)
        keys_n = ranks_n[members] * (size + 1) + ranks_n[beyond] + 1
        inside = np.argsort(keys_n)
        members = members[inside]
        keys_n = keys_n[inside]
        order_n[ranks] = members
        span *= 2
