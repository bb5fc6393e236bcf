"""Multi-candidate speculative sampling (Yang et al. 2024, arXiv 2401.06706, algorithm 2): siblings are tried in turn.

`verify` is for siblings drawn without replacement; `verify_independent`, for siblings drawn with replacement, is also
SpecInfer's rule (Miao et al. 2023, arXiv 2305.09781), where siblings may come from several drafts.

Legend: B rows, K siblings, M nodes with the root, V vocabulary, U uniforms per row.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.tree_walk import Node, Rows, Verdict, hit_by_target, known_empty, residual, rows_of, walk


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Try the children of each node in drawing order, from the root down.

    Child x is accepted with probability min(1, p(x)/q(x)). At a refusal p becomes norm((p - q)+), and x leaves q, which
    is renormalised: the next sibling was drawn from that. When all are refused the token is drawn from what p has
    become; at a leaf, from the target's distribution there. A deterministic child counts as q(x) = 1.
    """
    if proposal.q_BEV is None:
        return walk(proposal, p_BMV, u_BU, hit_by_target, per_node=1)
    return walk(proposal, p_BMV, u_BU, lambda node: try_in_turn(node, replacement=False), per_node=None)


def verify_independent(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """`verify` for independent siblings: q stays as it is, and a repeated token is refused again."""
    return walk(proposal, p_BMV, u_BU, lambda node: try_in_turn(node, replacement=True), per_node=None)


def try_in_turn(node: Node, replacement: bool) -> tuple[Tensor, Tensor]:
    """Speculative sampling on one sibling after another, each against what earlier refusals have left of p.

    Without replacement q loses the tokens that were refused; with replacement each sibling has its own q.
    """
    p_BV, q_BV = node.p_BV, node.q(0)
    rank_B = torch.full_like(node.offer_BK[:, 0], -1)
    width = node.offer_BK.shape[1]
    for k in range(width):
        x_B1 = node.offer_BK[:, k : k + 1]
        asked_B = (rank_B < 0) & (x_B1[:, 0] >= 0)
        x_B1 = x_B1.clamp(min=0)
        if replacement and k:
            q_BV = node.q(k)
        # u q < p rather than u < p / q: it needs no division, and refuses a token with p(x) = 0 even at u = 0.
        passed_B = node.u_Bn[:, k] * q_BV.gather(1, x_B1)[:, 0] < p_BV.gather(1, x_B1)[:, 0]
        rank_B = rank_B.masked_fill(asked_B & passed_B, k)
        refused_B = asked_B & ~passed_B
        if known_empty(refused_B):
            if known_empty(rank_B < 0):
                break
            continue
        rows = rows_of(refused_B)
        p_BV = replace_rows(p_BV, rows, refused_B, residual(p_BV[rows], q_BV[rows]))
        if not replacement and k + 1 < width:
            q_BV = replace_rows(q_BV, rows, refused_B, without(q_BV[rows], x_B1[rows]))
    return rank_B, p_BV


def replace_rows(old_BV: Tensor, rows: Rows, mask_B: Tensor, new_BV: Tensor) -> Tensor:
    """`old_BV` with the rows of the mask replaced; `new_BV` holds `rows`, which are those of the mask or all."""
    if isinstance(rows, Tensor):
        return old_BV.index_copy(0, rows, new_BV)
    return torch.where(mask_B.unsqueeze(1), new_BV, old_BV)


def without(q_BV: Tensor, x_B1: Tensor) -> Tensor:
    """q with token x removed and the rest renormalised: what the next sibling was drawn from.

    Once the support is used up the result is all zero (0 / tiny) and not NaN; there is no next sibling then (-1).
    """
    rest_BV = q_BV.scatter(1, x_B1, 0.0)
    return rest_BV.div_(rest_BV.sum(-1, keepdim=True).clamp_(min=torch.finfo(rest_BV.dtype).tiny))
