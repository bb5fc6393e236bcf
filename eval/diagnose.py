"""Why a draft is accepted or not, from the p and q of alpha: where, how sure it is, with how many candidates.

Legend: N positions, V vocabulary, K candidates in the draft's order, P prompts, L tokens of a continuation.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from draftsmith_core.sampling import Sampling, acceptance
from eval.acceptance import Continuation, refusals
from eval.headroom import drawn_at

# Most probable candidates per position; the rest is left out of the calibration.
CANDIDATES = 64
# Bins of confidence, each a tenth wide.
BINS = 10
# Positions per prompt at which candidates are drawn; each costs CANDIDATES passes over the vocabulary.
DRAWN_POSITIONS = 4


class Diagnosis(TypedDict):
    """Diagnosis of one draft on one set at one temperature; every list is by prompt.

    `alpha`, `entropy`: by position, sum_x min(p, q) and the entropy of p in bits. `confidence`: by bin, the mass that
    the draft drew, and that mass times its confidence and times p, the chance that the target takes the token.
    `best`: summed over positions, the mass of p on the draft's 1, 2, ... most probable tokens. `drawn`: summed over
    `drawn_count` positions, the acceptance of 1, 2, ... candidates drawn from q without replacement and tried in turn;
    empty at temperature 0.
    """

    alpha: list[list[float]]
    entropy: list[list[float]]
    confidence: list[list[list[float]]]
    best: list[list[float]]
    drawn: list[list[float]]
    drawn_count: list[int]


@torch.inference_mode()
def diagnosis_of(
    sampling: Sampling,
    seed: int,
    texts: Sequence[Continuation],
    places: Sequence[tuple[int, int]],
    p_NV: Tensor,
    q_NV: Tensor,
    logits_NV: Tensor,
) -> Diagnosis:
    """Diagnose a draft from what is sampled from at every position of some texts, and the draft's logits.

    places: row and index in its continuation of every position, in order.
    """
    # At temperature 0 q is one token; how sure the draft is of it is in its logits.
    belief_NV = logits_NV.float().softmax(-1) if sampling.greedy else q_NV
    count = min(CANDIDATES, p_NV.shape[1])
    belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
    p_NK, q_NK = p_NV.gather(1, ids_NK), q_NV.gather(1, ids_NK)
    best_NK = p_NK.cumsum(1).double()
    # A vocabulary smaller than the candidates is used up, and more of them change nothing.
    best_NK = torch.cat([best_NK, best_NK[:, -1:].expand(-1, CANDIDATES - count)], dim=1).clamp(max=1.0)
    rows, lengths = [row for row, _ in places], [len(text.output_ids) for text in texts]
    alpha_N = acceptance(p_NV, q_NV).clamp(max=1.0)
    entropy_N = (torch.special.entr(p_NV).sum(-1) / torch.log(torch.tensor(2.0))).abs()
    confidence, best = np.zeros((len(texts), BINS, 3)), np.zeros((len(texts), CANDIDATES))
    np.add.at(best, rows, best_NK.cpu().numpy())
    np.add.at(confidence, rows, _bins(belief_NK, q_NK, p_NK).cpu().numpy())
    drawn = np.zeros((len(texts), CANDIDATES))
    counts = [0 if sampling.greedy else DRAWN_POSITIONS] * len(texts)
    u_K = drawn_at(texts, counts, (CANDIDATES,), "diagnosis", seed)
    if chosen := [n for n, place in enumerate(places) if place in u_K]:
        u_NK = torch.stack([u_K[places[n]] for n in chosen]).to(p_NV.device)
        np.add.at(drawn, [rows[n] for n in chosen], drawn_acceptance(p_NV[chosen], q_NV[chosen], u_NK).cpu().numpy())
    return Diagnosis(
        alpha=[part.tolist() for part in alpha_N.split(lengths)],
        entropy=[part.tolist() for part in entropy_N.split(lengths)],
        confidence=confidence.tolist(),
        best=best.tolist(),
        drawn=[] if sampling.greedy else drawn.tolist(),
        drawn_count=[sum(row == b for row, _ in u_K) for b in range(len(texts))],
    )


def _bins(belief_NK: Tensor, q_NK: Tensor, p_NK: Tensor) -> Tensor:
    """`[N, BINS, 3]`: by confidence, the mass drafted, and that mass times its confidence and times p."""
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, q_NK * p_NK], dim=-1).double()
    sums_NB3 = torch.zeros(len(belief_NK), BINS, 3, dtype=torch.double, device=belief_NK.device)
    return sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)


def drawn_acceptance(p_NV: Tensor, q_NV: Tensor, u_NK: Tensor) -> Tensor:
    """`[N, K]`: the chance that one of the first k candidates is accepted, drawn from q without replacement and
    tried in turn, given those that the uniforms `u` draw. Its mean over draws is exact.
    """
    refused_N = torch.ones(len(p_NV), dtype=torch.double, device=p_NV.device)
    chances = []
    for accepted_N1, _, _ in refusals(p_NV, q_NV, u_NK):
        refused_N = refused_N * (1 - accepted_N1[:, 0].double())
        chances.append(1 - refused_N)
    return torch.stack(chances, dim=1)
