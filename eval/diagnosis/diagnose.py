"""Where a draft is accepted, and how sure it is.

Legend: N positions, V vocabulary, K tokens in the draft's order, B bins of confidence.
"""

from typing import TypedDict

import torch
from torch import Tensor

from draftsmith.core.sampling import Sampling, acceptance
from draftsmith.eval.acceptance import Positions

# Most probable tokens per position whose confidence counts.
LIKELIEST = 64
# Bins of confidence, each a tenth wide.
BINS = 10
# Values of each prompt.
PerPrompt = list[list[float]]


class Diagnosis(TypedDict):
    """Diagnosis of one draft on one set at one temperature; every list is by prompt."""

    # By position: sum_x min(p, q).
    alpha: PerPrompt
    # By position: the entropy of p in bits.
    entropy: PerPrompt
    # By bin: the mass that the draft drew, that mass times its confidence, and times p.
    confidence: list[PerPrompt]


@torch.inference_mode()
def diagnosis_of(sampling: Sampling, at: Positions) -> Diagnosis:
    """Diagnose a draft from p, q and its logits at every position of some texts."""
    # At temperature 0 q is one token, so take the draft's confidence from its logits.
    belief_NV = at.logits_NV.float().softmax(-1) if sampling.greedy else at.q_NV
    alpha_N = acceptance(at.p_NV, at.q_NV).clamp(max=1.0)
    nats_N = torch.special.entr(at.p_NV).sum(-1)
    entropy_N = (nats_N / torch.log(torch.tensor(2.0))).abs()
    count = min(LIKELIEST, at.p_NV.shape[1])
    belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
    p_NK = at.p_NV.gather(1, ids_NK)
    confidence_NB3 = _by_confidence(belief_NK, p_NK, at.q_NV.gather(1, ids_NK))
    return Diagnosis(
        alpha=[part.tolist() for part in alpha_N.split(at.lengths)],
        entropy=[part.tolist() for part in entropy_N.split(at.lengths)],
        confidence=at.sums(confidence_NB3),
    )


def _by_confidence(belief_NK: Tensor, p_NK: Tensor, q_NK: Tensor) -> Tensor:
    """By bin of confidence: the mass drafted, that mass times its confidence, and times p."""
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, q_NK * p_NK], dim=-1).double()
    sums_NB3 = values_NK3.new_zeros(len(belief_NK), BINS, 3)
    return sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)
