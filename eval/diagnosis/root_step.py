"""Headroom: how much a better verifier could gain at the root of a tree.

headroom = bound / simulated acceptance at the same positions. The bound is
`decode.transport_bound` (Hu et al., ICLR 2025, arXiv 2502.18779). The simulation drafts and
verifies one root step.

Legend: N positions, V vocabulary, T trials, S = N T, M nodes with the root, U uniforms per trial.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.core.sampling import draw_with_replacement
from draftsmith.decode import VERIFIERS
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.propose.static_tree import draw_children, most_probable
from draftsmith.decode.transport_bound import optimal_acceptance
from draftsmith.decode.tree import Drawing, Tree
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.eval.acceptance import Positions
from draftsmith.eval.method import Method

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
        drawing = VERIFIERS[method.verifier].drawings[0]
        return RootStep(method.shape.widths[0], drawing, method.verifier)

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
        tree = TreeBatch.build(self.tree, torch.device("cpu"))
        return self.candidates + VERIFIERS[self.verifier].uniforms(tree)


def positions_per_prompt(step: RootStep, prompts: int, vocabulary: int) -> list[int]:
    """Number of positions to look at, for each prompt."""
    slow = step.candidates > 1 and step.drawing == "without_replacement"
    total = PER_PROMPT * prompts
    if slow:
        total = min(total, max(prompts // 8, MAX_INTEGRAL // vocabulary))
    return [total // prompts + (index < total % prompts) for index in range(prompts)]


def root_acceptance(
    step: RootStep, p_NV: Tensor, q_NV: Tensor, u_NTU: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the bound and the share of T trials in which the verifier accepted a candidate, as
    float64 `[N]`.

    p, q: fp32 distributions of target and draft above temperature 0. u: float64 uniforms.
    """
    # All drawings draw a single candidate alike, and this one needs no integral.
    one_drawn = step.candidates == 1 and step.drawing != "deterministic"
    drawing = "with_replacement" if one_drawn else step.drawing
    size = max(1, MAX_ELEMENTS // (p_NV.shape[1] * u_NTU.shape[1]))
    bounds: list[Tensor] = []
    reached: list[Tensor] = []
    for p, q, u in zip(p_NV.split(size), q_NV.split(size), u_NTU.split(size), strict=True):
        bounds.append(optimal_acceptance(p, q, step.candidates, drawing))
        reached.append(_simulate(step, p, q, u))
    return torch.cat(bounds), torch.cat(reached)


def _simulate(step: RootStep, p_NV: Tensor, q_NV: Tensor, u_NTU: Tensor) -> Tensor:
    """Return the share of trials that accepted a candidate, `[N]`."""
    count = step.candidates
    if step.verifier == "speculative" and count == 1:
        return _simulate_one(p_NV, q_NV, u_NTU.to(p_NV.device))
    trials = u_NTU.shape[1]
    p_SV = p_NV.repeat_interleave(trials, dim=0)
    q_SV = q_NV.repeat_interleave(trials, dim=0)
    u_SU = u_NTU.flatten(0, 1).to(p_NV.device)
    q_S1V = q_SV.unsqueeze(1)
    drawn = step.drawing != "deterministic"
    if drawn:
        tokens = draw_children(step.drawing, q_S1V, u_SU[:, None, :count], [count], 1)[:, 0]
    else:
        tokens = most_probable(q_SV.log(), count)
    proposal = Proposal(
        tree=TreeBatch.build(step.tree, p_NV.device),
        tokens_BM=pad(tokens, (1, 0), value=-1),
        q_BEV=q_S1V if drawn else None,
        drawing=step.drawing,
    )
    # Only the token after a candidate depends on the distributions below it, which are left out.
    p_SMV = p_SV.unsqueeze(1).expand(-1, count + 1, -1)
    verdict = VERIFIERS[step.verifier].run(proposal, p_SMV, u_SU[:, count:])
    accepted_S = (verdict.accepted_B > 0).double()
    return accepted_S.view(-1, trials).mean(1)


def _simulate_one(p_NV: Tensor, q_NV: Tensor, u_NTU: Tensor) -> Tensor:
    """`_simulate` for speculative sampling of one candidate x, accepted if u q(x) < p(x). Trials
    share the running sums of q, and the token after a refusal, which costs most, is left out.
    """
    x_NT = draw_with_replacement(q_NV, u_NTU[..., 0])
    taken_NT = u_NTU[..., 1] * q_NV.gather(1, x_NT) < p_NV.gather(1, x_NT)
    return taken_NT.double().mean(1)


def root_sums(step: RootStep, counts: Sequence[int], seed: int, at: Positions) -> RootMeasurement:
    """Simulate a root step at some of the positions, `counts[number]` of every text of the
    evaluation.
    """
    counts = [min(pair) for pair in zip(counts[at.start :], at.lengths, strict=False)]
    shape = (TRIALS, step.uniforms)
    chosen, u_NTU = at.drawn(counts, shape, f"headroom/{step.name}", seed)
    bound_N, reached_N = root_acceptance(step, at.p_NV[chosen], at.q_NV[chosen], u_NTU)
    return RootMeasurement(
        bound=at.sums(bound_N, chosen), reached=at.sums(reached_N, chosen), count=counts
    )
