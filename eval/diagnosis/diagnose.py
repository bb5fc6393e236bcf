"""Where a draft is accepted, how sure it is, and how many candidates it needs.

Legend: N positions, V vocabulary, K candidates in the draft's order, B bins of confidence.
"""

from typing import TypedDict

import torch
from torch import Tensor

from draftsmith.core.sampling import Sampling, acceptance
from draftsmith.eval.acceptance import Positions, refusals

# Most probable candidates per position; the rest is left out of the calibration.
CANDIDATES = 64
# Bins of confidence, each a tenth wide.
BINS = 10
# Positions per prompt at which candidates are drawn; each costs CANDIDATES passes over the
# vocabulary.
DRAWN_POSITIONS = 4
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
    # Summed over positions: the mass of p on the draft's 1, 2, ... most probable tokens.
    best: PerPrompt
    # Summed over `drawn_count` positions: the acceptance of 1, 2, ... candidates that are drawn
    # from q without replacement and tried in turn. Empty at temperature 0.
    drawn: PerPrompt
    drawn_count: list[int]


@torch.inference_mode()
def diagnosis_of(sampling: Sampling, seed: int, at: Positions) -> Diagnosis:
    """Diagnose a draft from p, q and its logits at every position of some texts."""
    # At temperature 0 q is one token, so take the draft's confidence from its logits.
    belief_NV = at.logits_NV.float().softmax(-1) if sampling.greedy else at.q_NV
    alpha_N = acceptance(at.p_NV, at.q_NV).clamp(max=1.0)
    nats_N = torch.special.entr(at.p_NV).sum(-1)
    entropy_N = (nats_N / torch.log(torch.tensor(2.0))).abs()
    count = min(CANDIDATES, at.p_NV.shape[1])
    belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
    p_NK = at.p_NV.gather(1, ids_NK)
    best_NK = p_NK.cumsum(1).double()
    # A vocabulary smaller than the candidates is used up, and more of them change nothing.
    last_N1 = best_NK[:, -1:]
    more_NK = last_N1.expand(-1, CANDIDATES - count)
    best_NK = torch.cat([best_NK, more_NK], dim=1).clamp(max=1.0)
    confidence_NB3 = _by_confidence(belief_NK, p_NK, at.q_NV.gather(1, ids_NK))
    most = 0 if sampling.greedy else DRAWN_POSITIONS
    drawn = []
    if most:
        counts = [most] * len(at.texts)
        chosen, u_NK = at.drawn(counts, (CANDIDATES,), "diagnosis", seed)
        drawn_NK = drawn_acceptance(at.p_NV[chosen], at.q_NV[chosen], u_NK.to(at.p_NV.device))
        drawn = at.sums(drawn_NK, chosen)
    return Diagnosis(
        alpha=[part.tolist() for part in alpha_N.split(at.lengths)],
        entropy=[part.tolist() for part in entropy_N.split(at.lengths)],
        confidence=at.sums(confidence_NB3),
        best=at.sums(best_NK),
        drawn=drawn,
        drawn_count=[min(most, length) for length in at.lengths],
    )


def _by_confidence(belief_NK: Tensor, p_NK: Tensor, q_NK: Tensor) -> Tensor:
    """By bin of confidence: the mass drafted, that mass times its confidence, and times p."""
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, q_NK * p_NK], dim=-1).double()
    sums_NB3 = values_NK3.new_zeros(len(belief_NK), BINS, 3)
    return sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)


def drawn_acceptance(p_NV: Tensor, q_NV: Tensor, u_NK: Tensor) -> Tensor:
    """Return the chance `[N, K]` that one of the first k candidates is accepted.

    The uniforms `u` draw them from q without replacement. The mean over draws is exact.
    """
    refused_N = torch.ones(len(p_NV), dtype=torch.double, device=p_NV.device)
    chances = []
    for refusal in refusals(p_NV, q_NV, u_NK):
        refused_N = refused_N * (1 - refusal.accepted_N1[:, 0].double())
        chances.append(1 - refused_N)
    return torch.stack(chances, dim=1)
