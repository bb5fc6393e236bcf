"""A network whose logits are changed as the target's are: by the penalties of the sampling, given
the text and the path to a node, and by noise that the target chooses with too.

Legend: B rows, e nodes of a level, E nodes expanded so far, d drafts, V vocabulary, R = 1 when rows
share a tree, else B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.sampling import Sampling
from draftsmith.decode.noise import Noise
from draftsmith.decode.propose.network import Frontier, Network, NodeNumbers
from draftsmith.decode.propose.protocol import Outcome, SessionSetup


def changed_network(network: Network, setup: SessionSetup) -> Network:
    """Return the network, with the penalties of the sampling and the noise if there are any."""
    seen = Seen.of(setup.prompts, setup.vocabulary, setup.sampling, network.device)
    if seen is None and setup.noise is None:
        return network
    return _ChangedNetwork(network, setup.sampling, seen, setup.noise)


@dataclass(eq=False)
class _ChangedNetwork(Network):
    """Its forwards are recorded as those of the network; the changes follow them."""

    network: Network
    sampling: Sampling
    seen: Seen | None
    noise: Noise | None

    def __post_init__(self) -> None:
        self.drafts = self.network.drafts
        self.device = self.network.device

    def open(self) -> Tensor:
        logits_BdV = self.network.open()
        self.width = self.network.width
        self.depth = 0
        if self.seen is None:
            return self._noised(logits_BdV)
        self.answer_BEV = self.seen.answer.unsqueeze(1)
        return self._changed(logits_BdV, self.seen.prompt.unsqueeze(1), self.answer_BEV)

    def extend(self, frontier: Frontier) -> Tensor:
        logits_BeV = self.network.extend(frontier)
        self.depth += 1
        if self.seen is None:
            return self._noised(logits_BeV)
        above_BeV = self.answer_BEV.take_along_dim(frontier.parents_Re.unsqueeze(2), dim=1)
        tokens_Be1 = frontier.tokens_Be.unsqueeze(2)
        seen = self.seen.below(above_BeV, tokens_Be1, torch.ones_like(tokens_Be1))
        self.answer_BEV = torch.cat([self.answer_BEV, seen.answer], dim=1)
        return self._changed(logits_BeV, seen.prompt, seen.answer)

    def _changed(self, logits: Tensor, prompt_B1V: Tensor, answer_BeV: Tensor) -> Tensor:
        answer = answer_BeV.repeat_interleave(self.drafts, dim=1)
        return self._noised(penalised(logits, self.sampling, Seen(prompt_B1V, answer)))

    def _noised(self, logits: Tensor) -> Tensor:
        return logits if self.noise is None else self.noise.added(logits, self.depth)

    def confidence(self, tokens_Bc: Tensor) -> Tensor | None:
        return self.network.confidence(tokens_Bc)

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        self.network.commit(expanded, outcome)
        self._read(outcome)

    def skip(self, outcome: Outcome) -> None:
        self.network.skip(outcome)
        self._read(outcome)

    def _read(self, outcome: Outcome) -> None:
        if self.seen is not None:
            self.seen.read(outcome.tokens)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)
        self.seen = self.seen and self.seen.rows(rows)
