"""Laws 2 and 4: one function makes the distribution, one draws from it, and randomness belongs to a
row.
"""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from draftsmith.core.sampling import (
    Sampling,
    acceptance,
    draw,
    draw_without_replacement,
    generator,
    largest,
    probs,
    row_seed,
    uniforms,
)

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0),
    Sampling(top_k=1),
    Sampling(top_k=3),
    Sampling(top_k=99),
    Sampling(top_p=0.5),
    Sampling(top_p=1e-6),
    Sampling(temperature=0.7, top_k=4, top_p=0.8),
    Sampling(min_p=0.3),
    Sampling(min_p=1.0),
    Sampling(temperature=0.6, top_k=5, top_p=0.9, min_p=0.2),
    Sampling(temperature=0.0, top_k=2, top_p=0.1),
]


def slow_probs(logits, sampling):
    """The definition, one token at a time in float64."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    p = np.zeros(len(logits))
    if sampling.temperature == 0:
        p[ranked[0]] = 1.0
        return p
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    peak = logits[ranked[0]]
    weights = {token: math.exp((logits[token] - peak) / sampling.temperature) for token in ranked}
    total, mass = sum(weights.values()), 0.0
    for token in ranked:
        if sampling.top_p < 1 and mass >= sampling.top_p:
            break
        if weights[token] < sampling.min_p * weights[ranked[0]]:
            break
        p[token] = weights[token] / total
        mass += p[token]
    return np.asarray(p / p.sum())


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_probs_is_the_definition(sampling, dtype):
    logits_BV = (torch.randn(20, 9, generator=generator(0)) * 2).to(dtype)
    law_BV = probs(logits_BV, sampling)
    assert law_BV.dtype == torch.float32
    for logits_V, law_V in zip(logits_BV, law_BV, strict=True):
        expected = slow_probs(logits_V.double().tolist(), sampling)
        np.testing.assert_allclose(law_V.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_ties_go_to_the_lower_token(sampling):
    logits = [0.5, 2.0, 2.0, -1.0, 2.0, 0.5, 0.5]
    p = probs(torch.tensor(logits), sampling).numpy()
    np.testing.assert_allclose(p, slow_probs(logits, sampling), atol=1e-6)
    assert sampling.temperature > 0 or p.tolist() == [0, 1, 0, 0, 0, 0, 0]


@st.composite
def weights_of_tokens(make):
    weights = make(
        st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.3, 1.0]), min_size=1, max_size=8)
    )
    if not any(weights):
        weights[make(st.integers(0, len(weights) - 1))] = 0.5
    return weights


@settings(max_examples=200, deadline=None)
@given(
    weights=weights_of_tokens(),
    u=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_without_mass_is_never_drawn(weights, u):
    token = int(draw(torch.tensor(weights), torch.tensor(u, dtype=torch.float64)))
    assert weights[token] > 0


@settings(max_examples=100, deadline=None)
@given(weights=weights_of_tokens(), seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_draws_without_replacement_are_distinct_and_run_out(weights, seed, count):
    picks = draw_without_replacement(
        torch.tensor(weights), uniforms([generator(seed)], count)[0]
    ).tolist()
    support = sum(weight > 0 for weight in weights)
    drawn = [token for token in picks if token >= 0]
    assert len(drawn) == min(count, support)
    assert len(set(drawn)) == len(drawn)
    assert all(weights[token] > 0 for token in drawn)
    assert picks[len(drawn) :] == [-1] * (count - len(drawn))


def fits(counts, expected):
    """Whether counts are plausible (p > 0.001) under the expected shares, impossible outcomes never
    seen.
    """
    kept = [(c, e) for c, e in zip(counts, expected, strict=True) if e > 0]
    if sum(c for c, _ in kept) < sum(counts):
        return False
    scale = sum(counts) / sum(e for _, e in kept)
    return bool(chisquare([c for c, _ in kept], [e * scale for _, e in kept]).pvalue > 1e-3)


def test_draw_follows_the_distribution():
    p = torch.tensor([0.05, 0.0, 0.4, 0.25, 0.3])
    u = uniforms([generator(5)], 20_000)[0]
    # An unnormalised residual has the same distribution.
    for scaled in (p, p * 0.013):
        counts = torch.bincount(draw(scaled.expand(20_000, 5), u), minlength=5).tolist()
        assert fits(counts, p.tolist())
        assert not fits(counts, [0.08, 0.0, 0.37, 0.25, 0.3])


@pytest.mark.parametrize("count", [2, 3])
def test_draws_without_replacement_follow_the_sequential_distribution(count):
    p = [0.1, 0.4, 0.2, 0.3]
    outcomes = list(permutations(range(4), count))
    expected = []
    for outcome in outcomes:
        chance, left = 1.0, 1.0
        for token in outcome:
            chance *= p[token] / left
            left -= p[token]
        expected.append(chance)
    assert sum(expected) == pytest.approx(1)
    u = torch.rand(20_000, count, generator=generator(6), dtype=torch.float64)
    picks = draw_without_replacement(torch.tensor(p).expand(20_000, 4), u).tolist()
    places = {outcome: place for place, outcome in enumerate(outcomes)}
    counts = [0] * len(outcomes)
    for pick in picks:
        counts[places[tuple(pick)]] += 1
    assert fits(counts, expected)
    assert not fits(counts, [1 / len(outcomes)] * len(outcomes))


@pytest.mark.parametrize("size", [5, 4095, 4096, 5001, 49_152])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_the_largest_values_are_found_in_rows_of_any_length(size, count):
    """Few distinct values, so that the largest are tied, within a block and between blocks."""
    count = min(count, size)
    values = torch.randint(0, 30, (3, 2, size), generator=generator(1)).float()
    values[1] = -torch.inf
    values[1, :, size // 2] = 1.0
    found = largest(values, count)
    assert torch.equal(found.values, values.topk(count, dim=-1).values)
    assert torch.equal(values.gather(-1, found.indices), found.values)
    assert all(len(row.unique()) == count for row in found.indices[[0, 2]].view(-1, count))
    if count == 1:
        first = (values == found.values).int().argmax(-1)
        assert torch.equal(found.indices[..., 0], first)


def test_acceptance_is_one_minus_total_variation():
    logits = torch.randn(2, 50, 11, generator=generator(7)) * 2
    p, q = (probs(each, Sampling(top_k=6)) for each in logits)
    torch.testing.assert_close(acceptance(p, q), 1 - (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(acceptance(p, p), torch.ones(50))


def test_a_seed_is_of_the_row_and_not_of_its_place():
    keys = [f"prompt-{i}/{k}" for i in range(50) for k in range(4)]
    seeds = [row_seed(3, key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(4, keys[0]) != seeds[0]
    # "1" + "2/0" and "12" + "/0" must not meet.
    assert row_seed(1, "2/0") != row_seed(12, "/0")
    together = uniforms([generator(seed) for seed in seeds[:3]], 5)
    reversed_order = uniforms([generator(seed) for seed in seeds[:3][::-1]], 5)
    assert torch.equal(together, reversed_order.flip(0))
    assert torch.equal(together[1], uniforms([generator(seeds[1])], 5)[0])
