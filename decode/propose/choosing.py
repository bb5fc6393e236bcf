"""`--tree auto`: at every step draft the tree with the most expected tokens per second, or nothing.

A row chooses by the cost of a step (`decode.step_costs`, measured before) and by what was accepted
in its own text. It never reads the clock, nor, above temperature 0, its batch mates. So the output
stays the target's, and the same seed gives it again.

Legend: B rows, N drafted nodes, M = N + 1 with the root, C copied tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling
from draftsmith.decode.propose.acceptance import Acceptance
from draftsmith.decode.propose.lookup_first import (
    LookupFirst,
    longer,
    nothing,
    on_tree,
    texts_of,
    with_copies,
)
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.prompt_lookup import PromptLookupProposer
from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.propose.static_tree import DraftingPlan, StaticTreeSession
from draftsmith.decode.step_costs import StepCosts, Widths
from draftsmith.decode.supported_models import ability, check_tree
from draftsmith.decode.tree import Drawing, Tree, TreeShape, tree_of_paths
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.tree_spec import kary
from draftsmith.decode.verify import Verifier
from draftsmith.decode.verify.siblings import without
from draftsmith.decode.verify.tree_walk import residual

CHAINS = (1, 2, 3, 4, 6, 8)
WIDE: tuple[Widths, ...] = ((2,), (4,), (2, 1), (2, 1, 1), (4, 1), (3, 2), (4, 2, 2))
# Lengths of copies; tokens that must match before a copy, and before a long match; the prior
# acceptance of a copied token behind a short and a long match.
COPIES = (1, 2, 4, 8)
MATCH = 2
LONG_MATCH = 8
COPY_PRIOR = (0.5, 0.9)
# The prior acceptance of an unknown draft: low, so that a useless one costs little.
UNKNOWN = 0.3
# Change the tree only for this gain, and choose again after this many steps.
GAIN = 1.03
LOOK = 2
# While no draft is best, a trial of the draft may cost this share of the steps before it. The share
# halves after each trial that does not pay.
TRIAL = 0.01
LONGEST_PAUSE = 512
# The second, third and fourth candidate together stay as often as this many second ones.
LATER = (1.0, 1.7, 2.3)

# Costs of steps at this sampling.
Costs = Callable[[Sampling], StepCosts]


def menu(deepest: int | None, *, chains_only: bool) -> tuple[Widths, ...]:
    """The trees that are chosen from, by children on each level."""
    most = min(deepest or CHAINS[-1], 16)
    lengths = {min(length, most) for length in (*CHAINS, deepest or 1)}
    widths: list[Widths] = [(1,) * length for length in sorted(lengths)]
    if not chains_only:
        widths += [levels for levels in WIDE if len(levels) <= most]
    return tuple(widths)


@dataclass(frozen=True)
class Choice:
    """What a row drafts: a tree, or a number of copied tokens, or nothing."""

    widths: Widths = ()
    copied: int = 0

    @property
    def name(self) -> str:
        return f"lookup:{self.copied}" if self.copied else name_of(self.widths)


NOTHING = Choice()
COPIED = {count: Choice(copied=count) for count in COPIES}
# Seconds of a step by choice.
Prices = Mapping[Choice, float]


def name_of(widths: Widths) -> str:
    """The spec of a tree."""
    if not widths:
        return "no draft"
    if max(widths) == 1:
        return f"chain:{len(widths)}"
    return "kary:" + ",".join(map(str, widths))


def prices_of(costs: StepCosts, trees: Sequence[Widths], rows: int = 1) -> Prices:
    """Return the cost of each choice in a batch of `rows`."""
    prices = {Choice(widths): costs.step(widths, rows) for widths in ((), *trees)}
    for count, copy in COPIED.items():
        prices[copy] = costs.step((1,) * count, rows, drafts=False)
    return prices


class Past:
    """What a row chooses by. prior: the acceptance of the draft's first token."""

    def __init__(self, prior: float) -> None:
        self.draft = Acceptance(prior)
        self.copies = [Acceptance(rate) for rate in COPY_PRIOR]
        self.best = NOTHING
        self.drafted = NOTHING
        self.promised = 0.0
        self.rest = 0
        self.trials = 0
        self.pausing = False

    def step(self, prices: Prices) -> None:
        """Begin a step."""
        if not self.rest:
            self._look(prices)
        self.rest -= 1

    def choose(self, copyable: int, long: bool, prices: Prices) -> Choice:
        """Return the choice with the most expected tokens per second. copyable: tokens that could
        be copied; long: behind a long match.
        """
        choice = self.drafted
        highest = GAIN * self.promised
        if copyable:
            rates = self.copies[long].by_depth()
            for count, copy in COPIED.items():
                promise = self.copies[long].tokens((1,) * count, rates) / prices[copy]
                if count <= copyable and promise > highest:
                    choice, highest = copy, promise
        return choice

    def _look(self, prices: Prices) -> None:
        """Choose the tree, and for how many steps."""
        rates = self.draft.by_depth()
        promised: dict[Choice, float] = {}
        for choice, seconds in prices.items():
            # A tree that would not pay if all of it were accepted is not tried.
            could_pay = seconds <= prices[NOTHING] * (1 + len(choice.widths))
            if could_pay and not choice.copied:
                promised[choice] = self.draft.tokens(choice.widths, rates) / seconds
        best = max(promised, key=promised.__getitem__)
        if promised[best] > GAIN * promised.get(self.best, 0.0):
            self.best = best
            self.trials = 0
        self.drafted = self.best
        self.promised = promised[self.best]
        self.rest = LOOK
        if self.best != NOTHING or len(promised) == 1:
            return
        del promised[NOTHING]
        trial = max(promised, key=promised.__getitem__)
        if self.pausing:
            self.draft.fade()
            self.drafted = trial
            self.rest = 1
            self.trials += 1
        else:
            pause = (prices[trial] / prices[NOTHING] - 1) / TRIAL
            self.rest = min(int(pause * 2**self.trials) + 1, LONGEST_PAUSE)
        self.pausing = not self.pausing


def relative_cost(chosen: Mapping[str, int], prices: Prices) -> float | None:
    """Return the cost of the steps of `DecodeStats.chosen` over that of as many without a draft;
    None if there was no step.
    """
    spent = sum(chosen.get(choice.name, 0) * seconds for choice, seconds in prices.items())
    steps = sum(chosen.values())
    return spent / steps / prices[NOTHING] if steps else None


def chooser(
    proposer: Proposer,
    target: PreTrainedModel,
    verifier: Verifier | None,
    costs: Costs,
    prior: float,
) -> "ChoosingProposer | None":
    """Return a proposer that chooses trees for this one; None for retrieval, lookahead and guests,
    which draft their own way.
    """
    draft = proposer.draft if isinstance(proposer, LookupFirst) else proposer
    if not isinstance(draft, NetworkProposer | PromptLookupProposer):
        return None
    # Joined trees have more children than a row chose, and this drawing asks how many.
    chains_only = verifier is not None and (
        verifier.chains_only or verifier.drawings[0] == "top_and_one"
    )
    trees: tuple[Widths, ...] = ()
    if isinstance(draft, NetworkProposer):
        chains_only = chains_only or not trees_fit(target, draft)
        trees = menu(draft.deepest, chains_only=chains_only)
    return ChoosingProposer(draft, costs, prior, trees)


def trees_fit(target: PreTrainedModel, draft: Proposer) -> bool:
    """Whether target and draft take trees beyond chains."""
    tree = kary(WIDE[0])
    try:
        check_tree(target, ability(target), tree)
        draft.check(target, tree)
    except ValueError:
        return False
    return True


class ChoosingProposer(Proposer):
    """Chooses trees for `draft`, and copies. costs: of steps. prior: the acceptance of its first
    token. trees: the menu.
    """

    def __init__(
        self,
        draft: NetworkProposer | PromptLookupProposer,
        costs: Costs,
        prior: float,
        trees: tuple[Widths, ...],
    ) -> None:
        self.draft = draft
        self.costs = costs
        self.prior = prior
        self.menu = trees
        self.name = draft.name
        self.drafts = draft.drafts
        self.hidden_layers = draft.hidden_layers
        self.paths = joined_paths(trees or ((1,),))
        # Shared by all texts at temperature 0, which are the same whatever is drafted.
        self.past = Past(prior)

    def prices(self, sampling: Sampling, rows: int = 1) -> Prices:
        """Return the cost of each choice."""
        return prices_of(self.costs(sampling), self.menu, rows)

    def default_tree(self) -> Tree:
        """The union of all trees of the menu."""
        return tree_of_paths(self.paths)

    def longest_copy(self, tree: TreeShape) -> int:
        return COPIES[-1]

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        return self.draft.drawings(tree)

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        self.draft.check(target, tree)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.draft.check_lengths(prompts, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        return ChoosingSession(self, setup)


class Unread(NamedTuple):
    """What the network has to read of a step without a draft: not the distributions, which are
    large.
    """

    tokens: Sequence[Sequence[int]]
    hidden: Sequence[Sequence[Tensor]]


class ChoosingSession(Session):
    """The rows of one `generate` call: their pasts and texts, and the session of the network."""

    def __init__(self, proposer: ChoosingProposer, setup: SessionSetup) -> None:
        self.proposer = proposer
        self.setup = setup
        self.pasts = [proposer.past for _ in setup.prompts]
        if not setup.sampling.greedy:
            self.pasts = [Past(proposer.prior) for _ in setup.prompts]
        self._price()
        self.texts = texts_of(setup)
        self.draft: StaticTreeSession | None = None
        if isinstance(proposer.draft, NetworkProposer):
            session = proposer.draft.start(longer(setup))
            assert isinstance(session, StaticTreeSession)
            session.watched = 4
            self.draft = session
        self.unread: list[Unread] = []
        self.proposal = self.empty = self._nothing()
        self.copies: list[list[int]] = []
        self.long: list[bool] = []  # whether each copy stands behind a long match
        self.choices: list[Choice] = []

    def _price(self) -> None:
        rows = len(self.pasts) if self.setup.sampling.greedy else 1
        self.prices = self.proposer.prices(self.setup.sampling, rows)

    def _nothing(self) -> Proposal:
        """The proposal of a step without a draft."""
        rows = len(self.texts)
        return replace(nothing(self.setup, rows), names=[NOTHING.name] * rows)

    def propose(self, u_BN: Tensor | None) -> Proposal:
        for past in dict.fromkeys(self.pasts):
            past.step(self.prices)
        self.copies = []
        self.long = []
        self.choices = []
        for text, past in zip(self.texts, self.pasts, strict=True):
            matching = text.matching(LONG_MATCH)
            copy = text.copied(COPIES[-1], 0.0) if matching >= MATCH else []
            long = matching >= LONG_MATCH
            self.copies.append(copy)
            self.long.append(long)
            self.choices.append(past.choose(len(copy), long, self.prices))
        drafted = tuple(sorted({choice.widths for choice in self.choices if choice.widths}))
        self.proposal = self._drafted(drafted, u_BN) if drafted else self.empty
        if not drafted and not any(choice.copied for choice in self.choices):
            return self.empty
        pairs = zip(self.copies, self.choices, strict=True)
        copies = [copy[: choice.copied] for copy, choice in pairs]
        names = [choice.name for choice in self.choices]
        return with_copies(replace(self.proposal, names=names), copies, max(map(len, copies)))

    def _drafted(self, drafted: tuple[Widths, ...], u_BN: Tensor | None) -> Proposal:
        """Draft the union of the rows' trees; a row lacks the nodes that it did not choose."""
        session = self.draft
        assert session is not None
        self._catch_up()
        device = self.setup.device
        paths = joined_paths(drafted)
        tree = tree_of_paths(paths)
        session.plan = DraftingPlan.build(tree, session.network.device, device)
        if u_BN is None:
            proposal = session.propose(None)
        else:
            # A node keeps its uniform whatever else is drafted, and a rule its own by depth.
            places = [self.proposer.paths.index(path) for path in paths]
            proposal = session.propose(u_BN[:, places])
            proposal = replace(proposal, tree=_as_in(proposal.tree, self.setup.tree))
        if len(drafted) > 1 or any(not choice.widths for choice in self.choices):
            chosen = [paths_of(choice.widths) for choice in self.choices]
            lacks = [[False, *(path not in own for path in paths)] for own in chosen]
            mask_BM = torch.tensor(lacks, device=device)[:, : proposal.nodes]
            tokens_BM = proposal.tokens_BM.masked_fill(mask_BM, -1)
            proposal = replace(proposal, tokens_BM=tokens_BM)
        return proposal

    def _catch_up(self) -> None:
        """Let the network read, in one forward, the steps in which it did not draft."""
        unread = self.unread
        self.unread = []
        if not unread:
            return
        assert self.draft is not None
        hidden = []
        tokens = []
        for row in range(len(self.texts)):
            layers = zip(*(step.hidden[row] for step in unread), strict=True)
            hidden.append([torch.cat(states) for states in layers])
            tokens.append([token for step in unread for token in step.tokens[row]])
        self.draft.network.skip(Outcome([], tokens, hidden, distributions=Tensor))

    def commit(self, outcome: Outcome) -> None:
        for row, (text, emitted) in enumerate(zip(self.texts, outcome.tokens, strict=True)):
            if self.copies[row]:
                self._learn_of_copy(row, emitted)
            text.read(emitted)
        if self.draft is None:
            return
        if self.proposal.nodes == 1:
            self.unread.append(Unread(outcome.tokens, outcome.hidden))
            return
        for row, choice in enumerate(self.choices):
            if choice.widths:
                self._learn(row, choice.widths, outcome)
        self.draft.commit(on_tree(outcome, self.proposal.nodes))

    def select_rows(self, rows: Sequence[int]) -> None:
        self._catch_up()
        self.texts = [self.texts[row] for row in rows]
        self.pasts = [self.pasts[row] for row in rows]
        self.empty = self._nothing()
        self._price()
        if self.draft is not None:
            self.draft.select_rows(rows)

    def _learn_of_copy(self, row: int, emitted: Sequence[int]) -> None:
        copy = self.copies[row]
        rates = self.pasts[row].copies[self.long[row]]
        for depth, token in enumerate(emitted[: len(copy)]):
            rates.read(depth, float(token == copy[depth]))
            if token != copy[depth]:
                break

    def _learn(self, row: int, widths: Widths, outcome: Outcome) -> None:
        """Count the places on the accepted path."""
        session = self.draft
        proposal = self.proposal
        assert session is not None
        past = self.pasts[row]
        nodes = [0, *outcome.paths[row]][: len(widths)]
        if proposal.q_BEV is None:
            emitted = outcome.tokens[row]
            for depth, node in enumerate(nodes):
                ranks = session.best_at(row, depth, node)
                rank = ranks.index(emitted[depth]) if emitted[depth] in ranks else 4
                past.draft.read(depth, float(rank == 0))
                if rank:
                    past.draft.read_siblings(1.0, [float(rank < k) for k in (2, 3, 4)])
            return
        tree_row = row if proposal.tree.rows > 1 else 0
        groups = proposal.tree.groups_RM[tree_row].tolist()
        p_MV = outcome.p_BMV[row]
        q_EV = proposal.q_BEV[row]
        alphas: list[float] = []
        for depth, node in enumerate(nodes):
            q_V = q_EV[groups[node] * proposal.drafts]
            alphas.append(float(torch.minimum(p_MV[node], q_V).sum()))
            past.draft.read(depth, alphas[depth])
        if not past.rest:
            root_q_1V = q_EV[:1]
            first = proposal.tokens_BM[row, 1]
            left_1V = residual(p_MV[:1], root_q_1V)
            others_1V = without(root_q_1V, first.view(1, 1))
            second = min(float(torch.minimum(left_1V, others_1V).sum()), 1.0)
            chances = [1 - (1 - second) ** power for power in LATER]
            past.draft.read_siblings(1.0 - alphas[0], chances)


@lru_cache(maxsize=256)
def paths_of(widths: Widths) -> frozenset[Widths]:
    """The paths of ranks to the nodes of a tree."""
    tree = kary(widths)
    paths: list[Widths] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, rank))
    return frozenset(paths)


@lru_cache(maxsize=256)
def joined_paths(several: tuple[Widths, ...]) -> list[Widths]:
    """The paths of some trees laid over one another, breadth first."""
    paths = frozenset[Widths]().union(*map(paths_of, several))
    return sorted(paths, key=lambda path: (len(path), path))


@lru_cache(maxsize=64)
def _as_in(tree: TreeBatch, whole: Tree) -> TreeBatch:
    """A tree with the bounds of the whole one, by which rules assign uniforms."""
    most = max(whole.widths)
    wider = tree.padded(1, tree.parents_RN.shape[1], most)
    return replace(wider, widths=whole.widths[: tree.depth])
