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
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decode.propose.protocol import Outcome
from draftsmith.decode.runner import Block, Runner, call_directly

# By row: numbers of nodes among those forwarded after the root, from 0; None for one that was not.
NodeNumbers: TypeAlias = Sequence[Sequence[int | None]]


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes to expand next.

    parents_Re: the parents' numbers among the nodes expanded so far (0: the root). block: what the
    nodes attend to.
    """

    tokens_Be: Tensor
    parents_Re: Tensor
    block: Block


@dataclass(frozen=True)
class NetworkForward:
    """One forward of a network as a function that can be recorded, alone or with what follows it.

    run(*inputs): logits `[B, e * d, V]` and new state, which `learn` takes. name: tells it from the
    network's other forwards. call: as `Runner.call`.
    """

    run: Callable[..., tuple[Tensor, Tensor | None]]
    inputs: tuple[object, ...] = ()
    name: object = None
    learn: Callable[[Tensor | None], None] = lambda _: None
    call: Callable[..., Any] = call_directly

    def logits(self) -> Tensor:
        logits_BeV, state = self.call(("forward", self.name), self.run, *self.inputs)
        self.learn(state)
        return logits_BeV


class Network(ABC):
    """Gives logits for the children of any node of a tree.

    rows: the state of each row. width: pending tokens in the present step, padding included.
    """

    drafts: int = 1
    width: int = 1
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

    def forward(self, frontier: Frontier | None) -> NetworkForward:
        """The forward of `open` (None) or `extend`. Here it calls them: nothing is recorded with
        it.
        """

        def run() -> tuple[Tensor, None]:
            return self.open() if frontier is None else self.extend(frontier), None

        return NetworkForward(run)

    @abstractmethod
    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        """Learn the outcome. expanded: the accepted nodes."""

    @abstractmethod
    def skip(self, outcome: Outcome) -> None:
        """Learn the outcome of a step in which this network did not draft."""

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class CachedNetwork(Network):
    """A network with a cache: `open` and `extend` are what `forward` says."""

    runner: Runner

    def open(self) -> Tensor:
        return self.forward(None).logits()

    def extend(self, frontier: Frontier) -> Tensor:
        return self.forward(frontier).logits()

    def select_rows(self, rows: Sequence[int]) -> None:
        self.runner.select_rows(rows)
        super().select_rows(rows)


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Cut a draft's surplus tokens, and make the tokens that it lacks impossible."""
    surplus = logits.shape[-1] - vocabulary
    if surplus == 0:
        return logits
    if surplus > 0:
        return logits[..., :vocabulary]
    return pad(logits, (0, -surplus), value=-torch.inf)


@lru_cache(maxsize=8)
def pending_block(width: int, device: torch.device) -> Block:
    """The forward of `width` pending tokens, a causal chain."""
    sees_1WW = torch.ones(1, width, width, dtype=torch.bool, device=device).tril()
    offsets_W = torch.arange(width, device=device)
    return Block(offsets_W[None], sees_1WW, static=True)
