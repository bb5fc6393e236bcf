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
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.defaults import default_tree
from decode.tree import Drawing, Tree, TreeShape
from decode.tree_batch import TreeBatch
from draftsmith_core.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Proposal:
    """One step's drafted trees.

    `tokens_BM` are the drafted tokens in M indexing: column 0 (the root) is -1, and so is a node
    that does not exist in that row. `q_BEV` are the fp32 laws over the target's vocabulary that
    children were drawn from, before any removal; None when deterministic. With several drafts
    the child of rank k was drawn by draft `k % drafts`, from law `groups_RM * drafts + k % drafts`.
    """

    tree: TreeBatch
    tokens_BM: Tensor
    q_BEV: Tensor | None
    drawing: Drawing
    drafts: int = 1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a proposal.

    By row: `paths` are the accepted nodes (M indices), `tokens` their tokens followed by the
    target's own. A row that has ended has an empty path and no tokens and is never asked for again.
    `hidden[b]` holds one `[path + 1, H]` tensor for each of `hidden_layers`: the target's states at
    the root and at the accepted nodes. `p_BMV` are the target's laws at all nodes (one-hot when greedy).
    """

    paths: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    hidden: Sequence[Sequence[Tensor]]
    p_BMV: Tensor


class Session(Protocol):
    """A proposer at work on the rows of one `generate` call."""

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Draft one step. `u_BN` are float64 uniforms on the target's device, one a node (`tree.size`); None when
        the drawing is deterministic.
        """

    def commit(self, outcome: Outcome) -> None:
        """Learn what became of the last proposal."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""


class Proposer(Protocol):
    """A method of drafting. It holds models and settings; what changes while decoding lives in its sessions.

    `start` is all that must be written; a class that names `Proposer` as its base inherits the rest, which suits a
    proposer whose drafts the context determines. For example one that always drafts the root's token again:

        class Repeat(Proposer):
            def start(self, prompts, tree, drawing, sampling, max_new_tokens, hidden_BTH, device):
                return RepeatSession(TreeBatch.build(tree, device), [prompt[-1] for prompt in prompts])

        class RepeatSession(Session):
            def __init__(self, tree, last):
                self.tree, self.last = tree, last

            def propose(self, u_BN):
                tokens_BM = torch.tensor([[-1] + [token] * self.tree.parents_RN.shape[1] for token in self.last])
                return Proposal(self.tree, tokens_BM, None, "deterministic")

            def commit(self, outcome):
                self.last = [tokens[-1] if tokens else 0 for tokens in outcome.tokens]

            def select_rows(self, rows):
                self.last = [self.last[row] for row in rows]

        SpeculativeDecoder(target, Repeat()).generate([[1, 2, 3]])
    """

    drafts: int = 1
    """How many distributions a node's children are drawn from in turn; 1 but for several draft models."""

    hidden_layers: tuple[int, ...] = ()
    """Which of the target's `hidden_states` it needs (0 is the embedding, -1 the last); empty for none."""

    def default_tree(self) -> Tree:
        """The tree that is drafted when none is named."""
        return default_tree()

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        """The methods by which it can choose children on such a tree above temperature 0. At temperature 0 every
        proposer is deterministic.
        """
        return frozenset({"deterministic"})

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Raise ValueError, in one line with the fix, when it cannot draft this tree for this target."""
        return

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise ValueError when a prompt and its answer do not fit the context."""
        return

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        tree: TreeShape,
        drawing: Drawing,
        sampling: Sampling,
        max_new_tokens: int,
        hidden_BTH: Sequence[Tensor],
        device: torch.device,
    ) -> Session:
        """Begin on these prompts. Proposals are to be made on `device`.

        `hidden_BTH` are the target's states over each prompt but its last token, right-padded.
        """
