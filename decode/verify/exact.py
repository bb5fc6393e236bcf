"""Rules that look at the target's distributions alone.

* `exact`: draw from the target, and accept the draft's token if it is the same. Lossless for every
  tree, also for a
  pruned one; for deterministic drafts no rule accepts more (Hu et al., ICLR 2025, arXiv
  2502.18779).
* `typical`: LOSSY, take what the target finds plausible (Cai et al. 2024, Medusa, arXiv
  2401.10774).

Legend: B rows, D depth, K siblings, M nodes with the root, N drafted nodes, V vocabulary, U
uniforms per row.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.tree_walk import Verdict, Walk, finish, finish_at, first, known_empty
from draftsmith_core.sampling import draw

EPSILON = 0.09  # no token of at least this probability is refused
# at high entropy the bound falls to delta exp(-entropy); delta = sqrt(epsilon), as in the paper
DELTA = 0.3


def exact(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Draw y from the target's distribution at each node reached; go on at the child that carries
    y; emit the first y that no child carries.

    Lossless whatever was drafted, because the target alone draws. Every lossless rule equals this
    if p is one-hot (`u_BU` is None).
    """
    tree, tokens_BM = proposal.tree, proposal.tokens_BM
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    children_BMK = tree.children_RMK.expand(len(rows_B), -1, -1)
    # max is several times faster than argmax on a CPU, and a one-hot distribution has no ties.
    best_BM = p_BMV.max(-1).indices if u_BU is None else None
    at_B = torch.zeros_like(rows_B)
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    open_B = torch.zeros_like(walking_B)
    accepted_B = torch.zeros_like(at_B)
    last_B = at_B
    nodes: list[Tensor] = []
    for depth in range(tree.depth + 1):
        if known_empty(walking_B):
            nodes += [torch.zeros_like(at_B)] * (tree.depth - depth)
            break
        if best_BM is not None:
            y_B = best_BM[rows_B, at_B]
        else:
            assert u_BU is not None
            y_B = draw(p_BMV[rows_B, at_B], u_BU[:, depth])
        last_B = torch.where(walking_B, y_B, last_B)
        if depth == tree.depth:
            break
        kids_BK = children_BMK[rows_B, at_B]
        offer_BK = tokens_BM.gather(1, kids_BK)
        # At most one sibling carries y when siblings differ; of repeated tokens the first in rank
        # order is taken.
        hit_BK = offer_BK == y_B.unsqueeze(1)
        next_B = kids_BK.gather(1, first(hit_BK).clamp(min=0).unsqueeze(1)).squeeze(1)
        next_B = torch.where(hit_BK.any(1) & walking_B, next_B, 0)
        open_B = open_B | (walking_B & (next_B == 0) & (offer_BK >= 0).any(1))
        walking_B = next_B > 0
        accepted_B = accepted_B + walking_B
        at_B = torch.where(walking_B, next_B, at_B)
        nodes.append(next_B)
    return finish(proposal, nodes, accepted_B, open_B, last_B)


def follow(proposal: Proposal, best_BM: list[list[int]]) -> list[Walk]:
    """Follow the target's own tokens at all nodes from the root down: what every lossless rule
    accepts greedily.
    """
    tree = proposal.tree
    children_RMK, depths_RN = tree.on_host
    walks: list[Walk] = []
    for row, (best_M, tokens_M) in enumerate(
        zip(best_BM, proposal.tokens_BM.tolist(), strict=True)
    ):
        of = row if tree.rows > 1 else 0
        children_MK, depths_N = children_RMK[of], depths_RN[of]
        path: list[int] = []
        at = 0
        while True:
            offered = (
                [kid for kid in children_MK[at] if kid and tokens_M[kid] >= 0] if tree.depth else []
            )
            at_next = next((kid for kid in offered if tokens_M[kid] == best_M[at]), 0)
            if not at_next:
                break
            at = at_next
            path.append(at)
        drafted = [depth for depth, token in zip(depths_N, tokens_M[1:], strict=True) if token >= 0]
        emitted = [*(tokens_M[node] for node in path), best_M[at]]
        walks.append(Walk(path, emitted, bool(offered), len(drafted), max(drafted, default=0)))
    return walks


def typical(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Child x is plausible when p(x) > min(epsilon, delta exp(-H(p))). The longest path of
    plausible tokens is accepted, the one most probable under the target among equals, and the next
    token is drawn from p at its end.

    At temperature 0 p is one-hot, and only the most probable token is plausible: plain token
    equality.
    """
    if proposal.tree.depth == 0:
        return exact(proposal, p_BMV, u_BU)
    tree, tokens_BM = proposal.tree, proposal.tokens_BM
    rows = len(tokens_BM)
    rows_B1 = torch.arange(rows, device=p_BMV.device).unsqueeze(1)
    above_BN = (tree.parents_RN + 1).expand(rows, -1)
    floor_BM = (DELTA * torch.exp(-torch.special.entr(p_BMV).sum(2))).clamp_(max=EPSILON)
    p_x_BN = p_BMV[rows_B1, above_BN, tokens_BM[:, 1:].clamp(min=0)]
    fine_BN = (p_x_BN > floor_BM.gather(1, above_BN)) & (tokens_BM[:, 1:] >= 0)
    sees_BNN = tree.sees_RMM[:, 1:, 1:]
    fine_path_BN = ~(sees_BNN & ~fine_BN.unsqueeze(1)).any(2)
    logp_BN = (sees_BNN * p_x_BN.clamp(min=torch.finfo(p_x_BN.dtype).tiny).log().unsqueeze(1)).sum(
        2
    )
    # Depth counts first: a path's probability adds at most 0.5 to it. Refused paths score 0, and
    # the root, which has no tokens, scores 0.75: above every refused path and below every accepted
    # one, which has depth 1 or more.
    score_BN = torch.where(fine_path_BN, tree.depths_RN + logp_BN.exp() / 2, 0.0)
    best = torch.nn.functional.pad(score_BN, (1, 0), value=0.75).max(1)
    end_BV = p_BMV[rows_B1, best.indices.unsqueeze(1)].squeeze(1)
    return finish_at(proposal, best.indices, draw(end_BV, u_BU[:, 0]))
