"""Rules for chains, all depths at once.

* `speculative`: speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et
  al. 2023, arXiv 2302.01318, algorithm 2).
* `block`: block verification, than which no rule for one path accepts more (Sun et al. 2024, arXiv
  2403.10444).

Legend: B rows, D depth, M nodes with the root, V vocabulary, U uniforms per row. Node d is at depth
d, below node d - 1.
"""

import torch
from torch import Tensor

from draftsmith.decode.kernel_sampling import draw
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.verify.exact import exact
from draftsmith.decode.verify.tree_walk import (
    Verdict,
    at_node,
    finish,
    hit_by_target,
    known_empty,
    refuse,
    row_numbers,
    tiny,
    walk,
)


class _Chain:
    """A drafted chain, with the probabilities of its tokens `[B, D]`. q is one-hot for
    deterministic tokens.
    """

    def __init__(self, proposal: Proposal, p_BMV: Tensor) -> None:
        self.proposal = proposal
        self.p_BMV = p_BMV
        self.depth = depth = proposal.tree.depth
        tokens_BD = proposal.tokens_BM[:, 1 : depth + 1]
        self.offered_BD = tokens_BD >= 0
        self.x_BD = tokens_BD.clamp(min=0)
        self.groups_BD = proposal.tree.groups_RM[:, :depth].expand(len(p_BMV), -1)
        rows_B1 = row_numbers(p_BMV).unsqueeze(1)
        self.p_x_BD = p_BMV[rows_B1, torch.arange(depth, device=p_BMV.device), self.x_BD]
        self.q_x_BD = torch.ones_like(self.p_x_BD)
        if proposal.q_BEV is not None:
            self.q_x_BD = proposal.q_BEV[rows_B1, self.groups_BD, self.x_BD]

    def end(self, accepted_B: Tensor, u_B: Tensor, w_B: Tensor | None = None) -> Verdict:
        """Accept this many tokens. If the next one was refused, draw from (w p - q)+, else from
        p. w: 1 by default.
        """
        last_B1 = accepted_B.clamp(max=self.depth - 1).unsqueeze(1)
        offered_B = self.offered_BD.gather(1, last_B1).squeeze(1)
        open_B = (accepted_B < self.depth) & offered_B
        left_BV = at_node(self.p_BMV, accepted_B)
        if not known_empty(open_B):
            if self.proposal.q_BEV is None:
                q_BV = torch.zeros_like(left_BV).scatter_(1, self.x_BD.gather(1, last_B1), 1.0)
            else:
                group_B = self.groups_BD.gather(1, last_B1).squeeze(1)
                q_BV = at_node(self.proposal.q_BEV, group_B)
            share_B = open_B.to(left_BV.dtype)
            if w_B is not None:
                share_B = torch.where(open_B, 1 / w_B, share_B)
            left_BV, _ = refuse(left_BV, q_BV, share_B.unsqueeze(1))
        nodes_D = torch.arange(1, self.depth + 1, device=u_B.device)
        nodes_BD = torch.where(nodes_D <= accepted_B.unsqueeze(1), nodes_D, 0)
        return finish(self.proposal, nodes_BD, accepted_B, open_B, draw(left_BV, u_B))


def speculative(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm((p -
    q)+).

    After a fully accepted chain the last token is drawn from p.
    """
    if proposal.tree.depth == 0:
        return exact(proposal, p_BMV, u_BU[:, -1:])
    u_BU = u_BU.to(p_BMV.device)
    chain = _Chain(proposal, p_BMV)
    # u q < p, not u < p / q: no division, and a token with p(x) = 0 is refused even at u = 0.
    uq_BD = u_BU[:, : chain.depth] * chain.q_x_BD
    taken_BD = (uq_BD < chain.p_x_BD) & chain.offered_BD
    accepted_B = taken_BD.long().cumprod(1).sum(1)
    return chain.end(accepted_B, u_BU[:, -1])


def block(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept the longest prefix that its uniform allows; then draw from norm((w p - q)+), or from p
    at the end of the chain.

    w = min(1, w p(x)/q(x)) is the weight of a prefix that ends in token x, from the weight of the
    prefix without x; the root has w = 1. The whole chain is kept with probability w, a shorter
    prefix with s / (s + 1 - w), where s is the mass of (w p - q)+. For deterministic tokens this
    equals `exact` and runs as that.
    """
    if proposal.q_BEV is None or proposal.tree.depth == 0:
        return walk(proposal, p_BMV, u_BU, hit_by_target, per_node=1)
    u_BU = u_BU.to(p_BMV.device)
    chain = _Chain(proposal, p_BMV)
    ratio_BD = chain.p_x_BD / chain.q_x_BD.clamp(min=tiny(p_BMV))
    weights_B = [torch.ones_like(ratio_BD[:, 0])]
    for ratio_B in ratio_BD.unbind(1):
        weight_B = weights_B[-1] * ratio_B
        weights_B.append(weight_B.clamp(max=1))
    w_BM = torch.stack(weights_B, dim=1)
    keep_B = [weights_B[-1]]
    for node in range(chain.depth - 1, 0, -1):
        q_BV = at_node(proposal.q_BEV, chain.groups_BD[:, node])
        wp_BV = p_BMV[:, node] * w_BM[:, node, None]
        left_BV = (wp_BV - q_BV).clamp_(min=0)
        mass_B = left_BV.sum(1)
        shorter_B = keep_probability(weights_B[node], mass_B)
        keep_B.append(torch.where(chain.offered_BD[:, node], shorter_B, weights_B[node]))
    keep_BD = torch.stack(keep_B[::-1], dim=1)
    taken_BD = (u_BU[:, : chain.depth] < keep_BD) & chain.offered_BD
    prefixes_D = torch.arange(1, chain.depth + 1, device=u_BU.device)
    accepted_B = (prefixes_D * taken_BD).amax(1)
    w_B1 = w_BM.gather(1, accepted_B.unsqueeze(1))
    return chain.end(accepted_B, u_BU[:, -1], w_B1.squeeze(1))


def keep_probability(w_B: Tensor, mass_B: Tensor) -> Tensor:
    """mass / (mass + 1 - w), where mass is that of (w p - q)+: the chance that a prefix of weight w
    is kept once the next token is refused.
    """
    lack_B = 1 - w_B
    return torch.where(lack_B > 0, mass_B / torch.where(lack_B > 0, mass_B + lack_B, 1.0), 1.0)
