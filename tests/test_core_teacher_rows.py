"""Teacher rows come back from their bytes, and take as few as is said."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from draftsmith.core.teacher_rows import bytes_per_token, pack, unpack


@given(
    vocabulary=st.sampled_from([1, 5, 290, 65_536, 65_537, 131_072, 151_936, 262_144]),
    k=st.integers(0, 40),
    positions=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_packed_comes_back(vocabulary, k, positions, seed):
    draw = np.random.default_rng(seed)
    k = min(k, vocabulary)
    ids = np.array(
        [draw.choice(vocabulary, k, replace=False) for _ in range(positions)], dtype=np.int64
    ).reshape(positions, k)
    if positions and k:
        ids[0] = np.arange(vocabulary - k, vocabulary)  # the last ids there are
    logprobs, tail = -10 * draw.random((positions, k)), draw.random(positions)
    data = pack(ids, logprobs, tail, vocabulary)
    assert len(data) == 4 + positions * bytes_per_token(k, vocabulary)
    found, found_logprobs, found_tail = unpack(data)
    order = np.argsort(ids, axis=-1)
    np.testing.assert_array_equal(found, np.take_along_axis(ids, order, -1))
    np.testing.assert_allclose(
        found_logprobs, np.take_along_axis(logprobs, order, -1), rtol=2**-11, atol=2**-24
    )
    np.testing.assert_allclose(found_tail, tail, rtol=2**-11, atol=2**-24)


@pytest.mark.parametrize(
    "vocabulary, size", [(32_000, 514), (65_536, 514), (151_936, 518), (262_144, 520)]
)
def test_a_token_takes_at_most_520_bytes(vocabulary, size):
    ids = np.arange(vocabulary - 128, vocabulary)[None]
    assert bytes_per_token(128, vocabulary) == size
    assert len(pack(ids, np.full((1, 128), -5.0), np.zeros(1), vocabulary)) == 4 + size <= 4 + 520


def test_a_probability_of_zero_stays_one():
    _, logprobs, _ = unpack(pack(np.array([[1, 2]]), np.array([[-np.inf, -1e9]]), np.ones(1), 10))
    assert (np.exp(logprobs) == 0).all()
