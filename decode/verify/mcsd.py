"""Multi-candidate speculative sampling without replacement (Yang et al. 2024, arXiv 2401.06706,
algorithm 2), also known as recursive rejection sampling without replacement.

Legend: B rows, K siblings, M nodes with the root, V vocabulary, U uniforms a row.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.exact import verify as exact
from decode.verify.rule import (
    Node,
    Rows,
    Verdict,
    among,
    landing,
    nowhere,
    residual,
    walk,
)


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Try the children of each node in drawing order, from the root down.

    Child x is accepted with probability min(1, p(x)/q(x)). At a refusal p becomes norm((p - q)+),
    and x leaves q, which is renormalised: the law the next sibling was drawn from. When all are
    refused the token is drawn from what p has become; at a leaf, from the target's law there. A
    deterministic child counts as q(x) = 1.
    """
    if u_BU is None:
        return exact(proposal, p_BMV, None)
    if proposal.q_BEV is None:
        return walk(proposal, p_BMV, u_BU, landing, per_node=1)
    return walk(proposal, p_BMV, u_BU, lambda node: in_turn(node, replacement=False), per_node=None)


def in_turn(node: Node, replacement: bool) -> tuple[Tensor, Tensor]:
    """Speculative sampling on one sibling after another, each against what the refusals before it have left of p.

    Without replacement q loses the tokens that were refused; with replacement each sibling has its own q.
    """
    p_BV, q_BV = node.p_BV, node.law(0)
    rank_B = torch.full_like(node.offer_BK[:, 0], -1)
    width = node.offer_BK.shape[1]
    for k in range(width):
        x_B1 = node.offer_BK[:, k : k + 1]
        asked_B = (rank_B < 0) & (x_B1[:, 0] >= 0)
        x_B1 = x_B1.clamp(min=0)
        if replacement and k:
            q_BV = node.law(k)
        # u q < p rather than u < p / q: no division, and a token of target probability 0 is
        # never accepted.
        fits_B = node.u_Bn[:, k] * q_BV.gather(1, x_B1)[:, 0] < p_BV.gather(1, x_B1)[:, 0]
        rank_B = rank_B.masked_fill(asked_B & fits_B, k)
        refused_B = asked_B & ~fits_B
        if nowhere(refused_B):
            if nowhere(rank_B < 0):
                break
            continue
        who = among(refused_B)
        p_BV = change(p_BV, who, refused_B, residual(p_BV[who], q_BV[who]))
        if not replacement and k + 1 < width:
            q_BV = change(q_BV, who, refused_B, without(q_BV[who], x_B1[who]))
    return rank_B, p_BV


def change(law_BV: Tensor, who: Rows, mask_B: Tensor, new_BV: Tensor) -> Tensor:
    """The laws with those of the mask replaced; `new_BV` are of the rows `who`, which hold the mask."""
    if isinstance(who, Tensor):
        return law_BV.index_copy(0, who, new_BV)
    return torch.where(mask_B.unsqueeze(1), new_BV, law_BV)


def without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """q with token x removed and the rest renormalised: the law of the next sibling.

    When the support is used up the result is all zero (0 / tiny), not NaN; there is no next sibling
    then (-1).
    """
    rest_BV = q_BV.scatter(1, x_B1, 0.0)
    return rest_BV.div_(rest_BV.sum(-1, keepdim=True).clamp_(min=torch.finfo(rest_BV.dtype).tiny))
