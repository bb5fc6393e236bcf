"""Rules for chains, which test all depths at once.

* `speculative`: each token by itself (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
  2302.01318, algorithm 2).
* `block`: all tokens jointly; no rule for one path accepts more (Sun et al. 2024, arXiv 2403.10444).

Legend: B rows, D depth, M nodes with the root, V vocabulary, U = D + 1 uniforms per row: one per depth, one for the
last token.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from decode.propose.protocol import Proposal
from decode.verify.exact import exact
from decode.verify.tree_walk import Verdict, finish, hit_by_target, known_empty, residual, walk
from draftsmith_core.sampling import draw


def speculative(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm((p - q)+).

    After a fully accepted chain the last token is drawn from p.
    """
    depth = proposal.tree.depth
    if depth == 0:
        return exact(proposal, p_BMV, u_BU[:, -1:])
    u_BU = u_BU.to(p_BMV.device)
    rows_B1 = torch.arange(len(p_BMV), device=p_BMV.device).unsqueeze(1)
    nodes_BD, above_BD, groups_BD, tokens_BD = _chain(proposal, len(p_BMV))
    offered_BD, x_BD = tokens_BD >= 0, tokens_BD.clamp(min=0)
    p_x_BD = p_BMV[rows_B1, above_BD, x_BD]
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


def block(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Accept the longest prefix that passes its own test; what comes before need not have passed.

    w(0) = 1 and w(i) = min(1, w(i - 1) p(x)/q(x)) for the i-th token x. Prefix i passes with the
    `keep_probability` of w(i), and the chain as a whole with probability w. After it the token is drawn from
    norm((w p - q)+), and at the end of the chain from p. A deterministic chain has one-hot q, for which the
    rule is `exact`.
    """
    depth = proposal.tree.depth
    if proposal.q_BEV is None or depth == 0:
        return walk(proposal, p_BMV, u_BU, hit_by_target, per_node=1)
    u_BU = u_BU.to(p_BMV.device)
    rows_B1 = torch.arange(len(p_BMV), device=p_BMV.device).unsqueeze(1)
    nodes_BD, above_BD, groups_BD, tokens_BD = _chain(proposal, len(p_BMV))
    offered_BD, x_BD = (tokens_BD >= 0).cumprod(1) > 0, tokens_BD.clamp(min=0)
    p_BDV, q_BDV = p_BMV[rows_B1, above_BD], proposal.q_BEV[rows_B1, groups_BD]
    p_x_BD1, q_x_BD1 = p_BDV.gather(2, x_BD.unsqueeze(2)), q_BDV.gather(2, x_BD.unsqueeze(2))
    w_B1 = torch.ones_like(p_x_BD1[:, 0])
    weights = [w_B1]
    for i in range(depth):
        # Beyond the end of the chain w stays.
        w_B1 = torch.where(offered_BD[:, i : i + 1], weight(w_B1, p_x_BD1[:, i], q_x_BD1[:, i]), w_B1)
        weights.append(w_B1)
    w_BD1 = torch.stack(weights[:-1], dim=1)
    excess_BDV = (w_BD1 * p_BDV - q_BDV).clamp_(min=0)
    mass_BD1 = excess_BDV.sum(2, keepdim=True)
    # Entry i is the test of the prefix of i + 1 tokens: `keep_probability` where the chain goes on behind it, else w.
    keep_BD = torch.cat([keep_probability(w_BD1, mass_BD1)[:, 1:, 0], w_B1], dim=1)
    ends_BD = pad(~offered_BD[:, 1:], (0, 1), value=True)
    keep_BD = torch.where(ends_BD, torch.cat(weights[1:], dim=1), keep_BD)
    passed_BD = (u_BU[:, :depth] < keep_BD) & offered_BD
    steps_D = torch.arange(1, depth + 1, device=p_BMV.device)
    accepted_B = torch.where(passed_BD, steps_D, 0).max(1).values
    nodes_BD = nodes_BD.masked_fill(steps_D > accepted_B.unsqueeze(1), 0)
    end_BV = p_BMV[rows_B1, nodes_BD.max(1, keepdim=True).values].squeeze(1)
    last_B1 = accepted_B.clamp(max=depth - 1).unsqueeze(1)
    open_B = (accepted_B < depth) & offered_BD.gather(1, last_B1).squeeze(1)
    mass_B1 = mass_BD1[rows_B1, last_B1].squeeze(1)
    left_BV = excess_BDV[rows_B1, last_B1].squeeze(1)
    # As in `residual`: where rounding leaves no mass, the token is drawn from p.
    end_BV = torch.where(open_B.unsqueeze(1) & (mass_B1 > 0), left_BV, end_BV)
    return finish(proposal, list(nodes_BD.unbind(1)), accepted_B, open_B, draw(end_BV, u_BU[:, -1]))


def weight(w: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, w p(x)/q(x)): the weight of a path that ends in token x, from the weight w of the path without x."""
    return (w * p_x / q_x.clamp(min=torch.finfo(q_x.dtype).tiny)).clamp_(max=1)


def keep_probability(w: Tensor, mass: Tensor) -> Tensor:
    """mass / (mass + 1 - w), where mass is that of (w p - q)+: the weight of a node once a child of it is refused."""
    lack = 1 - w
    return torch.where(lack > 0, mass / torch.where(lack > 0, mass + lack, 1.0), 1.0)


def _chain(proposal: Proposal, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per depth `[B, D]`: the chain's nodes (M indices, 0 beyond its end), the nodes above them, the groups that their
    tokens were drawn from, and the tokens (-1 for none).
    """
    tree = proposal.tree
    device = tree.children_RMK.device
    if tree.rows == 1:
        nodes_BD = torch.arange(1, tree.depth + 1, device=device).expand(rows, -1)
    else:
        at_B = torch.zeros(rows, dtype=torch.long, device=device)
        below_BM = tree.children_RMK[:, :, 0].expand(rows, -1)
        nodes = []
        for depth in range(tree.depth):
            below_B = below_BM.gather(1, at_B.unsqueeze(1)).squeeze(1)
            # Index 0, the root, is no node's child: it marks where a chain has ended.
            at_B = below_B if depth == 0 else below_B.masked_fill(at_B == 0, 0)
            nodes.append(at_B)
        nodes_BD = torch.stack(nodes, dim=1)
    above_BD = pad(nodes_BD[:, :-1], (1, 0))  # above the first node is the root, index 0
    return (
        nodes_BD,
        above_BD,
        tree.groups_RM.expand(rows, -1).gather(1, above_BD),
        proposal.tokens_BM.gather(1, nodes_BD),
    )
