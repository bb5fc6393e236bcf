"""What the engine asks of a proposer, and what it gets back.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E groups of siblings (nodes that have
children), V vocabulary, T prompt positions, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling
from draftsmith.decode.noise import Noise
from draftsmith.decode.tree import CHAIN, Drawing, Tree, TreeShape, chain
from draftsmith.decode.tree_batch import TreeBatch

if TYPE_CHECKING:
    from draftsmith.decode.compiled.steps import StaticSteps


@dataclass(frozen=True, eq=False)
class Proposal:
    """One step's drafted trees, shared by all rows or one per row.

    tokens_BM: drafted tokens, -1 for the root and for nodes that a row lacks. q_BEV: fp32
    distributions that children were drawn from, before any token was removed; None if
    deterministic. With several drafts the child of rank k was drawn from distribution
    `tree.groups_RM * drafts + k % drafts`. finite: false if a logit of the draft was NaN or
    infinite. copies_BC: copied chains beside the tree, -1 behind the end of each; None for none.
    names: what each row chose to draft, if it chose.
    """

    tree: TreeBatch
    tokens_BM: Tensor
    q_BEV: Tensor | None
    drawing: Drawing
    drafts: int = 1
    finite: Tensor | None = None
    copies_BC: Tensor | None = None
    names: Sequence[str] = ()

    @property
    def nodes(self) -> int:
        """The nodes of its trees, with the root."""
        return self.tokens_BM.shape[1]

    @property
    def num_copied(self) -> int:
        """The tokens of the longest copy."""
        return 0 if self.copies_BC is None else self.copies_BC.shape[1]

    @property
    def whole_BM(self) -> Tensor:
        """The tokens with those of copies behind them."""
        if self.copies_BC is None:
            return self.tokens_BM
        return torch.cat([self.tokens_BM, self.copies_BC], dim=1)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a proposal, by row.

    paths: accepted nodes (M indices; those of a copy come after the tree's). tokens: their tokens
    and the target's own. hidden: one `[path + 1, H]` tensor per layer of `hidden_layers`, the
    target's states at the root and accepted nodes. Of a row that has ended they are not cut where
    its output is; `select_rows` drops the row.
    """

    paths: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    hidden: Sequence[Sequence[Tensor]]
    distributions: Callable[[], Tensor]

    @cached_property
    def p_BMV(self) -> Tensor:
        """The target's distributions at all nodes, `[B, M, V]`; one-hot when greedy."""
        return self.distributions()


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionSetup:
    """The options of one `generate` call.

    hidden_BTH: the target's states over each prompt but its last token, right-padded, one tensor
    per layer of `hidden_layers`. device, vocabulary: of the proposals. compile: record or compile a
    network's forwards too. trees: whether the target verifies trees. noise: what the target
    chooses tokens with, if a draft may share it; `drawing` is deterministic then.
    """

    prompts: Sequence[Sequence[int]]
    tree: TreeShape
    drawing: Drawing
    sampling: Sampling
    max_new_tokens: int
    hidden_BTH: Sequence[Tensor]
    device: torch.device
    vocabulary: int
    compile: bool | str = False
    trees: bool = True
    noise: Noise | None = None


class Session(Protocol):
    """A proposer at work on the rows of one `generate` call."""

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Draft one step. u_BN: float64 uniforms, one per node (`tree.size`); None if drafts are
        deterministic.
        """

    def commit(self, outcome: Outcome) -> None:
        """Learn the outcome of the last proposal."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""


class Proposer(Protocol):
    """A method of drafting. It holds models and settings; what changes while decoding lives in its
    sessions.

    Only `start` must be written; the inherited rest suits a proposer whose drafts the context
    determines, such as one that always drafts the root's token again:

        class Repeat(Proposer):
            def start(self, setup):
                return RepeatSession(TreeBatch.build(setup.tree, setup.device), [ids[-1] for ids in
                setup.prompts])

        class RepeatSession(Session):
            def __init__(self, tree, last):
                self.tree, self.last = tree, last

            def propose(self, u_BN):
                size = self.tree.parents_RN.shape[1]
                tokens_BM = torch.tensor([[-1] + [token] * size for token in self.last])
                return Proposal(self.tree, tokens_BM, None, "deterministic")

            def commit(self, outcome):
                self.last = [tokens[-1] for tokens in outcome.tokens]

            def select_rows(self, rows):
                self.last = [self.last[row] for row in rows]

        SpeculativeDecoder(target, Repeat()).generate([[1, 2, 3]])
    """

    name: str = "draft"
    """Name in error messages."""

    drafts: int = 1
    """Number of distributions that a node's children are drawn from in turn; above 1 for several
    draft models.
    """

    deepest: int | None = None
    """Depth of the deepest tree that it can draft; None for any depth."""

    hidden_layers: tuple[int, ...] = ()
    """Which of the target's states it needs (0 is the embedding, -1 the final one); empty for
    none.
    """

    steps: "Sequence[StaticSteps]" = ()
    """Its recorded forwards, if the decoder compiles."""

    def default_tree(self) -> Tree:
        """The tree that is drafted when none is named."""
        return chain(min(CHAIN, self.deepest or CHAIN))

    def longest_copy(self, tree: TreeShape) -> int:
        """The most tokens that stand beside such a tree as a copy."""
        return 0

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        """The methods by which it can choose children on such a tree above temperature 0."""
        return frozenset({"deterministic"})

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Raise ValueError, one line with the fix, if it cannot draft this tree for this target."""
        return

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise ValueError if a prompt and its answer do not fit the context."""
        return

    def start(self, setup: SessionSetup) -> Session:
        """Begin on the prompts of one `generate` call."""
        ...
