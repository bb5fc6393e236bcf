"""Why a draft is accepted or not, from the p and q of alpha: where, how sure it is, with how many
candidates, and how often the best verifier would accept one of them.

Headroom is taken at the root of a tree: the bound of `decode.transport_bound` (Hu et al., ICLR
2025, arXiv 2502.18779) over what one simulated root step accepts at the same positions, so that
their ratio is about the verifier alone.

Legend: N positions, V vocabulary, K candidates in the draft's order, T trials, M = K + 1 nodes with
the root, U uniforms per trial, P prompts, L tokens of a continuation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from decode import VERIFIERS
from decode.propose.protocol import Proposal
from decode.propose.static_tree import draw_children, most_probable
from decode.transport_bound import optimal_acceptance
from decode.tree import Drawing, Tree
from decode.tree_batch import TreeBatch
from draftsmith_core.sampling import Sampling, acceptance, generator, row_seed, uniforms
from eval.acceptance import Continuation, Positions, refusals
from eval.method import Method

# Most positions per prompt. The bound costs far more than alpha.
PER_PROMPT = 16
# Most positions x vocabulary per set of prompts and draft, if candidates are drawn without
# replacement: then the bound is an integral that takes a few seconds per position and 100,000
# tokens.
MAX_INTEGRAL = 2**20
# Simulated root steps per position: enough that the variation among prompts dominates their noise.
TRIALS = 16
# Elements of [N, V] in double precision worked on at once (32 MiB).
MAX_ELEMENTS = 2**22
# Most probable candidates per position; the rest is left out of the calibration.
CANDIDATES = 64
# Bins of confidence, each a tenth wide.
BINS = 10
# Positions per prompt at which candidates are drawn; each costs CANDIDATES passes over the
# vocabulary.
DRAWN_POSITIONS = 4


class RootMeasurement(TypedDict):
    """Per prompt, summed over `count` positions: the bound, and the share of trials that accepted a
    candidate.
    """

    bound: list[float]
    reached: list[float]
    count: list[int]


@dataclass(frozen=True)
class RootStep:
    """A decoding method at the root: K candidates, how they are drawn, and the rule that verifies
    them.
    """

    candidates: int
    drawing: Drawing
    verifier: str

    @staticmethod
    def of(method: Method) -> "RootStep | None":
        """The root step of a method; None if it has no bound (lossy rules, trees that grow)."""
        if not method.lossless or not isinstance(method.shape, Tree):
            return None
        return RootStep(
            method.shape.widths[0], VERIFIERS[method.verifier].drawings[0], method.verifier
        )

    @property
    def name(self) -> str:
        """A name, unique among the root steps of a draft."""
        return f"{self.verifier}/{self.candidates}"

    @property
    def tree(self) -> Tree:
        return Tree((-1,) * self.candidates)

    @property
    def uniforms(self) -> int:
        """Random numbers per trial: one per candidate, and what the rule takes."""
        return self.candidates + VERIFIERS[self.verifier].uniforms(
            TreeBatch.build(self.tree, torch.device("cpu"))
        )


def positions_per_prompt(step: RootStep, prompts: int, vocabulary: int) -> list[int]:
    """Number of positions to look at, for each prompt."""
    slow = step.candidates > 1 and step.drawing == "without_replacement"
    total = min(
        PER_PROMPT * prompts, max(prompts // 8, MAX_INTEGRAL // vocabulary) if slow else 2**62
    )
    return [total // prompts + (index < total % prompts) for index in range(prompts)]


def spread(length: int, count: int) -> list[int]:
    """`count` indices below `length`, or all of them, evenly spread."""
    count = min(count, length)
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def drawn_at(
    rows: Sequence[Continuation],
    counts: Sequence[int],
    shape: tuple[int, ...],
    what: str,
    seed: int,
) -> dict[tuple[int, int], Tensor]:
    """By (row, place): uniforms of a shape, at `counts[row]` places spread over each answer.

    They come from a stream of the row's own, the same for every draft.
    """
    drawn: dict[tuple[int, int], Tensor] = {}
    for b, row in enumerate(rows):
        places = spread(len(row.output_ids), counts[b])
        stream = uniforms(
            [generator(row_seed(seed, f"{row.id}/{what}"))], len(places) * math.prod(shape)
        )
        drawn |= zip(
            [(b, place) for place in places], stream.view(len(places), *shape), strict=True
        )
    return drawn


def root_acceptance(
    step: RootStep, p_NV: Tensor, q_NV: Tensor, u_NTU: Tensor
) -> tuple[Tensor, Tensor]:
    """The bound, and the share of T trials in which the verifier accepted a candidate; float64
    `[N]`.

    p, q: fp32 distributions of target and draft above temperature 0. u: float64 uniforms.
    """
    # All drawings draw a single candidate alike, and this one needs no integral.
    count, tree = step.candidates, TreeBatch.build(step.tree, p_NV.device)
    drawing = step.drawing if count > 1 or step.drawing == "deterministic" else "with_replacement"
    trials, size = u_NTU.shape[1], max(1, MAX_ELEMENTS // (p_NV.shape[1] * u_NTU.shape[1]))
    bounds: list[Tensor] = []
    reached: list[Tensor] = []
    for p, q, u in zip(p_NV.split(size), q_NV.split(size), u_NTU.split(size), strict=True):
        bounds.append(optimal_acceptance(p, q, count, drawing))
        p, q, u = (
            p.repeat_interleave(trials, dim=0),
            q.repeat_interleave(trials, dim=0),
            u.flatten(0, 1).to(p.device),
        )
        if step.drawing == "deterministic":
            tokens = most_probable(q.log(), count)
        else:
            tokens = draw_children(step.drawing, q.unsqueeze(1), u[:, None, :count], [count], 1)[
                :, 0
            ]
        proposal = Proposal(
            tree=tree,
            tokens_BM=torch.nn.functional.pad(tokens, (1, 0), value=-1),
            q_BEV=None if step.drawing == "deterministic" else q.unsqueeze(1),
            drawing=step.drawing,
        )
        # The distributions below a candidate decide only the token after it, which does not matter
        # here.
        verdict = VERIFIERS[step.verifier].run(
            proposal, p.unsqueeze(1).expand(-1, count + 1, -1), u[:, count:]
        )
        reached.append((verdict.accepted_B > 0).double().view(-1, trials).mean(1))
    return torch.cat(bounds), torch.cat(reached)


def root_sums(step: RootStep, counts: Sequence[int], seed: int, at: Positions) -> RootMeasurement:
    """Simulate a root step at some of the positions, `counts[number]` of every text of the
    evaluation.
    """
    size = len(at.texts)
    sums = RootMeasurement(bound=[0.0] * size, reached=[0.0] * size, count=[0] * size)
    drawn = drawn_at(
        at.texts, counts[at.start :], (TRIALS, step.uniforms), f"headroom/{step.name}", seed
    )
    if chosen := [n for n, place in enumerate(at.places) if place in drawn]:
        u_NTU = torch.stack([drawn[at.places[n]] for n in chosen])
        bound_N, reached_N = root_acceptance(step, at.p_NV[chosen], at.q_NV[chosen], u_NTU)
        for n, bound, reached in zip(chosen, bound_N.tolist(), reached_N.tolist(), strict=True):
            row = at.places[n][0]
            sums["bound"][row] += bound
            sums["reached"][row] += reached
            sums["count"][row] += 1
    return sums


class Diagnosis(TypedDict):
    """Diagnosis of one draft on one set at one temperature; every list is by prompt.

    `alpha`, `entropy`: by position, sum_x min(p, q) and the entropy of p in bits. `confidence`: by
    bin, the mass that the draft drew, and that mass times its confidence and times p, the chance
    that the target takes the token. `best`: summed over positions, the mass of p on the draft's 1,
    2, ... most probable tokens. `drawn`: summed over `drawn_count` positions, the acceptance of 1,
    2, ... candidates drawn from q without replacement and tried in turn; empty at temperature 0.
    """

    alpha: list[list[float]]
    entropy: list[list[float]]
    confidence: list[list[list[float]]]
    best: list[list[float]]
    drawn: list[list[float]]
    drawn_count: list[int]


@torch.inference_mode()
def diagnosis_of(sampling: Sampling, seed: int, at: Positions) -> Diagnosis:
    """Diagnose a draft from p, q and its logits at every position of some texts."""
    texts, places, p_NV, q_NV = at.texts, at.places, at.p_NV, at.q_NV
    # At temperature 0 q is one token, so take the draft's confidence from its logits.
    belief_NV = at.logits_NV.float().softmax(-1) if sampling.greedy else q_NV
    count = min(CANDIDATES, p_NV.shape[1])
    belief_NK, ids_NK = belief_NV.topk(count, dim=-1)
    p_NK, q_NK = p_NV.gather(1, ids_NK), q_NV.gather(1, ids_NK)
    best_NK = p_NK.cumsum(1).double()
    # A vocabulary smaller than the candidates is used up, and more of them change nothing.
    best_NK = torch.cat([best_NK, best_NK[:, -1:].expand(-1, CANDIDATES - count)], dim=1).clamp(
        max=1.0
    )
    rows, lengths = [row for row, _ in places], [len(text.output_ids) for text in texts]
    alpha_N = acceptance(p_NV, q_NV).clamp(max=1.0)
    entropy_N = (torch.special.entr(p_NV).sum(-1) / torch.log(torch.tensor(2.0))).abs()
    confidence, best = np.zeros((len(texts), BINS, 3)), np.zeros((len(texts), CANDIDATES))
    np.add.at(best, rows, best_NK.cpu().numpy())
    # By confidence, the mass drafted, and that mass times its confidence and times p.
    bin_NK = (belief_NK * BINS).long().clamp(max=BINS - 1)
    values_NK3 = torch.stack([q_NK, q_NK * belief_NK, q_NK * p_NK], dim=-1).double()
    sums_NB3 = torch.zeros(len(belief_NK), BINS, 3, dtype=torch.double, device=belief_NK.device)
    sums_NB3.scatter_add_(1, bin_NK.unsqueeze(-1).expand(-1, -1, 3), values_NK3)
    np.add.at(confidence, rows, sums_NB3.cpu().numpy())
    drawn = np.zeros((len(texts), CANDIDATES))
    counts = [0 if sampling.greedy else DRAWN_POSITIONS] * len(texts)
    u_K = drawn_at(texts, counts, (CANDIDATES,), "diagnosis", seed)
    if chosen := [n for n, place in enumerate(places) if place in u_K]:
        u_NK = torch.stack([u_K[places[n]] for n in chosen]).to(p_NV.device)
        np.add.at(
            drawn,
            [rows[n] for n in chosen],
            drawn_acceptance(p_NV[chosen], q_NV[chosen], u_NK).cpu().numpy(),
        )
    return Diagnosis(
        alpha=[part.tolist() for part in alpha_N.split(lengths)],
        entropy=[part.tolist() for part in entropy_N.split(lengths)],
        confidence=confidence.tolist(),
        best=best.tolist(),
        drawn=[] if sampling.greedy else drawn.tolist(),
        drawn_count=[sum(row == b for row, _ in u_K) for b in range(len(texts))],
    )


def drawn_acceptance(p_NV: Tensor, q_NV: Tensor, u_NK: Tensor) -> Tensor:
    """`[N, K]`: the chance that one of the first k candidates is accepted, drawn from q without
    replacement and tried in turn, given those that the uniforms `u` draw. Its mean over draws is
    exact.
    """
    refused_N = torch.ones(len(p_NV), dtype=torch.double, device=p_NV.device)
    chances = []
    for accepted_N1, _, _ in refusals(p_NV, q_NV, u_NK):
        refused_N = refused_N * (1 - accepted_N1[:, 0].double())
        chances.append(1 - refused_N)
    return torch.stack(chances, dim=1)
