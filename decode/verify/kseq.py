"""K-SEQ, sequential selection of SpecTr (Sun et al. 2023, arXiv 2310.15141): siblings drawn independently from one
draft, each accepted by the same rule.

Legend: B rows, K siblings, V vocabulary.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.tree_walk import Node, Verdict, first, known_empty, walk

HALVINGS = 20  # of [1, k]; rho is then within 1e-5 of its root, which loses about 1e-5 of acceptance, never exactness


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept the first child with u < p(x) / (rho q(x)); when none is, draw from p less what acceptance has taken.

    With beta = sum min(q, p / rho), the chance that one child is accepted, k children accept x with probability
    g min(q(x), p(x) / rho), where g = (1 - (1 - beta)^k) / beta. This leaves p - g min(q, p / rho), which is not
    negative when g <= rho; the smallest such rho accepts most, at least 1 - 1/e of the best possible. k counts the
    children on offer; for one this is speculative sampling.
    """
    return walk(proposal, p_BMV, u_BU, decide_at_node, per_node=None)


def decide_at_node(node: Node) -> tuple[Tensor, Tensor]:
    """The rule at one node."""
    q_BV, x_BK = node.q(0), node.offer_BK.clamp(min=0)
    offered_BK, u_BK = node.offer_BK >= 0, node.u_Bn[:, : x_BK.shape[1]]
    p_x_BK, q_x_BK = node.p_BV.gather(1, x_BK), q_BV.gather(1, x_BK)
    count_B1 = offered_BK.sum(1, keepdim=True).clamp_(min=1)
    # rho is at most k. Where the first child passes even with rho = k, rho need not be solved for.
    if known_empty((u_BK * count_B1 * q_x_BK >= p_x_BK)[:, 0] & offered_BK[:, 0]):
        sure_B = torch.where(offered_BK[:, 0], 0, -1)
        if known_empty(offered_BK.any(1) & (sure_B < 0)):
            return sure_B, node.p_BV
    rho_B1 = solve_rho(node.p_BV, q_BV, count_B1)
    rank_B = first((u_BK * rho_B1 * q_x_BK < p_x_BK) & offered_BK)
    refused_B = (rank_B < 0) & offered_BK.any(1)
    if known_empty(refused_B):
        return rank_B, node.p_BV
    taken_BV = torch.minimum(q_BV, node.p_BV / rho_B1.float())
    beta_B1 = taken_BV.sum(1, keepdim=True, dtype=torch.double).clamp_(max=1)
    gain_B1 = any_accepted(beta_B1, count_B1) / beta_B1.clamp(min=torch.finfo(torch.float32).tiny)
    left_BV = node.p_BV.addcmul(taken_BV, gain_B1.float(), value=-1).clamp_(min=0)
    # As in `residual`: when p and q differ by rounding only, nothing is left, and p is drawn from.
    whole_B1 = ~refused_B.unsqueeze(1) | (left_BV.sum(1, keepdim=True) <= 0)
    return rank_B, torch.where(whole_B1, node.p_BV, left_BV)


def solve_rho(p_BV: Tensor, q_BV: Tensor, count_B1: Tensor) -> Tensor:
    """The smallest rho in [1, k] with 1 - (1 - beta)^k <= rho beta, by bisection of all rows at once; float64.

    rho beta = sum min(rho q, p) grows with rho and the left side falls, so there is one crossing. The upper end of
    the last interval is returned: exactness needs the inequality.
    """
    low_B1 = torch.ones_like(count_B1, dtype=torch.double)
    high_B1 = count_B1.double()
    if known_empty(high_B1 > 1):
        return high_B1
    for _ in range(HALVINGS):
        rho_B1 = (low_B1 + high_B1) / 2
        covered_B1 = torch.minimum(q_BV * rho_B1.float(), p_BV).sum(1, keepdim=True).double()
        above_B1 = any_accepted((covered_B1 / rho_B1).clamp_(max=1), count_B1) <= covered_B1
        high_B1 = torch.where(above_B1, rho_B1, high_B1)
        low_B1 = torch.where(above_B1, low_B1, rho_B1)
    return high_B1


def any_accepted(beta_B1: Tensor, count_B1: Tensor) -> Tensor:
    """1 - (1 - beta)^k, the chance that one of k children is accepted, computed without cancellation."""
    return -torch.expm1(count_B1 * torch.log1p(-beta_B1))
