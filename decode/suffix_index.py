"""A suffix index over token sequences: what followed these tokens in a corpus, and how often.

Legend: n positions of the joined text, c occurrences, L tokens of a continuation, rank: an index
into the sorted positions.

Positions in the joined documents are sorted by the `LONGEST` tokens *before* them, read backwards,
so that positions after the same tokens are neighbours.
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
# Tokens that are looked up at most.
LONGEST = 16
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
        positions = np.flatnonzero((text_n[1:] >= 0) & (text_n[:-1] >= 0)) + 1
        padded = np.concatenate([np.full(LONGEST, SEPARATOR, np.int32), text_n])
        # The nearest token decides first, which is lexsort's last key.
        keys = [padded[positions + place] for place in range(LONGEST)]
        order = np.lexsort(keys)
        return SuffixIndex(text_n, positions[order].astype(np.int32))

    @property
    def largest(self) -> int:
        """The largest token id, -1 when there is none."""
        return int(self.text_n.max())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text_n.tobytes()).hexdigest()

    def match(self, suffix: Sequence[int]) -> int:
        """Return how many of the last tokens of `suffix`, at most `LONGEST`, occur together, with a
        token after them, in some document.
        """
        query = _backwards(suffix)
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
        query = _backwards(suffix)
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


def _backwards(suffix: Sequence[int]) -> list[int]:
    return list(suffix[-LONGEST:])[::-1]
