"""What the engine asks of a way of drafting, and what it gets back.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E nodes that have children, V vocabulary,
H hidden size.

A new proposer (several drafts, EAGLE or Medusa heads, prompt lookup) is a file with a `Proposer`
and a `Session`, and an entry in `PROPOSERS`. A proposal carries the tree it was drawn on, by row,
so a proposer may choose its tree from the row and the step; `Proposer.hidden_layers` asks the
engine for hidden states of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.tree import Tree, TreeBatch
from draftsmith.sampling import Sampling

# How the children of one node were chosen, which is what a verifier's correctness rests on:
#   without_replacement  drawn from q one after another, each removed from q before the next; nothing is
#                        pruned afterwards (that looks at what was drawn, and breaks every rule but "exact")
#   deterministic        a function of the context alone, such as the k most probable tokens
Drawing = Literal["without_replacement", "deterministic"]


@dataclass(frozen=True, eq=False)
class Proposal:
    """One step's drafted trees.

    `tokens_BM` are the drafted tokens in M indexing: column 0 (the root) is -1, and so is a node
    that does not exist in that row. `q_BEV` are the fp32 laws that children were drawn from, before
    any removal; None when deterministic.
    """

    tree: TreeBatch
    tokens_BM: Tensor
    q_BEV: Tensor | None
    drawing: Drawing


class Session(Protocol):
    """A proposer at work on the rows of one `generate` call."""

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Draft one step. `u_BN` are float64 uniforms on the CPU, one a node; None when the law is
        greedy.
        """

    def commit(
        self,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        hidden: Sequence[Sequence[Tensor]],
    ) -> None:
        """Learn the outcome, by row: accepted nodes (M indices), and their tokens followed by the
        target's own.

        `hidden[b]` holds one `[path + 1, H]` tensor for each of `hidden_layers`: the target's
        states at the root and at the accepted nodes. A row that has ended has an empty token list
        and is never asked for again.
        """

    def select_rows(self, rows: Sequence[int]) -> None:
        """Shrink the batch to these rows."""


class Proposer(Protocol):
    """A way of drafting. It holds models and settings; what changes while decoding lives in its
    sessions.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which of the target's `hidden_states` it needs (0 is the embedding, -1 the last); empty
        for none.
        """

    def drawing(self, sampling: Sampling | None) -> Drawing:
        """How children are chosen under this sampling; None asks for the general case, temperature
        above 0.
        """

    def check(self, target: PreTrainedModel, tree: Tree) -> None:
        """Raise ValueError, in one line with the fix, when it cannot draft this tree for this
        target.
        """

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise ValueError when a prompt and its answer do not fit the context."""

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        tree: Tree,
        sampling: Sampling,
        max_new_tokens: int,
        hidden_BTH: Sequence[Tensor],
        device: torch.device,
    ) -> Session:
        """Begin on these prompts. Proposals are to be made on `device`.

        `hidden_BTH` are the target's states over each prompt but its last token, right-padded.
        """
