"""Typical acceptance (Cai et al. 2024, Medusa, arXiv 2401.10774). Lossy: the output is not a sample of the target;
tokens that the target finds plausible enough are taken as they were drafted.

Legend: B rows, M nodes with the root, N drafted nodes, V vocabulary, U uniforms per row.
"""

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.exact import verify as exact
from decode.verify.tree_walk import Verdict, finish_at
from draftsmith_core.sampling import draw

EPSILON = 0.09  # no token of at least this probability is refused
DELTA = 0.3  # at high entropy the bound falls to delta exp(-entropy); delta = sqrt(epsilon), as in the paper


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Child x is plausible when p(x) > min(epsilon, delta exp(-H(p))). The longest path of plausible tokens is
    accepted, the one most probable under the target among equals, and the next token is drawn from p at its end.

    At temperature 0 p is one-hot, and only the most probable token is plausible: plain token equality.
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
    logp_BN = (sees_BNN * p_x_BN.clamp(min=torch.finfo(p_x_BN.dtype).tiny).log().unsqueeze(1)).sum(2)
    # Depth counts first: a path's probability adds at most 0.5 to it. Refused paths score 0, and the root, which has no
    # tokens, scores 0.75: above every refused path and below every accepted one, which has depth 1 or more.
    score_BN = torch.where(fine_path_BN, tree.depths_RN + logp_BN.exp() / 2, 0.0)
    best = torch.nn.functional.pad(score_BN, (1, 0), value=0.75).max(1)
    end_BV = p_BMV[rows_B1, best.indices.unsqueeze(1)].squeeze(1)
    return finish_at(proposal, best.indices, draw(end_BV, u_BU[:, 0]))
