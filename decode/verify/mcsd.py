"""Multi-candidate speculative sampling without replacement (Yang et al. 2024, arXiv 2401.06706,
algorithm 2).

Legend: B rows, K siblings, M nodes with the root, V vocabulary, U uniforms a row: one for each
depth and sibling rank (depth by depth), and one for the last token.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.tree import TreeBatch
from decode.verify.rule import Verdict, Verifier, finish, match, residual
from draftsmith.sampling import draw


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Try the children of each node in drawing order, from the root down.

    Child x is accepted with probability min(1, p(x)/q(x)). At a refusal p becomes norm((p - q)+),
    and x leaves q, which is renormalised: the law the next sibling was drawn from. When all are
    refused the token is drawn from what p has become; at a leaf, from the target's law there. A
    deterministic child counts as q(x) = 1.
    """
    if u_BU is None:
        return match(proposal, p_BMV, None)
    tree = proposal.tree
    u_BU = u_BU.to(p_BMV.device)
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    children_BMK = tree.children_RMK.expand(len(rows_B), -1, -1)
    slots_BM = tree.slots_RM.expand(len(rows_B), -1)
    at_B = torch.zeros_like(rows_B)
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    open_B = torch.zeros_like(walking_B)
    accepted_B = torch.zeros_like(at_B)
    law_BV = p_BMV[:, 0]
    nodes = []
    used = 0
    for width in tree.widths:
        p_BV = p_BMV[rows_B, at_B]
        q_BV = None if proposal.q_BEV is None else proposal.q_BEV[rows_B, slots_BM[rows_B, at_B]]
        kids_BK = children_BMK[rows_B, at_B]
        offer_BK = proposal.tokens_BM.gather(1, kids_BK)
        next_B = torch.zeros_like(at_B)
        for k in range(width):
            x_B1 = offer_BK[:, k : k + 1]
            asked_B = walking_B & (next_B == 0) & (x_B1[:, 0] >= 0)
            x_B1 = x_B1.clamp(min=0)
            point_BV = torch.zeros_like(p_BV).scatter_(1, x_B1, 1.0) if q_BV is None else None
            now_BV = q_BV if q_BV is not None else point_BV
            assert now_BV is not None
            # u q < p rather than u < p / q: no division, and a token of target probability 0 is
            # never accepted.
            taken_B = asked_B & (u_BU[:, used + k] * now_BV.gather(1, x_B1)[:, 0] < p_BV.gather(1, x_B1)[:, 0])
            next_B = torch.where(taken_B, kids_BK[:, k], next_B)
            refused_B1 = (asked_B & ~taken_B).unsqueeze(1)
            p_BV = torch.where(refused_B1, residual(p_BV, now_BV), p_BV)
            if q_BV is not None and k + 1 < width:
                q_BV = torch.where(refused_B1, without(q_BV, x_B1), q_BV)
        used += width
        law_BV = torch.where(walking_B.unsqueeze(1), p_BV, law_BV)
        open_B = open_B | (walking_B & (next_B == 0) & (offer_BK >= 0).any(1))
        walking_B = next_B > 0
        accepted_B = accepted_B + walking_B
        at_B = torch.where(walking_B, next_B, at_B)
        nodes.append(next_B)
    law_BV = torch.where(walking_B.unsqueeze(1), p_BMV[rows_B, at_B], law_BV)
    return finish(proposal, nodes, accepted_B, open_B, draw(law_BV, u_BU[:, used]))


def without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """q with token x removed and the rest renormalised: the law of the next sibling.

    When the support is used up the result is all zero (0 / tiny), not NaN; there is no next sibling
    then (-1).
    """
    rest_BV = q_BV.scatter(1, x_B1, 0.0)
    return rest_BV / rest_BV.sum(-1, keepdim=True).clamp_(min=torch.finfo(rest_BV.dtype).tiny)


def uniforms(tree: TreeBatch) -> int:
    """One for each depth and sibling rank, one for the last token."""
    return sum(tree.widths) + 1


MCSD = Verifier(
    name="mcsd",
    lossless=True,
    chains_only=False,
    drawings=frozenset({"without_replacement", "deterministic"}),
    uniforms=uniforms,
    run=verify,
)
