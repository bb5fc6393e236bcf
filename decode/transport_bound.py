"""The most that any lossless rule can accept at a node with k candidates: the optimal-transport
bound.

Legend: H a set of tokens, P(H) the target's mass on it, Q(H) the chance that all candidates fall in
H, V vocabulary; `...` any leading shape. Everything is float64.

The bound is alpha* = 1 + min over H of P(H) - Q(H), and some rule reaches it (Hu et al., ICLR 2025,
arXiv 2502.18779). For independent draws and for draws without replacement the minimum is at a
prefix of the tokens in ascending order of p/q, so that one scan finds it.
"""

import math

import torch
from torch import Tensor

from decode.tree import Drawing

# By time SURE / r a clock of rate r has rung, except with probability e^-40, which is lost in the
# rounding of a double.
SURE = 40.0
# Integrals over time are sums over equal steps of x, t = exp(x - exp(-x)): late times are as in log
# t, and early ones, at which no clock has rung, take few steps. At START t is 1e-15. Measured
# beside steps of 0.1, the error is at most 4e-10 with three candidates and 2e-7 with eight.
START, STEP = -3.4, 0.35


def optimal_acceptance(p_V: Tensor, q_V: Tensor, k: int, drawing: Drawing) -> Tensor:
    """alpha* `[...]` of k candidates from `q` against `p`, both `[..., V]`; k is at least 1.

    "with_replacement": k independent draws. "without_replacement": k successive draws, fewer when q
    has fewer tokens; Q(H) is then an integral over one variable (see STEP). "top_and_one": the k -
    1 most probable tokens and one from the others. "deterministic": the k most probable tokens.
    Tokens without mass in q are never candidates.
    """
    p_V, q_V = (law.double() / law.double().sum(-1, keepdim=True) for law in (p_V, q_V))
    if drawing in ("deterministic", "top_and_one"):
        best = q_V.topk(min(k if drawing == "deterministic" else k - 1, q_V.shape[-1]), dim=-1)
        covered = (p_V.gather(-1, best.indices) * (best.values > 0)).sum(-1)
        if drawing == "deterministic":
            return covered
        rest_V = q_V.scatter(-1, best.indices, 0.0)
        rest_V = rest_V / rest_V.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.double).tiny)
        return covered + torch.minimum(p_V, rest_V).sum(-1)
    ratio_V = torch.where(q_V > 0, p_V / q_V, torch.inf)
    order_V = ratio_V.argsort(dim=-1)
    p_V, q_V = p_V.gather(-1, order_V), q_V.gather(-1, order_V)
    inside_V = q_V.cumsum(-1) ** k if drawing == "with_replacement" else _all_inside(q_V, k)
    return 1 + (p_V.cumsum(-1) - inside_V).min(-1).values.clamp(max=0)


def _all_inside(q_V: Tensor, k: int) -> Tensor:
    """For each prefix of the tokens, the chance that k successive draws without replacement all
    fall in it.

    Draws without replacement are the order in which clocks ring that have exponential rates q(x):
    the first k ring in H when fewer than k have not rung there before the first outside of H does,
    at a time t of rate r = 1 - q(H). The chance that exactly j have rung by t is e_j(z) exp(-q(H)
    t), z(x) = exp(q(x) t) - 1, and the elementary symmetric polynomials e_j of all prefixes are
    running sums, e_j(n) = e_j(n - 1) + z_n e_(j-1)(n - 1), in which nothing cancels. Clocks that
    are sure to have rung are counted, and left out of the polynomials, which could overflow.
    """
    shape = q_V.shape
    q_V = q_V.view(-1, shape[-1])
    needed = (q_V > 0).sum(-1, keepdim=True).clamp(max=k)
    # Once `needed` clocks are sure to have rung nothing is left to integrate. Rows that go on for
    # long come first.
    last = (SURE / q_V.sort(dim=-1, descending=True).values.gather(-1, needed - 1)).log()[:, 0] + 1
    order = last.argsort(descending=True)
    q_V, needed, ends = q_V[order], needed[order], last[order].tolist()
    # Shifted and not subtracted, so that small masses outside keep all their digits and none is
    # exactly 0.
    outside_V = torch.nn.functional.pad(q_V.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    miss_V = torch.zeros_like(q_V)
    live = len(ends)
    for place in range(math.ceil((max(ends, default=START) - START) / STEP) + 1):
        x = START + place * STEP
        while live and ends[live - 1] + STEP < x:
            live -= 1
        t = math.exp(x - math.exp(-x))
        rate_V = q_V[:live] * t
        sure_V = rate_V > SURE
        rung_V = sure_V.long().cumsum(-1)
        z_V = torch.where(sure_V, 0.0, rate_V).expm1()
        light_V = torch.where(sure_V, 0.0, rate_V).cumsum(-1)
        e_V = torch.ones_like(rate_V)
        few_V = torch.zeros_like(rate_V)
        for j in range(k):
            few_V += torch.where(j + rung_V < needed[:live], e_V, 0.0)
            if j + 1 < k:
                e_V = (
                    z_V * torch.nn.functional.pad(e_V[:, :-1], (1, 0), value=float(j == 0))
                ).cumsum(-1)
        dt = t * (1 + math.exp(-x)) * STEP
        miss_V[:live] += few_V * torch.exp(-light_V - outside_V[:live] * t) * outside_V[:live] * dt
    return torch.empty_like(q_V).index_copy_(0, order, 1 - miss_V).view(shape)
