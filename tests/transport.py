"""The most that any lossless rule can accept at a node, on small vocabularies: the optimal
transport from the draft's candidates to the target's token, as a linear programme.
"""

import itertools

import numpy as np
from scipy.optimize import linprog
from torch import Tensor

from draftsmith.decode.tree import Drawing


def candidates(q: Tensor, k: int, drawing: Drawing) -> dict[frozenset[int], float]:
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


def optimal_acceptance(p: Tensor, q: Tensor, k: int, drawing: Drawing) -> float:
    """The chance that the best coupling of k candidates and an output accepts one."""
    sets = candidates(q, k, drawing)
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
