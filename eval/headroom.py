"""Headroom at the root of a tree: how often the best verifier would accept a candidate, over how often this one does.

Both are taken at the same positions, from the same rows of p and q as alpha, so their ratio is about the verifier
alone: the bound of `decode.transport_bound` (Hu et al., ICLR 2025, arXiv 2502.18779), and one simulated root step.

Legend: N positions, T trials, K candidates, M = K + 1 nodes with the root, V vocabulary, U uniforms per trial.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from decode import VERIFIERS
from decode.propose.protocol import Proposal
from decode.propose.static_tree import draw_children, most_probable
from decode.transport_bound import optimal_acceptance
from decode.tree import Drawing, Tree
from decode.tree_batch import TreeBatch
from draftsmith_core.sampling import generator, row_seed, uniforms
from eval.acceptance import Continuation
from eval.request import Method

# Most positions per prompt. The bound costs far more than alpha.
PER_PROMPT = 16
# Most positions x vocabulary per set of prompts and draft, if candidates are drawn without replacement: then the bound
# is an integral that takes a few seconds per position and 100,000 tokens.
MAX_INTEGRAL = 2**20
# Simulated root steps per position; so many that their noise adds little to that of the prompts.
TRIALS = 16
# Elements of [N, V] in double precision worked on at once (32 MiB).
MAX_ELEMENTS = 2**22


class RootMeasurement(TypedDict):
    """Per prompt, summed over `count` positions: the bound, and the share of trials that accepted a candidate."""

    bound: list[float]
    reached: list[float]
    count: list[int]


@dataclass(frozen=True)
class RootStep:
    """A decoding method at the root: K candidates, how they are drawn, and the rule that verifies them."""

    candidates: int
    drawing: Drawing
    verifier: str

    @staticmethod
    def of(method: Method) -> "RootStep | None":
        """The root step of a method; None if it has no bound (lossy rules, trees that grow)."""
        if not method.lossless or not isinstance(method.shape, Tree):
            return None
        return RootStep(method.shape.widths[0], VERIFIERS[method.verifier].drawings[0], method.verifier)

    @property
    def name(self) -> str:
        """A name, unique among the root steps of a draft."""
        return f"{self.verifier}/{self.candidates}"

    @property
    def tree(self) -> Tree:
        """The tree of one level: the root and its candidates."""
        return Tree((-1,) * self.candidates)

    @property
    def uniforms(self) -> int:
        """Random numbers per trial: one per candidate, and what the rule takes."""
        return self.candidates + VERIFIERS[self.verifier].uniforms(TreeBatch.build(self.tree, torch.device("cpu")))


def positions_per_prompt(step: RootStep, prompts: int, vocabulary: int) -> list[int]:
    """Number of positions to look at, for each prompt."""
    slow = step.candidates > 1 and step.drawing == "without_replacement"
    total = min(PER_PROMPT * prompts, max(prompts // 8, MAX_INTEGRAL // vocabulary) if slow else 2**62)
    return [total // prompts + (index < total % prompts) for index in range(prompts)]


def spread(length: int, count: int) -> list[int]:
    """`count` indices below `length`, or all of them, evenly spread."""
    count = min(count, length)
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def drawn_at(
    rows: Sequence[Continuation], counts: Sequence[int], shape: tuple[int, ...], what: str, seed: int
) -> dict[tuple[int, int], Tensor]:
    """By (row, place): uniforms of a shape, at `counts[row]` places spread over each answer.

    They come from a stream of the row's own, the same for every draft.
    """
    drawn: dict[tuple[int, int], Tensor] = {}
    for b, row in enumerate(rows):
        places = spread(len(row.output_ids), counts[b])
        stream = uniforms([generator(row_seed(seed, f"{row.id}/{what}"))], len(places) * math.prod(shape))
        drawn |= zip([(b, place) for place in places], stream.view(len(places), *shape), strict=True)
    return drawn


def root_acceptance(step: RootStep, p_NV: Tensor, q_NV: Tensor, u_NTU: Tensor) -> tuple[Tensor, Tensor]:
    """The bound, and the share of T trials in which the verifier accepted a candidate; float64 `[N]`.

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
        p, q, u = p.repeat_interleave(trials, dim=0), q.repeat_interleave(trials, dim=0), u.flatten(0, 1).to(p.device)
        if step.drawing == "deterministic":
            tokens = most_probable(q.log(), count)
        else:
            tokens = draw_children(step.drawing, q.unsqueeze(1), u[:, None, :count], [count], 1)[:, 0]
        proposal = Proposal(
            tree=tree,
            tokens_BM=torch.nn.functional.pad(tokens, (1, 0), value=-1),
            q_BEV=None if step.drawing == "deterministic" else q.unsqueeze(1),
            drawing=step.drawing,
        )
        # The distributions below a candidate decide only the token after it, which does not matter here.
        verdict = VERIFIERS[step.verifier].run(proposal, p.unsqueeze(1).expand(-1, count + 1, -1), u[:, count:])
        reached.append((verdict.accepted_B > 0).double().view(-1, trials).mean(1))
    return torch.cat(bounds), torch.cat(reached)


def root_sums(
    step: RootStep,
    rows: Sequence[Continuation],
    counts: Sequence[int],
    places: Sequence[tuple[int, int]],
    p_NV: Tensor,
    q_NV: Tensor,
    seed: int,
) -> RootMeasurement:
    """Simulate a root step at `counts[row]` of the positions `places`, each (row, index in its continuation)."""
    found = RootMeasurement(bound=[0.0] * len(rows), reached=[0.0] * len(rows), count=[0] * len(rows))
    drawn = drawn_at(rows, counts, (TRIALS, step.uniforms), f"headroom/{step.name}", seed)
    if chosen := [n for n, place in enumerate(places) if place in drawn]:
        u_NTU = torch.stack([drawn[places[n]] for n in chosen])
        bound_N, reached_N = root_acceptance(step, p_NV[chosen], q_NV[chosen], u_NTU)
        for n, bound, reached in zip(chosen, bound_N.tolist(), reached_N.tolist(), strict=True):
            row = places[n][0]
            found["bound"][row] += bound
            found["reached"][row] += reached
            found["count"][row] += 1
    return found
