"""Why a draft is accepted or not, from the p and q of alpha: where, how sure it is, with how many candidates.

Legend: N positions, V vocabulary, K candidates in the draft's order, P prompts, L tokens of a continuation.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from decode.verify.mcsd import without
from decode.verify.tree_walk import residual
from draftsmith_core.sampling import Sampling, acceptance, draw, generator, row_seed, uniforms
from eval.acceptance import Continuation
from eval.headroom import spread

# Candidates looked at per position; what a draft holds for less probable is left out of its calibration.
CANDIDATES = 64
# Bins of confidence, each a tenth wide.
BINS = 10
# Positions of a prompt at which candidates are drawn, each at the cost of CANDIDATES passes over the vocabulary.
DRAWN_POSITIONS = 4
# Of the first prompts of a set, so many tokens are kept for the token viewer, with the draft's first guesses.
VIEWED_PROMPTS, VIEWED_TOKENS, GUESSES = 1, 96, 3


class ViewedToken(TypedDict):
    """One token of the text: its p and q, and the draft's first guesses with theirs."""

    p: float
    q: float
    guesses: list[tuple[int, float, float]]


class Diagnosis(TypedDict):
    """Of one draft on one set at one temperature; every list is by prompt.

    `alpha`, `entropy`: by position, sum_x min(p, q) and the entropy of p in bits. `confidence`: by bin, what the draft
    drew from it (mass), the confidence of that, and what of it was accepted. `best`: summed over positions, the mass
    of p on the draft's 1, 2, ... most probable tokens. `drawn`: summed over `drawn_count` positions, the acceptance of
    1, 2, ... candidates drawn from q without replacement and tried in turn; empty at temperature 0.
    """

    alpha: list[list[float]]
    entropy: list[list[float]]
    confidence: list[list[list[float]]]
    best: list[list[float]]
    drawn: list[list[float]]
    drawn_count: list[int]
    viewed: list[list[ViewedToken]]


class Diagnoser:
    """Takes a diagnosis while p and q pass by, some positions at a time."""

    def __init__(self, texts: Sequence[Continuation], sampling: Sampling, seed: int) -> None:
        self.texts, self.sampling = texts, sampling
        lengths = [len(text.output_ids) for text in texts]
        self.found = Diagnosis(
            alpha=[[0.0] * length for length in lengths],
            entropy=[[0.0] * length for length in lengths],
            confidence=[[[0.0] * 3 for _ in range(BINS)] for _ in texts],
            best=[[0.0] * CANDIDATES for _ in texts],
            drawn=[[0.0] * CANDIDATES for _ in texts] if not sampling.greedy else [],
            drawn_count=[0] * len(texts),
            viewed=[[] for _ in texts[:VIEWED_PROMPTS]],
        )
        self.uniforms = {}
        for row, text in enumerate(texts if not sampling.greedy else ()):
            places = spread(lengths[row], DRAWN_POSITIONS)
            stream = uniforms([generator(row_seed(seed, f"{text.id}/diagnosis"))], len(places) * CANDIDATES)
            self.uniforms[row] = dict(zip(places, stream.view(len(places), CANDIDATES), strict=True))

    @torch.inference_mode()
    def add(self, places: Sequence[tuple[int, int]], p_NV: Tensor, q_NV: Tensor, logits_NV: Tensor) -> None:
        """Positions as (row, place in its continuation), what is sampled from there, and the draft's logits.

        Positions of a row must come in order.
        """
        # At temperature 0 q is one token; how sure the draft is of it is in its logits.
        belief_NV = logits_NV.float().softmax(-1) if self.sampling.greedy else q_NV
        count = min(CANDIDATES, p_NV.shape[1])
        belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
        p_NK, q_NK = p_NV.gather(1, ids_NK), q_NV.gather(1, ids_NK)
        alpha_N = acceptance(p_NV, q_NV).clamp(max=1.0).tolist()
        entropy_N = (torch.special.entr(p_NV).sum(-1) / torch.log(torch.tensor(2.0))).tolist()
        best_NK = p_NK.cumsum(1).double()
        # A vocabulary smaller than the candidates is used up, and more of them change nothing.
        best_NK = torch.cat([best_NK, best_NK[:, -1:].expand(-1, CANDIDATES - count)], dim=1).clamp(max=1.0)
        bins_NB3 = _bins(belief_NK, q_NK, p_NK).tolist()
        for n, (row, place) in enumerate(places):
            self.found["alpha"][row][place] = alpha_N[n]
            self.found["entropy"][row][place] = abs(entropy_N[n])
            best = self.found["best"][row]
            for k, value in enumerate(best_NK[n].tolist()):
                best[k] += value
            for own, more in zip(self.found["confidence"][row], bins_NB3[n], strict=True):
                for index in range(3):
                    own[index] += more[index]
            if row < VIEWED_PROMPTS and place < VIEWED_TOKENS:
                self._view(row, self.texts[row].output_ids[place], p_NV[n], belief_NV[n], ids_NK[n])
        here = [(n, *at) for n, at in enumerate(places) if at[1] in self.uniforms.get(at[0], ())]
        if here:
            rows = torch.tensor([n for n, _, _ in here], device=p_NV.device)
            u_NK = torch.stack([self.uniforms[row][place] for _, row, place in here]).to(p_NV.device)
            drawn_NK = drawn_acceptance(p_NV[rows], q_NV[rows], u_NK).tolist()
            for (_, row, _), values in zip(here, drawn_NK, strict=True):
                self.found["drawn_count"][row] += 1
                for k, value in enumerate(values):
                    self.found["drawn"][row][k] += value

    def _view(self, row: int, token: int, p_V: Tensor, q_V: Tensor, ids_K: Tensor) -> None:
        guesses = [(int(x), round(float(q_V[x]), 4), round(float(p_V[x]), 4)) for x in ids_K[:GUESSES]]
        seen = ViewedToken(p=round(float(p_V[token]), 4), q=round(float(q_V[token]), 4), guesses=guesses)
        self.found["viewed"][row].append(seen)


def _bins(belief_NK: Tensor, q_NK: Tensor, p_NK: Tensor) -> Tensor:
    """`[N, BINS, 3]`: by confidence, the mass drafted, that mass times its confidence, and the mass accepted."""
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, torch.minimum(p_NK, q_NK)], dim=-1).double()
    sums_NB3 = torch.zeros(len(belief_NK), BINS, 3, dtype=torch.double, device=belief_NK.device)
    return sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)


def drawn_acceptance(p_NV: Tensor, q_NV: Tensor, u_NK: Tensor) -> Tensor:
    """`[N, K]`: the chance that one of the first k candidates is accepted, drawn from q without replacement and tried
    in turn (Yang et al. 2024, algorithm 1), given those that the uniforms `u` draw; its mean over draws is exact.
    """
    refused_N = torch.ones(len(p_NV), dtype=torch.double, device=p_NV.device)
    chances = []
    for k in range(u_NK.shape[1]):
        drawn_N1 = draw(q_NV, u_NK[:, k]).clamp(min=0).unsqueeze(1)
        p_N1, q_N1 = p_NV.gather(1, drawn_N1), q_NV.gather(1, drawn_N1)
        left_N1 = q_N1 > 0  # false once the support of q is used up: nothing is drawn, nothing refused
        accepted_N1 = (p_N1 / q_N1.clamp(min=torch.finfo(q_N1.dtype).tiny)).clamp(max=1) * left_N1
        refused_N = refused_N * (1 - accepted_N1[:, 0].double())
        chances.append(1 - refused_N)
        p_NV = torch.where(left_N1, residual(p_NV, q_NV), p_NV)
        q_NV = without(q_NV, drawn_N1)
    return torch.stack(chances, dim=1)
