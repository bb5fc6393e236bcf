"""A draft that changes its tree, or stops drafting, from one step to the next: `--tree auto:online`.

Which arm a step takes is chosen before it draws anything, from steps that are over. Each step is then one of an
ordinary decoder, which continues the text as the target would whatever the text so far: so the whole is the target's.

Legend: B rows, N drafted nodes of the largest arm.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.bandit import Bandit
from decode.propose.network import Network, NetworkSession
from decode.propose.protocol import Outcome, Proposal, Session
from decode.tree import Tree
from decode.tree_batch import TreeBatch

# Tests put a clock of their own here.
clock: Callable[[], float] = time.perf_counter


class OnlineSession(NetworkSession):
    """The sessions of all arms over one network, whose cache they share; arm 0 drafts nothing."""

    def __init__(
        self, network: Network, sessions: Sequence[Session], sizes: Sequence[int], bandit: Bandit, device: torch.device
    ) -> None:
        self.network, self.sessions, self.sizes, self.bandit, self.device = network, sessions, sizes, bandit, device
        self._empty = TreeBatch.build(Tree(()), device)
        self._behind = False
        self._began_s = 0.0
        self._emitted: float | None = None

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """One step of the arm that is chosen now. A step's time lasts until the next one begins."""
        now_s = clock()
        if self._emitted is not None:
            self.bandit.learn(self._emitted, now_s - self._began_s)
        self._began_s, self._emitted = now_s, None
        self._arm = self.bandit.choose()
        if not self._arm:
            tokens_B1 = torch.full((self.network.rows, 1), -1, device=self.device)
            return Proposal(self._empty, tokens_B1, None, "deterministic")
        if self._behind:
            self.network.catch_up()
            self._behind = False
        size = self.sizes[self._arm - 1]
        return self.sessions[self._arm - 1].propose(None if u_BN is None else u_BN[:, :size])

    def commit(self, outcome: Outcome) -> None:
        """Let the network know, drafted or not, and count the tokens of the rows that go on."""
        emitted = [len(tokens) for tokens in outcome.tokens if tokens]
        self._emitted = sum(emitted) / len(emitted)
        if self._arm:
            self.sessions[self._arm - 1].commit(outcome)
        else:
            self.network.skip(outcome)
            self._behind = True

    def join(self, other: NetworkSession) -> None:
        """Take the rows of another session behind this one's. The step timed with their prefill is left out."""
        if self._behind:
            self.network.catch_up()
            self._behind = False
        super().join(other)
        self._emitted = None
