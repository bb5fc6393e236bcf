"""Speculative sampling on a chain (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
2302.01318, algorithm 2).

Legend: B rows, D depth, M nodes with the root, V vocabulary, U = D + 1 uniforms per row: one per depth, one for the
last token.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.exact import verify as exact
from decode.verify.tree_walk import Verdict, chain_nodes, finish, known_empty, residual
from draftsmith_core.sampling import draw


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm((p - q)+).

    After a fully accepted chain the last token is drawn from p. All depths are tested at once.
    """
    if proposal.tree.depth == 0:
        return exact(proposal, p_BMV, u_BU[:, -1:])
    tree, rows, depth = proposal.tree, p_BMV.shape[0], proposal.tree.depth
    u_BU = u_BU.to(p_BMV.device)
    rows_B1 = torch.arange(rows, device=p_BMV.device).unsqueeze(1)
    nodes_BD = chain_nodes(tree, rows)
    above_BD = torch.nn.functional.pad(nodes_BD[:, :-1], (1, 0))  # above the first node is the root, index 0
    tokens_BD = proposal.tokens_BM.gather(1, nodes_BD)
    offered_BD = tokens_BD >= 0
    x_BD = tokens_BD.clamp(min=0)
    p_x_BD = p_BMV[rows_B1, above_BD, x_BD]
    groups_BD = tree.groups_RM.expand(rows, -1).gather(1, above_BD)
    q_x_BD = torch.ones_like(p_x_BD) if proposal.q_BEV is None else proposal.q_BEV[rows_B1, groups_BD, x_BD]
    # u q < p, not u < p / q: no division, and a token with p(x) = 0 is refused even at u = 0.
    taken_BD = (u_BU[:, :depth] * q_x_BD < p_x_BD) & offered_BD
    accepted_B = taken_BD.long().cumprod(1).sum(1)
    nodes_BD = torch.where(taken_BD.cumprod(1) > 0, nodes_BD, 0)
    last_B1 = accepted_B.clamp(max=depth - 1).unsqueeze(1)
    open_B = (accepted_B < depth) & offered_BD.gather(1, last_B1).squeeze(1)
    end_B1 = nodes_BD.max(1, keepdim=True).values  # the last accepted node
    left_BV = p_BMV[rows_B1, end_B1].squeeze(1)
    if not known_empty(open_B):
        if proposal.q_BEV is None:
            q_BV = torch.zeros_like(left_BV).scatter_(1, x_BD.gather(1, last_B1), 1.0)
        else:
            q_BV = proposal.q_BEV[rows_B1, groups_BD.gather(1, last_B1)].squeeze(1)
        left_BV = torch.where(open_B.unsqueeze(1), residual(left_BV, q_BV), left_BV)
    return finish(proposal, list(nodes_BD.unbind(1)), accepted_B, open_B, draw(left_BV, u_BU[:, -1]))
