"""What a network offers the sessions that draft a tree level by level.

A step begins with `open`, a forward of the text that the network has not seen; `extend` forwards
the nodes of one depth after another.

Legend: B rows, e nodes of a level, d drafts (distributions per node; 1 but for several draft
models), W pending tokens (unseen text, the root last, right-aligned), V vocabulary of the target, R
= 1 when rows share a tree, else B.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from decode.propose.protocol import Outcome
from decode.recorded.steps import StaticSteps
from decode.runner import Block, Runner


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes to expand next.

    parents_Re: each one's parent among the nodes expanded so far (0 the root). block: what they
    attend to.
    """

    tokens_Be: Tensor
    parents_Re: Tensor
    block: Block


@dataclass(frozen=True)
class StaticCall:
    """One forward of a network as a function of tensors, to be recorded or compiled.

    function: returns logits `[B, e * d, V]` and the arguments of `learn`. name: tells it from the
    network's other forwards.
    """

    steps: StaticSteps
    name: object
    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    learn: Callable[..., None] = lambda *_: None


class Network(ABC):
    """Gives logits for the children of any node of a tree.

    rows: the state of each row. width: pending tokens in the present step, padding included.
    runner: model and cache, if any.
    """

    drafts: int = 1
    width: int = 1
    runner: Runner | None = None
    rows: list[Any]
    device: torch.device

    @abstractmethod
    def open(self) -> Tensor:
        """Begin a step: logits `[B, d, V]` at the root."""

    @abstractmethod
    def extend(self, frontier: Frontier) -> Tensor:
        """Logits `[B, e * d, V]` at these nodes, node by node."""

    def confidence(self, tokens_Bc: Tensor) -> Tensor | None:
        """For each token of the newest level `[B, c]`, predict the chance that the target accepts
        its child, without knowing that child. At depth 1, multiply by the chance of the token
        itself. None if the network predicts none.
        """
        return None

    def static(self, frontier: Frontier | None) -> StaticCall | None:
        """The forward of `open` (None) or `extend` as a function of tensors; None if it is not
        recorded.
        """
        return None

    @abstractmethod
    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """Learn the outcome. expanded: by row, the numbers of the accepted nodes among those
        forwarded after the root, from 0; None for a node that was not forwarded.
        """

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.runner is not None:
            self.runner.select_rows(rows)
        self.rows = [self.rows[row] for row in rows]


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut a draft's surplus tokens, and make the tokens that it lacks impossible."""
    surplus = logits.shape[-1] - vocabulary
    if surplus == 0:
        return logits
    if surplus > 0:
        return logits[..., :vocabulary]
    return torch.nn.functional.pad(logits, (0, -surplus), value=-torch.inf)


@lru_cache(maxsize=8)
def pending_block(width: int, device: torch.device) -> Block:
    """The forward of `width` pending tokens, a causal chain."""
    sees_1WW = torch.ones(1, width, width, dtype=torch.bool, device=device).tril()
    return Block(torch.arange(width, device=device).unsqueeze(0), sees_1WW, static=True)
