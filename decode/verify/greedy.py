"""Greedy multi-draft speculative sampling (Hu et al., ICLR 2025, arXiv 2502.18779): the k - 1 most probable tokens, and
one drawn from the others.

Legend: B rows, K siblings, V vocabulary.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.tree_walk import Node, Verdict, draw_rank, known_empty, residual, walk


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """At each node one step of speculative sampling for the drawn child; at its refusal a draw from norm((p - r)+),
    which may hit a top child and then accepts it. r is what the drawn child was drawn from: q without the top tokens,
    renormalised. With one child per node this is speculative sampling.
    """
    return walk(proposal, p_BMV, u_BU, decide_at_node, per_node=2)


def decide_at_node(node: Node) -> tuple[Tensor, Tensor]:
    """The drawn child is the last on offer, the others are the top ones.

    If the top tokens had all of q, nothing was drawn: the last top token is then the only one that the others leave in
    q, as if it had been drawn with r(x) = 1.
    """
    ranks_K = torch.arange(node.offer_BK.shape[1], device=node.offer_BK.device)
    last_B = torch.where(node.offer_BK >= 0, ranks_K, -1).max(1).values
    top_BK = node.offer_BK.masked_fill(ranks_K >= last_B.unsqueeze(1), -1)
    x_B1 = node.offer_BK.gather(1, last_B.clamp(min=0).unsqueeze(1))
    asked_B, x_B1 = x_B1[:, 0] >= 0, x_B1.clamp(min=0)
    r_BV = without_top(node.q(0), top_BK)
    taken_B = asked_B & (node.u_Bn[:, 0] * r_BV.gather(1, x_B1)[:, 0] < node.p_BV.gather(1, x_B1)[:, 0])
    rank_B = last_B.masked_fill(~taken_B, -1)
    refused_B = asked_B & ~taken_B
    if known_empty(refused_B):
        return rank_B, node.p_BV
    hit_B, left_BV = draw_rank(residual(node.p_BV, r_BV), top_BK, node.u_Bn[:, 1])
    # A row without a refusal had nothing on offer, and p stays whole.
    return torch.where(refused_B, hit_B, rank_B), torch.where(refused_B.unsqueeze(1), left_BV, node.p_BV)


def without_top(q_BV: Tensor, top_BK: Tensor) -> Tensor:
    """q without the top tokens (-1 for none), renormalised; all zero when they hold all its mass."""
    x_BK = top_BK.clamp(min=0)
    left_BV = q_BV.scatter_add(1, x_BK, -q_BV.gather(1, x_BK).masked_fill(top_BK < 0, 0.0))
    return left_BV.div_(left_BV.sum(1, keepdim=True).clamp_(min=torch.finfo(q_BV.dtype).tiny))
