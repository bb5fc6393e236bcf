"""Rules that look at the target's distributions alone.

* `exact`: draw from the target, and accept the draft's token if it is the same. Lossless for every
  tree, also for a pruned one; for deterministic drafts no rule accepts more (Hu et al., ICLR 2025,
  arXiv 2502.18779).
* `typical`: LOSSY, take what the target finds plausible (Cai et al. 2024, Medusa, arXiv
  2401.10774).

Legend: B rows, D depth, K siblings, M nodes with the root, N drafted nodes, V vocabulary, U
uniforms per row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decode.kernel_sampling import draw, largest
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.verify.tree_walk import (
    Descent,
    Verdict,
    Walk,
    at_node,
    first,
    known_empty,
    row_numbers,
)

EPSILON = 0.09  # no token of at least this probability is refused
# At high entropy the bound falls to delta exp(-entropy); delta = sqrt(epsilon), as in the paper.
DELTA = 0.3


def exact(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Draw y from the target's distribution at each node reached; go on at the child that carries
    y; emit the first y that no child carries.

    Lossless whatever was drafted, because the target alone draws. Every lossless rule equals this
    if p is one-hot (`u_BU` is None).
    """
    widths = proposal.tree.widths
    path = Descent(proposal, p_BMV)
    best_BM = largest(p_BMV, 1).indices[..., 0] if u_BU is None else None
    last_B = path.at_B
    for depth in range(len(widths) + 1):
        if known_empty(path.walking_B):
            break
        if best_BM is not None:
            y_B = best_BM[path.rows_B, path.at_B]
        else:
            assert u_BU is not None
            y_B = draw(at_node(p_BMV, path.at_B), u_BU[:, depth])
        last_B = torch.where(path.walking_B, y_B, last_B)
        if depth < len(widths):
            offer_BK = path.offer(widths[depth])
            # At most one sibling carries y when siblings differ; of repeated tokens the first in
            # rank order is taken.
            path.accept(first(offer_BK == y_B.unsqueeze(1)))
    return path.finish(last_B)


def follow(proposal: Proposal, best_BM: list[list[int]]) -> list[Walk]:
    """Follow the target's own tokens at all nodes from the root down: what every lossless rule
    accepts greedily.
    """
    tree = proposal.tree
    children_RMK, depths_RN = tree.on_host
    walks = []
    for row, tokens_M in enumerate(proposal.tokens_BM.tolist()):
        best_M = best_BM[row]
        of = row if tree.rows > 1 else 0
        children_MK = children_RMK[of]
        path = []
        at = 0
        while True:
            offered = [kid for kid in children_MK[at] if kid and tokens_M[kid] >= 0]
            hits = [kid for kid in offered if tokens_M[kid] == best_M[at]]
            if not hits:
                break
            at = hits[0]
            path.append(at)
        depths = zip(depths_RN[of], tokens_M[1:], strict=True)
        drafted = [depth for depth, token in depths if token >= 0]
        emitted = [tokens_M[node] for node in path] + [best_M[at]]
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
    tree = proposal.tree
    tokens_BN = proposal.tokens_BM[:, 1:]
    rows_B1 = row_numbers(p_BMV).unsqueeze(1)
    above_BN = (tree.parents_RN + 1).expand(len(p_BMV), -1)
    entropy_BM = torch.special.entr(p_BMV).sum(2)
    floor_BM = (DELTA * torch.exp(-entropy_BM)).clamp_(max=EPSILON)
    p_x_BN = p_BMV[rows_B1, above_BN, tokens_BN.clamp(min=0)]
    fine_BN = (p_x_BN > floor_BM.gather(1, above_BN)) & (tokens_BN >= 0)
    sees_BNN = tree.sees_RMM[:, 1:, 1:]
    refused_BNN = sees_BNN & ~fine_BN.unsqueeze(1)
    logp_BN = p_x_BN.clamp(min=torch.finfo(p_x_BN.dtype).tiny).log()
    path_p_BN = (sees_BNN * logp_BN.unsqueeze(1)).sum(2).exp()
    # Depth counts first: a path's probability adds at most 0.5 to it. Refused paths score 0, and
    # the root, which has no tokens, scores 0.75: above every refused path and below every accepted
    # one, which has depth 1 or more.
    score_BN = torch.where(refused_BNN.any(2), 0.0, tree.depths_RN + path_p_BN / 2)
    best_B = pad(score_BN, (1, 0), value=0.75).max(1).indices
    path = Descent(proposal, p_BMV)
    sees_BMM = tree.sees_RMM.expand(len(p_BMV), -1, -1)
    path_BM = sees_BMM[path.rows_B, best_B]
    for width in tree.widths:
        offer_BK = path.offer(width)
        path.accept(first(path_BM.gather(1, path.kids_BK) & (offer_BK >= 0)))
    return path.finish(draw(at_node(p_BMV, best_B), u_BU[:, 0]))
