"""The suffix index: its order, what it finds, and how long it takes."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from draftsmith.decode.suffix_index import LONGEST, SAMPLE, SuffixIndex

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=15), max_size=5)


def occurrences(documents, suffix, length):
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for at in range(len(suffix), len(document)):
            if document[at - len(suffix) : at] == suffix:
                found[tuple(document[at : at + length])] += 1
    return found


@given(
    DOCUMENTS,
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_matches_and_continuations_are_those_of_a_scan(documents, suffix, length, count):
    index = SuffixIndex.build(documents)
    longest = [n for n in range(1, len(suffix) + 1) if occurrences(documents, suffix[-n:], 1)]
    assert index.match(suffix) == max(longest, default=0)
    found = index.continuations(suffix, length, count)
    expected = occurrences(documents, suffix, length)
    assert found == sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:count]
    assert SuffixIndex.build(documents[::-1]).continuations(suffix, length, count) == found


def test_frequent_tokens_are_counted_on_an_even_sample():
    text = [0, 1] * (4 * SAMPLE) + [0, 2] * SAMPLE
    found = dict(SuffixIndex.build([text]).continuations([0], 1, 9))
    assert sum(found.values()) == SAMPLE and found[2,] == pytest.approx(SAMPLE / 5, rel=0.5)


def test_a_million_tokens_take_seconds():
    rng = np.random.default_rng(0)
    documents = [((rng.zipf(1.3, 1000) - 1) % 32000).tolist() for _ in range(1000)]
    began = time.process_time()
    index = SuffixIndex.build(documents)
    assert time.process_time() - began < 30
    assert index.text_n.nbytes + index.positions.nbytes < 8.01 * 1_001_000
    assert index.match(documents[500][100:140]) == LONGEST
