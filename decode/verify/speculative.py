"""Speculative sampling on a chain (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm
2).

Legend: B rows, D depth, M = D + 1 nodes with the root, V vocabulary, U = D + 1 uniforms a row: one
a depth, one for the last token.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.rule import Verdict, Verifier, finish, match, residual
from draftsmith.sampling import draw


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Accept token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm((p -
    q)+).

    After a fully accepted chain the last token is drawn from p. All depths are tested at once.
    """
    if u_BU is None:
        return match(proposal, p_BMV, None)
    depth = proposal.tree.depth
    u_BU = u_BU.to(p_BMV.device)
    tokens_BD = proposal.tokens_BM[:, 1 : depth + 1]
    offered_BD = tokens_BD >= 0
    x_BD1 = tokens_BD.clamp(min=0).unsqueeze(-1)
    p_x_BD = p_BMV[:, :depth].gather(2, x_BD1).squeeze(-1)
    if proposal.q_BEV is None:
        q_x_BD = torch.ones_like(p_x_BD)
    else:
        q_x_BD = proposal.q_BEV.gather(2, x_BD1).squeeze(-1)
    # u q < p rather than u < p / q: no division, and a token of target probability 0 is refused
    # even at u = 0.
    taken_BD = (u_BU[:, :depth] * q_x_BD < p_x_BD) & offered_BD
    accepted_B = taken_BD.long().cumprod(1).sum(1)
    rows_B = torch.arange(len(accepted_B), device=accepted_B.device)
    law_BV = p_BMV[rows_B, accepted_B]
    last_B = accepted_B.clamp(max=depth - 1)
    open_B = (accepted_B < depth) & offered_BD[rows_B, last_B]
    if proposal.q_BEV is None:
        q_BV = torch.zeros_like(law_BV).scatter_(1, x_BD1[rows_B, last_B], 1.0)
    else:
        q_BV = proposal.q_BEV[rows_B, last_B]
    law_BV = torch.where(open_B.unsqueeze(1), residual(law_BV, q_BV), law_BV)
    steps_D = torch.arange(depth, device=accepted_B.device)
    nodes_BD = torch.where(steps_D < accepted_B.unsqueeze(1), steps_D + 1, 0)
    return finish(proposal, list(nodes_BD.unbind(1)), accepted_B, open_B, draw(law_BV, u_BU[:, depth]))


SPECULATIVE = Verifier(
    name="speculative",
    lossless=True,
    chains_only=True,
    drawings=frozenset({"without_replacement", "deterministic"}),
    uniforms=lambda tree: tree.depth + 1,
    run=verify,
)
