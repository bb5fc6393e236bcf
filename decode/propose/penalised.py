"""A network whose logits have the penalties of the sampling, given the text and the path to a node.

Legend: B rows, e nodes of a level, E nodes expanded so far, d drafts, V vocabulary, R = 1 when rows
share a tree, else B.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.core.penalties import Seen, penalised
from draftsmith.core.sampling import Sampling
from draftsmith.decode.propose.network import Frontier, Network, NodeNumbers
from draftsmith.decode.propose.protocol import Outcome, SessionSetup


def penalised_network(network: Network, setup: SessionSetup) -> Network:
    """Return the network, with the penalties of the sampling if it has any."""
    seen = Seen.of(setup.prompts, setup.vocabulary, setup.sampling, network.device)
    return network if seen is None else _PenalisedNetwork(network, setup.sampling, seen)


class _PenalisedNetwork(Network):
    """Its forwards are recorded as those of the network; the penalties follow them."""

    def __init__(self, network: Network, sampling: Sampling, seen: Seen) -> None:
        self.network = network
        self.sampling = sampling
        self.seen = seen
        self.drafts = network.drafts
        self.device = network.device

    def open(self) -> Tensor:
        logits_BdV = self.network.open()
        self.width = self.network.width
        self.answer_BEV = self.seen.answer.unsqueeze(1)
        return self._changed(logits_BdV, self.seen.prompt.unsqueeze(1), self.answer_BEV)

    def extend(self, frontier: Frontier) -> Tensor:
        above_BeV = self.answer_BEV.take_along_dim(frontier.parents_Re.unsqueeze(2), dim=1)
        tokens_Be1 = frontier.tokens_Be.unsqueeze(2)
        seen = self.seen.below(above_BeV, tokens_Be1, torch.ones_like(tokens_Be1))
        self.answer_BEV = torch.cat([self.answer_BEV, seen.answer], dim=1)
        return self._changed(self.network.extend(frontier), seen.prompt, seen.answer)

    def _changed(self, logits: Tensor, prompt_B1V: Tensor, answer_BeV: Tensor) -> Tensor:
        answer = answer_BeV.repeat_interleave(self.drafts, dim=1)
        return penalised(logits, self.sampling, Seen(prompt_B1V, answer))

    def confidence(self, tokens_Bc: Tensor) -> Tensor | None:
        return self.network.confidence(tokens_Bc)

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        self.network.commit(expanded, outcome)
        self.seen.read(outcome.tokens)

    def skip(self, outcome: Outcome) -> None:
        self.network.skip(outcome)
        self.seen.read(outcome.tokens)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.network.select_rows(rows)
        self.seen = self.seen.rows(rows)
