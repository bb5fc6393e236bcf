"""What drafts level by level: a network forwards the text it has not seen and then the nodes of each depth.

Legend: B rows, e nodes of a level, d drafts (distributions per node; 1 but for several draft models), W pending
tokens (those of the text that the network has not seen, the root last, right-aligned in the batch), T positions of a
block, V vocabulary (the target's), R = 1 when all rows share a tree, else B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.propose.protocol import Outcome
from decode.runner import Block
from decode.static_steps import StaticSteps


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes that a network expands next.

    `parents_Re` is the index of each one's parent among the nodes expanded so far (0 the root). `block` says what they
    attend to, for a network with a cache; `paths_Bed` holds the tokens from the root down to each node, itself
    included, for a network that `reads_paths`.
    """

    tokens_Be: Tensor
    parents_Re: Tensor
    block: Block
    paths_Bed: Tensor


class Network(Protocol):
    """Gives logits for the children of any node of a tree, level by level from the root."""

    drafts: int
    reads_paths: bool

    @property
    def rows(self) -> int:
        """Rows of the batch."""

    @property
    def width(self) -> int:
        """Number of pending tokens in the present step, padding included."""

    def open(self) -> Tensor:
        """Begin a step: logits `[B, d, V]` at the root."""

    def extend(self, frontier: Frontier) -> Tensor:
        """Logits `[B, e * d, V]` at these nodes, node by node."""

    def static(self, frontier: Frontier | None) -> "StaticCall | None":
        """The same (None: at the root) as a function of tensors, for a network whose forwards are recorded or compiled;
        None for another.
        """

    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """Learn the outcome. `expanded[b]` gives for each accepted node of row b its number among the nodes that were
        forwarded after the root (0 the first), None if it was not forwarded.
        """

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""

    def join(self, other: Any) -> None:
        """Append the rows of another network of the same kind."""


class NetworkSession:
    """A session whose rows are those of one network."""

    network: Network

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self.network.select_rows(rows)

    def join(self, other: "NetworkSession") -> None:
        """Append the rows of another session of the same proposer."""
        self.network.join(other.network)


def _forget(*tensors: Tensor) -> None:
    return


@dataclass(frozen=True)
class StaticCall:
    """One forward of a network as a function of tensors: `function(*inputs)` gives logits `[B, e * d, V]` and perhaps
    what `learn` is to be called with. `name` tells it from others of the network.
    """

    steps: StaticSteps
    name: object
    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    learn: Callable[..., None] = _forget


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits over the target's vocabulary: a draft's surplus tokens are cut, tokens that it lacks are impossible."""
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
