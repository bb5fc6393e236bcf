"""Several drafts, of which each request is drafted for by the one that is accepted most: `--proposer router`.

Every row has a bandit (`decode.bandit`) that takes a draft for rounds of its steps, by the tokens that its own text and
earlier requests gave. Which draft is next is settled by steps that are over, before anything is drawn, so each step is
one of an ordinary decoder with one draft, and outputs follow the target's own distribution. Nothing goes by a clock: a
step costs what the sizes of the models say.

Legend: B rows, N drafted nodes, M = N + 1 with the root, E groups of siblings, V vocabulary, K most children.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decode.bandit import Bandit
from decode.propose.draft_model import DraftModelProposer, Plans
from decode.propose.dynamic_tree import DynamicTreeSession
from decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup, padded
from decode.propose.static_tree import StaticTreeSession
from decode.tree import Drawing, TreeShape
from decode.tree_batch import TreeBatch


class RouterProposer(Proposer):
    """Takes one of several language models for every request, and another when its text asks for it.

    All draft the same tree. `bandit` is what it has learned, for as long as the proposer is there: a request that
    begins later begins with that, so that its draws, though not their distribution, depend on what came before.
    """

    compiles = False

    def __init__(self, models: Sequence[PreTrainedModel], *, fast: bool = True) -> None:
        if len(models) < 2:
            raise ValueError("router: chooses among several drafts; give two or more, or use proposer draft for one")
        # They share the arrays of the tree, so that rows of different drafts have one tree.
        plans: Plans = {}
        self.proposers = [DraftModelProposer(model, fast=fast, plans=plans) for model in models]
        self.name = " or ".join(each.name for each in self.proposers)
        self.bandit = Bandit(len(models), resting=False)
        self._costs: list[float] = []

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        """Any method: one draft at a time draws."""
        return self.proposers[0].drawings(tree)

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse what one of the drafts cannot draft for this target."""
        for proposer in self.proposers:
            proposer.check(target, tree)
        # A forward is taken to cost what it reads: a step is one of the target, and one of the draft for each level.
        sizes = [each.num_parameters() for proposer in self.proposers for each in proposer.models]
        self._costs = [1 + tree.depth * size / target.num_parameters() for size in sizes]

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse what does not fit the context of one of the drafts."""
        for proposer in self.proposers:
            proposer.check_lengths(prompts, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        """Prefill every draft's cache."""
        # A draft that rested reads what it missed behind the longest row, however far back its own row is.
        roomy = replace(setup, max_new_tokens=2 * setup.max_new_tokens)
        sessions = [proposer.start(roomy) for proposer in self.proposers]
        return RouterSession(sessions, [self.bandit.branch() for _ in setup.prompts], self._costs)  # type: ignore[arg-type]

    def record(self) -> list[dict[str, int | float | None]]:
        """By draft: the steps of rows that it drafted so far, and tokens per step."""
        return [arm.record() for arm in self.bandit.arms]


class RouterSession:
    """A session of every draft over all rows. A step runs those drafts that a row has taken; the others rest."""

    def __init__(
        self, sessions: Sequence[StaticTreeSession | DynamicTreeSession], rows: list[Bandit], costs: Sequence[float]
    ) -> None:
        self.sessions, self.rows, self.costs = sessions, rows, costs
        self._behind = [False] * len(sessions)

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Every row's tree, by the draft that its bandit has taken."""
        self._picks = [row.choose() for row in self.rows]
        self._asked = sorted(set(self._picks))
        proposals: list[Proposal] = []
        for number in self._asked:
            self._catch_up(number)
            proposals.append(self.sessions[number].propose(u_BN))
        return merged(proposals, [self._asked.index(pick) for pick in self._picks])

    def commit(self, outcome: Outcome) -> None:
        """Let every draft know: what it has read, or (for another's rows) that none of its own was kept."""
        for number, session in enumerate(self.sessions):
            if number in self._asked:
                paths = [path if pick == number else () for path, pick in zip(outcome.paths, self._picks, strict=True)]
                session.commit(replace(outcome, paths=paths))
            else:
                session.network.skip(outcome)
                self._behind[number] = True
        for row, pick, tokens in zip(self.rows, self._picks, outcome.tokens, strict=True):
            if tokens:
                row.learn(len(tokens), self.costs[pick])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self.rows = [self.rows[row] for row in rows]
        for session in self.sessions:
            session.select_rows(rows)

    def join(self, other: "RouterSession") -> None:
        """Append the rows of another session of the same proposer."""
        self.rows += other.rows
        for number, (session, theirs) in enumerate(zip(self.sessions, other.sessions, strict=True)):
            self._catch_up(number)
            session.join(theirs)

    def _catch_up(self, number: int) -> None:
        if self._behind[number]:
            self.sessions[number].network.catch_up()
            self._behind[number] = False


def merged(proposals: Sequence[Proposal], place_B: Sequence[int]) -> Proposal:
    """One proposal in which row b is that of `proposals[place_B[b]]`; trees that differ are padded to the largest."""
    first, rows = proposals[0], len(place_B)
    if len(proposals) == 1:
        return first
    index_B = torch.tensor(place_B, device=first.tokens_BM.device)
    row_B = torch.arange(rows, device=index_B.device)

    def chosen(each: Sequence[Tensor]) -> Tensor:
        """By row, from tensors of which the second axis may differ."""
        most = max(tensor.shape[1] for tensor in each)
        wide = [pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, most - tensor.shape[1])) for tensor in each]
        return torch.stack(wide)[index_B, row_B]

    tree = first.tree
    if any(each.tree is not tree for each in proposals):
        nodes = max(each.tokens_BM.shape[1] for each in proposals) - 1
        proposals = [padded(each, rows, nodes) for each in proposals]
        trees = [each.tree for each in proposals]
        tree = TreeBatch(
            chosen([each.parents_RN for each in trees]),
            chosen([each.depths_RN for each in trees]),
            chosen([each.children_RMK.transpose(1, 2) for each in trees]).transpose(1, 2),
            chosen([each.groups_RM for each in trees]),
            chosen([each.sees_RMM for each in trees]),
            tuple(max(widths) for widths in zip_longest(*(each.widths for each in trees), fillvalue=0)),
        )
    q = [each.q_BEV for each in proposals if each.q_BEV is not None]
    finite = [each.finite.expand(rows) for each in proposals if each.finite is not None]
    return replace(
        first,
        tree=tree,
        tokens_BM=chosen([each.tokens_BM for each in proposals]),
        q_BEV=chosen(q) if q else None,
        finite=torch.stack(finite)[index_B, row_B],
    )
