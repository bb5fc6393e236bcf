"""The transport bound is what a linear programme over all candidates and outputs finds, on
vocabularies of 5 tokens.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from draftsmith.core.sampling import generator
from draftsmith.decode.transport_bound import optimal_acceptance
from draftsmith.decode.tree import Drawing

VOCAB = 5
KINDS = ["random", "peaked", "one-hot p", "one-hot q", "disjoint", "truncated", "equal"]
DRAWINGS: list[Drawing] = [
    "with_replacement",
    "without_replacement",
    "top_and_one",
    "deterministic",
]


def distributions(kind, seed):
    """p and q, `[V]`."""
    p, q = (
        torch.randn(2, VOCAB, generator=generator(seed)) * (4 if kind == "peaked" else 1.2)
    ).softmax(-1)
    places = torch.arange(VOCAB)
    if kind == "one-hot p":
        p = (places == p.argmax()).float()
    elif kind == "one-hot q":
        q = (places == q.argmax()).float()
    elif kind == "disjoint":
        p, q = p * (places < 2), q * (places >= 2)
    elif kind == "truncated":
        p, q = p * (p >= p.topk(4).values[-1]), q * (q >= q.topk(2).values[-1])
    elif kind == "equal":
        q = p
    return p / p.sum(), q / q.sum()


def candidates(q, k, drawing):
    """Probability of each set of candidates, by enumeration."""
    distribution = [float(x) for x in q.double() / q.double().sum()]
    ranked = sorted(range(len(distribution)), key=lambda x: -distribution[x])
    found: dict[frozenset[int], float] = {}
    if drawing == "deterministic":
        return {frozenset(x for x in ranked[:k] if distribution[x] > 0): 1.0}
    top = ranked[: k - 1] if drawing == "top_and_one" else []
    draws = 1 if drawing == "top_and_one" else k
    if drawing == "without_replacement":
        draws = min(k, sum(x > 0 for x in distribution))
    kept = [x for x in range(len(distribution)) if x not in top and distribution[x] > 0]
    if not kept:
        return {frozenset(x for x in top if distribution[x] > 0): 1.0}
    for drawn in itertools.product(kept, repeat=draws):
        chance, left = 1.0, sum(distribution[x] for x in kept)
        for place, x in enumerate(drawn):
            if drawing == "without_replacement" and x in drawn[:place]:
                chance = 0.0
                break
            if drawing == "without_replacement":
                left = sum(distribution[y] for y in kept if y not in drawn[:place])
            chance *= distribution[x] / left
        if chance > 0:
            key = frozenset(drawn) | frozenset(x for x in top if distribution[x] > 0)
            found[key] = found.get(key, 0.0) + chance
    return found


def transport(p, sets):
    """The most that any coupling of candidates and output can accept, as a linear programme."""
    arcs = [(s, x) for s in sets for x in sorted(s)]
    distribution = (p.double() / p.double().sum()).numpy()
    rows = np.zeros((len(sets) + len(distribution), len(arcs)))
    for column, (s, x) in enumerate(arcs):
        rows[list(sets).index(s), column] = 1
        rows[len(sets) + x, column] = 1
    limits = np.concatenate([list(sets.values()), distribution])
    solved = linprog(-np.ones(len(arcs)), A_ub=rows, b_ub=limits, method="highs")
    assert solved.success
    return -float(solved.fun)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_bound_is_the_linear_programmes(drawing, k):
    for kind in KINDS:
        for seed in range(2):
            p, q = distributions(kind, seed)
            bound = float(optimal_acceptance(p, q, k, drawing))
            assert bound == pytest.approx(transport(p, candidates(q, k, drawing)), abs=1e-9)


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_bound_takes_batches_and_distributions_with_tiny_tokens(drawing):
    q = torch.tensor(
        [[1 - 3e-9, 2e-9, 1e-9, 0], [0.6, 0.4, 1e-30, 1e-31], [1.0, 1e-12, 0, 0]],
        dtype=torch.double,
    )
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.double).expand(3, -1)
    for k in (1, 2, 3):
        bounds = optimal_acceptance(p, q, k, drawing)
        for row in range(3):
            assert float(bounds[row]) == pytest.approx(
                transport(p[row], candidates(q[row], k, drawing)), abs=1e-9
            )
            assert float(optimal_acceptance(p[row], q[row], k, drawing)) == pytest.approx(
                float(bounds[row]), abs=1e-12
            )
