"""Rules that decide at one node after another which of its children stays.

* `mcsd`: multi-candidate speculative sampling, siblings without replacement (Yang et al. 2024,
  arXiv 2401.06706).
* `independent`: the same with replacement; SpecInfer's rule too, where siblings may come from
  several drafts (Miao et al. 2023, arXiv 2305.09781).
* `kseq`: SpecTr's sequential selection, one rule for all siblings of one draft (Sun et al. 2023,
  arXiv 2310.15141).
* `greedy`: the k - 1 most probable tokens, and one drawn from the others (Hu et al., ICLR 2025,
  arXiv 2502.18779).

Legend: B rows, D depth, K siblings, M nodes with the root, V vocabulary, U uniforms per row.
"""

from functools import partial

import torch
from torch import Tensor

from draftsmith.decode.kernel_sampling import try_siblings
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.verify.tree_walk import (
    Node,
    Verdict,
    draw_rank,
    first,
    hit_by_target,
    known_empty,
    refuse,
    residual,
    tiny,
    walk,
)

# Halvings of [1, k]. rho is then within 1e-5 of its root, which loses about 1e-5 of acceptance,
# never exactness.
HALVINGS = 20


def mcsd(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Try the children of each node in drawing order, from the root down.

    Child x is accepted with probability min(1, p(x)/q(x)). At a refusal p becomes norm((p - q)+),
    and x leaves q, which is renormalised: the next sibling was drawn from that. When all are
    refused the token is drawn from what p has become; at a leaf, from the target's distribution
    there. A deterministic child counts as q(x) = 1.
    """
    if proposal.q_BEV is None:
        return walk(proposal, p_BMV, u_BU, hit_by_target, per_node=1)
    return walk(proposal, p_BMV, u_BU, _try_without_replacement, per_node=None)


def _try_without_replacement(node: Node) -> tuple[Tensor, Tensor]:
    found = try_siblings(node.p_BV, node.q(0), node.offer_BK, node.u_Bn)
    return _try_in_turn(node, replacement=False) if found is None else found


def independent(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """`mcsd` for independent siblings: q stays as it is, and a repeated token is refused again."""
    return walk(proposal, p_BMV, u_BU, partial(_try_in_turn, replacement=True), per_node=None)


def _try_in_turn(node: Node, replacement: bool) -> tuple[Tensor, Tensor]:
    p_BV = node.p_BV
    q_BV = node.q(0)
    # What is left of p and q is not normalised, which would be another pass over the vocabulary for
    # each child; their masses say by how much.
    p_mass_B1 = q_mass_B1 = torch.ones_like(p_BV[:, :1])
    rank_B = torch.full_like(node.offer_BK[:, 0], -1)
    width = node.offer_BK.shape[1]
    for k in range(width):
        x_B1 = node.offer_BK[:, k : k + 1]
        asked_B1 = (rank_B.unsqueeze(1) < 0) & (x_B1 >= 0)
        x_B1 = x_B1.clamp(min=0)
        if replacement and k:
            q_BV = node.q(k)
        q_x_B1 = q_BV.gather(1, x_B1)
        # u q(x) < p(x): no division, and a token with p(x) = 0 is refused even at u = 0.
        uq_B1 = node.u_Bn[:, k : k + 1] * q_x_B1
        passed_B1 = uq_B1 * p_mass_B1 < p_BV.gather(1, x_B1) * q_mass_B1
        rank_B = rank_B.masked_fill((asked_B1 & passed_B1)[:, 0], k)
        refused_B1 = asked_B1 & ~passed_B1
        if known_empty(refused_B1):
            if known_empty(rank_B < 0):
                break
            continue
        share_B1 = (p_mass_B1 / q_mass_B1).masked_fill(~refused_B1, 0.0)
        p_BV, left_B1 = refuse(p_BV, q_BV, share_B1)
        p_mass_B1 = torch.where(refused_B1 & (left_B1 > 0), left_B1, p_mass_B1)
        if not replacement and k + 1 < width:
            q_BV = q_BV.scatter(1, x_B1, q_x_B1.masked_fill(refused_B1, 0.0))
            left_B1 = q_BV.sum(1, keepdim=True).clamp_(min=tiny(q_BV))
            q_mass_B1 = torch.where(refused_B1, left_B1, q_mass_B1)
    return rank_B, p_BV


def without(q_BV: Tensor, x_BK: Tensor) -> Tensor:
    """q without tokens x (-1 for none), renormalised; all zero (0 / tiny, not NaN) when they hold
    all its mass.
    """
    token_BK = x_BK.clamp(min=0)
    taken_BK = q_BV.gather(1, token_BK).masked_fill(x_BK < 0, 0.0)
    left_BV = q_BV.scatter_add(1, token_BK, -taken_BK)
    mass_B1 = left_BV.sum(1, keepdim=True)
    return left_BV.div_(mass_B1.clamp_(min=tiny(q_BV)))


def kseq(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept the first child with u < p(x) / (rho q(x)); when none is, draw from p less what
    acceptance has taken.

    With beta = sum min(q, p / rho), the chance that one child is accepted, k children accept x with
    probability g min(q(x), p(x) / rho), where g = (1 - (1 - beta)^k) / beta. This leaves p - g
    min(q, p / rho), which is not negative when g <= rho; the smallest such rho accepts most, at
    least 1 - 1/e of the best possible. k counts the children on offer; for one this is speculative
    sampling.
    """
    return walk(proposal, p_BMV, u_BU, _decide_kseq, per_node=None)


def _decide_kseq(node: Node) -> tuple[Tensor, Tensor]:
    q_BV = node.q(0)
    x_BK = node.offer_BK.clamp(min=0)
    offered_BK = node.offer_BK >= 0
    p_x_BK = node.p_BV.gather(1, x_BK)
    uq_BK = node.u_Bn * q_BV.gather(1, x_BK)
    count_B1 = offered_BK.sum(1, keepdim=True).clamp_(min=1)
    rho_B1 = solve_rho(node.p_BV, q_BV, count_B1)
    rank_B = first((uq_BK * rho_B1 < p_x_BK) & offered_BK)
    refused_B = (rank_B < 0) & offered_BK.any(1)
    if known_empty(refused_B):
        return rank_B, node.p_BV
    taken_BV = torch.minimum(q_BV, node.p_BV / rho_B1.float())
    beta_B1 = taken_BV.sum(1, keepdim=True, dtype=torch.double).clamp_(max=1)
    gain_B1 = _any_accepted(beta_B1, count_B1) / beta_B1.clamp(min=tiny(q_BV))
    left_BV = node.p_BV.addcmul(taken_BV, gain_B1.float(), value=-1).clamp_(min=0)
    # As in `residual`: when p and q differ by rounding only, nothing is left, and p is drawn from.
    some_B1 = refused_B.unsqueeze(1) & (left_BV.sum(1, keepdim=True) > 0)
    return rank_B, torch.where(some_B1, left_BV, node.p_BV)


def solve_rho(p_BV: Tensor, q_BV: Tensor, count_B1: Tensor) -> Tensor:
    """The smallest rho in [1, k] with 1 - (1 - beta)^k <= rho beta, by bisection of all rows at
    once; float64.

    rho beta = sum min(rho q, p) grows with rho and the left side falls, so there is one crossing.
    The upper end of the last interval is returned: exactness needs the inequality.
    """
    low_B1 = torch.ones_like(count_B1, dtype=torch.double)
    high_B1 = count_B1.double()
    for _ in range(HALVINGS):
        rho_B1 = (low_B1 + high_B1) / 2
        least_BV = torch.minimum(q_BV * rho_B1.float(), p_BV)
        covered_B1 = least_BV.sum(1, keepdim=True).double()
        beta_B1 = (covered_B1 / rho_B1).clamp_(max=1)
        above_B1 = _any_accepted(beta_B1, count_B1) <= covered_B1
        high_B1 = torch.where(above_B1, rho_B1, high_B1)
        low_B1 = torch.where(above_B1, low_B1, rho_B1)
    return high_B1


def _any_accepted(beta_B1: Tensor, count_B1: Tensor) -> Tensor:
    # 1 - (1 - beta)^k without cancellation.
    return -torch.expm1(count_B1 * torch.log1p(-beta_B1))


def greedy(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """At each node one step of speculative sampling for the drawn child; at its refusal a draw from
    norm((p - r)+), which may hit a top child and then accepts it. r is what the drawn child was
    drawn from: q without the top tokens, renormalised. With one child per node this is speculative
    sampling.
    """
    return walk(proposal, p_BMV, u_BU, _decide_greedy, per_node=2)


def _decide_greedy(node: Node) -> tuple[Tensor, Tensor]:
    # The drawn child is the last on offer. If the top tokens had all of q, nothing was drawn: the
    # last top token is then the only one that the others leave in q, as if it had been drawn with
    # r(x) = 1.
    offer_BK = node.offer_BK
    ranks_K = torch.arange(offer_BK.shape[1], device=offer_BK.device)
    last_B = torch.where(offer_BK >= 0, ranks_K, -1).max(1).values
    top_BK = offer_BK.masked_fill(ranks_K >= last_B.unsqueeze(1), -1)
    x_B1 = offer_BK.gather(1, last_B.clamp(min=0).unsqueeze(1))
    asked_B = x_B1[:, 0] >= 0
    r_BV = without(node.q(0), top_BK)
    x_B1 = x_B1.clamp(min=0)
    # As in `_try_in_turn`.
    ur_B1 = node.u_Bn[:, :1] * r_BV.gather(1, x_B1)
    passed_B1 = ur_B1 < node.p_BV.gather(1, x_B1)
    taken_B = asked_B & passed_B1[:, 0]
    rank_B = last_B.masked_fill(~taken_B, -1)
    refused_B = asked_B & ~taken_B
    if known_empty(refused_B):
        return rank_B, node.p_BV
    hit_B, left_BV = draw_rank(residual(node.p_BV, r_BV), top_BK, node.u_Bn[:, 1])
    # A row without a refusal had nothing on offer, and p stays whole.
    left_BV = torch.where(refused_B.unsqueeze(1), left_BV, node.p_BV)
    return torch.where(refused_B, hit_B, rank_B), left_BV
