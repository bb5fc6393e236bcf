"""Samplers of servers, lossless and not, by a loop of their own: what they write and count.

Legend: P prompts, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Drafted at a time.
DRAFTED = 3


@dataclass
class Answer:
    """An answer; and of each step, how many drafted tokens it accepted."""

    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """The ids after the first, which the prompt's forward gives."""
        return self.ids[1:]

    @property
    def stats(self) -> Any:
        return SimpleNamespace(
            target_calls=len(self.steps),
            proposed=DRAFTED * len(self.steps),
            accepted=sum(self.steps),
            accepted_by_depth=[sum(n > at for n in self.steps) for at in range(DRAFTED)],
        )


def noise_like(law_PV: Tensor, random: torch.Generator) -> Tensor:
    """Exponential noise."""
    return -torch.rand(law_PV.shape, generator=random).clamp(min=1e-30).log()


def drawn(law_PV: Tensor, noise_PV: Tensor) -> Tensor:
    """A token a row, `[P, 1]`; related laws give related tokens from the same noise."""
    return (law_PV / noise_PV).argmax(1, keepdim=True)


def refused_law(rule: str, p_PV: Tensor, q_PV: Tensor, y_P1: Tensor) -> Tensor:
    """What is drawn from after `y` was refused, not normalised."""
    if rule == "from p":
        return p_PV
    if rule == "one-hot residual":
        return p_PV.scatter(1, y_P1, 0.0)
    return (p_PV - q_PV).clamp(min=0)


def keeps(rule: str, p_PV: Tensor, q_PV: Tensor, y_P1: Tensor, random: torch.Generator) -> Tensor:
    """Whether the rule keeps the drafted tokens, `[P, 1]`."""
    u_P1 = torch.rand(y_P1.shape, generator=random)
    p_P1 = p_PV.gather(1, y_P1)
    ratio_P1 = p_P1 / q_PV.gather(1, y_P1)
    if rule == "unverified":
        return torch.ones_like(y_P1, dtype=torch.bool)
    if rule == "1.5 p/q":
        return u_P1 < 1.5 * ratio_P1
    if rule == "typical":
        entropy_P1 = -(p_PV * p_PV.clamp(min=1e-30).log()).sum(1, keepdim=True)
        return p_P1 > (0.3 * (-entropy_P1).exp()).clamp(max=0.09)
    kept_P1 = u_P1 < ratio_P1
    if rule == "a tenth unverified":
        kept_P1 |= torch.rand(y_P1.shape, generator=random) < 0.1
    return kept_P1


@torch.no_grad()
def write(
    target: Callable[[Tensor], Tensor],
    draft: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rule: str = "lossless",
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Answer]:
    """Answer prompts of one length, drafting by chains. target, draft: from ids `[P, T]` to the
    next token's logits `[P, V]`. rule: by which drafted tokens stay.
    """
    random = torch.Generator().manual_seed(seed)
    heat = temperature or 1e-4
    ids_PT = torch.tensor([list(prompt) for prompt in prompts])
    answers = [Answer() for _ in prompts]
    # How many drafted tokens the row's step has accepted; the first token belongs to none.
    accepted_P1 = torch.full((len(prompts), 1), DRAFTED)
    for at in range(tokens):
        p_PV = (target(ids_PT).float() / heat).softmax(1)
        q_PV = (draft(ids_PT).float() / heat).softmax(1)
        noise_PV = noise_like(p_PV, random)
        y_P1 = drawn(q_PV, noise_PV)
        if rule != "shared noise":
            noise_PV = noise_like(p_PV, random)
        drafts_P1 = accepted_P1 < DRAFTED
        refused_PV = refused_law(rule, p_PV, q_PV, y_P1)
        law_PV = torch.where(drafts_P1, refused_PV, p_PV)
        kept_P1 = keeps(rule, p_PV, q_PV, y_P1, random) & drafts_P1
        x_P1 = torch.where(kept_P1, y_P1, drawn(law_PV, noise_PV))
        ids_PT = torch.cat([ids_PT, x_P1], 1)
        for row, answer in enumerate(answers):
            answer.ids.append(int(x_P1[row]))
            if at and accepted_P1[row] == 0:
                answer.steps.append(0)
            if kept_P1[row]:
                answer.steps[-1] += 1
        accepted_P1 = torch.where(kept_P1, accepted_P1 + 1, 0)
    return answers
