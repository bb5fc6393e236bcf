"""`--tree auto`: at every step draft what promises most tokens a second, or nothing.

A row chooses by what a step costs (`decode.step_costs`, measured before) and by what was accepted
in its own text: never by the clock of the moment, nor above temperature 0 by its batch mates. So
the output stays the target's, and the same seed gives it again.

Legend: B rows, N drafted nodes, M = N + 1 with the root, C copied tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling
from draftsmith.decode.propose.acceptance import Acceptance, Rates
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.prompt_lookup import NgramIndex, PromptLookupProposer
from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.propose.static_tree import DraftingPlan, StaticTreeSession
from draftsmith.decode.step_costs import StepCosts
from draftsmith.decode.supported_models import ability, check_tree
from draftsmith.decode.tree import Drawing, Tree, TreeShape, tree_of_paths
from draftsmith.decode.tree_batch import TreeBatch, chain_batch
from draftsmith.decode.tree_spec import kary
from draftsmith.decode.verify import Verifier
from draftsmith.decode.verify.siblings import without
from draftsmith.decode.verify.tree_walk import residual

Widths = tuple[int, ...]
NOTHING: Widths = ()
CHAINS = (1, 2, 3, 4, 6, 8)
WIDE: tuple[Widths, ...] = ((2,), (4,), (2, 1), (2, 1, 1), (4, 1), (3, 2), (4, 2, 2))
# Lengths of copies, tokens that must match before one, and matches that promise more.
COPIES = (1, 2, 4, 8)
MATCH = 2
LONG_MATCH = 8
COPY_PRIOR = ((0.5, 0.7), (0.9,))
# Change only for so much more.
GAIN = 1.03
# Steps without the draft until it is tried again; twice as many each time that it does not pay.
PAUSE = 16
LONGEST_PAUSE = 512
# Steps until the second children are judged again, where that takes passes over the vocabulary.
SELDOM = 4
# Candidates drawn behind the second stay less often.
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


def name_of(widths: Widths) -> str:
    """The spec of a tree."""
    if not widths:
        return "no draft"
    if max(widths) == 1:
        return f"chain:{len(widths)}"
    return "kary:" + ",".join(map(str, widths))


@dataclass(frozen=True)
class Choice:
    """What a row drafts: a tree, or so many copied tokens."""

    widths: Widths = NOTHING
    copied: int = 0

    @property
    def name(self) -> str:
        return f"lookup:{self.copied}" if self.copied else name_of(self.widths)


class Past:
    """What the choice of a row depends on."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.draft = Acceptance(prior)
        self.copies = [Rates(rates) for rates in COPY_PRIOR]
        self.now = NOTHING
        self.idle = 0
        self.pause = PAUSE
        self.judged = 0

    def choose(self, copyable: int, long: bool, prices: "Prices") -> Choice:
        """Return what promises most tokens a second. copyable: tokens that could be copied; long:
        behind a long match.
        """
        rates = self.draft.by_depth()
        promised = {NOTHING: 1.0 / prices.trees[NOTHING]}
        for widths in prices.menu:
            promised[widths] = self.draft.tokens(widths, rates) / prices.trees[widths]
        best = max(promised, key=promised.__getitem__)
        if promised[best] > GAIN * promised[self.now]:
            self.now = best
        choice = Choice(self.now)
        highest = GAIN * promised[self.now]
        if copyable:
            copied = self.copies[long].by_depth()
            for count, seconds in prices.copies.items():
                promise = self.draft.tokens((1,) * count, copied) / seconds
                if count <= copyable and promise > highest:
                    choice, highest = Choice(copied=count), promise
        self.idle = 0 if choice.widths else self.idle + 1
        if choice.widths:
            self.pause = PAUSE
        elif prices.menu and self.idle > self.pause:
            self.idle = 0
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.draft.fade()
            choice = Choice(max(prices.menu, key=promised.__getitem__))
        return choice


class Prices:
    """Seconds of a step by choice, in a batch of `rows`."""

    def __init__(self, costs: StepCosts, trees: Sequence[Widths], rows: int) -> None:
        self.menu = trees
        self.trees = {widths: costs.step(widths, rows) for widths in (NOTHING, *trees)}
        self.copies = {count: costs.step((1,) * count, rows, drafts=False) for count in COPIES}


def relative_cost(chosen: Mapping[str, int], costs: StepCosts) -> float | None:
    """What the steps of `DecodeStats.chosen` cost, at batch 1, over as many without a draft; None
    if there was none.
    """
    seconds = 0.0
    for name, count in chosen.items():
        kind, _, body = name.partition(":")
        widths: Sequence[int] = NOTHING
        if kind == "kary":
            widths = list(map(int, body.split(",")))
        elif body:
            widths = (1,) * int(body)
        seconds += count * costs.step(widths, drafts=kind != "lookup")
    steps = sum(chosen.values())
    return seconds / steps / costs.step(NOTHING) if steps else None


def chooser(
    proposer: Proposer,
    target: PreTrainedModel,
    verifier: Verifier | None,
    costs: Costs,
    prior: Sequence[float],
) -> "ChoosingProposer | None":
    """Return what chooses for a proposer; None for one that drafts its own way: retrieval,
    lookahead and those of guests.
    """
    draft = proposer.draft if isinstance(proposer, LookupFirst) else proposer
    if isinstance(draft, PromptLookupProposer):
        return ChoosingProposer(None, costs)
    if not isinstance(draft, NetworkProposer):
        return None
    chains_only = verifier is not None and verifier.chains_only
    try:
        check_tree(target, ability(target), kary(WIDE[0]))
        draft.check(target, kary(WIDE[0]))
    except ValueError:
        chains_only = True
    return ChoosingProposer(draft, costs, prior, chains_only=chains_only)


class ChoosingProposer(Proposer):
    """Chooses for `draft`, a network's proposer or None for prompt lookup alone. costs: of steps.
    prior: what is known of the acceptance by depth. chains_only: for a target or a rule that takes
    no trees.
    """

    copies = True

    def __init__(
        self,
        draft: NetworkProposer | None,
        costs: Costs,
        prior: Sequence[float] = (0.5,),
        *,
        chains_only: bool = False,
    ) -> None:
        self.draft = draft
        self.costs = costs
        self.prior = prior
        self.menu: tuple[Widths, ...] = ()
        paths = {(0,) * length for length in range(1, COPIES[-1] + 1)}
        if draft is not None:
            self.name = draft.name
            self.drafts = draft.drafts
            self.hidden_layers = draft.hidden_layers
            self.menu = menu(draft.deepest, chains_only=chains_only)
            paths = set().union(*map(paths_of, self.menu))
        self.paths = sorted(paths, key=lambda path: (len(path), path))

    def default_tree(self) -> Tree:
        """The tree that holds all that are chosen from."""
        return tree_of_paths(self.paths)

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        if self.draft is None:
            return frozenset({"deterministic"})
        return self.draft.drawings(tree)

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        if self.draft is not None:
            self.draft.check(target, tree)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if self.draft is not None:
            self.draft.check_lengths(prompts, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        return ChoosingSession(self, setup)


class ChoosingSession(Session):
    """The rows of one `generate` call: their pasts and texts, and the session of the network."""

    def __init__(self, proposer: ChoosingProposer, setup: SessionSetup) -> None:
        self.proposer = proposer
        self.setup = setup
        self.costs = proposer.costs(setup.sampling)
        rows = len(setup.prompts)
        # At temperature 0 the text is the same whatever is drafted, so all rows learn together.
        self.together = setup.sampling.greedy
        if self.together:
            self.pasts = [Past(proposer.prior)] * rows
        else:
            self.pasts = [Past(proposer.prior) for _ in range(rows)]
        self.prices = Prices(self.costs, proposer.menu, rows if self.together else 1)
        lookup = PromptLookupProposer()
        self.texts: list[NgramIndex] = [lookup.row(prompt) for prompt in setup.prompts]
        self.draft: StaticTreeSession | None = None
        if proposer.draft is not None:
            # A row whose mates drafted without it has many pending tokens behind the longest.
            longer = replace(setup, max_new_tokens=2 * setup.max_new_tokens)
            session = proposer.draft.start(longer)
            assert isinstance(session, StaticTreeSession)
            session.watched = 4
            self.draft = session
        self.unread: list[Outcome] = []
        self.proposal: Proposal | None = None
        self.nodes = 1
        self.copies: list[list[int]] = []
        self.choices: list[Choice] = []

    def propose(self, u_BN: Tensor | None) -> Proposal:
        setup = self.setup
        self.copies = []
        self.choices = []
        for text, past in zip(self.texts, self.pasts, strict=True):
            matching = text.matching(LONG_MATCH)
            copy = text.copied(COPIES[-1], 0.0) if matching >= MATCH else []
            self.copies.append(copy)
            self.choices.append(past.choose(len(copy), matching >= LONG_MATCH, self.prices))
        drafted = tuple(sorted({choice.widths for choice in self.choices if choice.widths}))
        proposal = self._drafted(drafted, u_BN) if drafted else self._nothing()
        self.nodes = proposal.nodes
        self.proposal = proposal if drafted else None
        proposal = replace(proposal, names=[choice.name for choice in self.choices])
        longest = max(choice.copied for choice in self.choices)
        if not longest:
            return proposal
        padded = []
        for copy, choice in zip(self.copies, self.choices, strict=True):
            tokens = copy[: choice.copied]
            padded.append(tokens + [-1] * (longest - len(tokens)))
        return replace(proposal, copies_BC=torch.tensor(padded, device=setup.device))

    def _drafted(self, drafted: tuple[Widths, ...], u_BN: Tensor | None) -> Proposal:
        """Draft what the rows chose as one tree, without the nodes that a row did not choose."""
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
            # A node has its own uniform whatever else is drafted, and a rule its own by depth.
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

    def _nothing(self) -> Proposal:
        device = self.setup.device
        roots_B1 = torch.full((len(self.texts), 1), -1, device=device)
        return Proposal(chain_batch(0, (), device), roots_B1, None, self.setup.drawing)

    def _catch_up(self) -> None:
        """Let the network read the steps in which it did not draft, in one forward."""
        unread = self.unread
        self.unread = []
        if not unread:
            return
        assert self.draft is not None
        hidden = []
        tokens = []
        for row in range(len(self.texts)):
            layers = zip(*(outcome.hidden[row] for outcome in unread), strict=True)
            hidden.append([torch.cat(states) for states in layers])
            tokens.append([token for outcome in unread for token in outcome.tokens[row]])
        paths: list[list[int]] = [[] for _ in tokens]
        self.draft.network.skip(replace(unread[-1], paths=paths, tokens=tokens, hidden=hidden))

    def commit(self, outcome: Outcome) -> None:
        for row, (text, emitted) in enumerate(zip(self.texts, outcome.tokens, strict=True)):
            if self.copies[row]:
                self._learn_of_copy(row, emitted)
            text.read(emitted)
        if self.proposal is None or self.draft is None:
            if self.draft is not None:
                self.unread.append(outcome)
            return
        for row, choice in enumerate(self.choices):
            if choice.widths:
                self._learn(row, choice.widths, outcome)
        # The network has forwarded nothing of what was copied.
        paths = [path if path and path[0] < self.nodes else [] for path in outcome.paths]
        self.draft.commit(replace(outcome, paths=paths))

    def select_rows(self, rows: Sequence[int]) -> None:
        self._catch_up()
        self.texts = [self.texts[row] for row in rows]
        self.pasts = [self.pasts[row] for row in rows]
        if self.together:
            self.prices = Prices(self.costs, self.proposer.menu, len(rows))
        if self.draft is not None:
            self.draft.select_rows(rows)

    def _learn_of_copy(self, row: int, emitted: Sequence[int]) -> None:
        copy = self.copies[row]
        rates = self.pasts[row].copies[self.texts[row].matching(LONG_MATCH) >= LONG_MATCH]
        for depth, token in enumerate(emitted[: len(copy)]):
            rates.read(depth, float(token == copy[depth]))
            if token != copy[depth]:
                break

    def _learn(self, row: int, widths: Widths, outcome: Outcome) -> None:
        """Count the places on the accepted path."""
        session = self.draft
        proposal = self.proposal
        assert session is not None and proposal is not None
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
        groups = proposal.tree.groups_RM[tree_row, nodes] * proposal.drafts
        p_LV = outcome.p_BMV[row, nodes]
        q_LV = proposal.q_BEV[row, groups]
        alphas = torch.minimum(p_LV, q_LV).sum(-1).tolist()
        for depth, alpha in enumerate(alphas):
            past.draft.read(depth, alpha)
        past.judged += 1
        if past.judged % SELDOM == 1:
            first = proposal.tokens_BM[row, 1]
            left_1V = residual(p_LV[:1], q_LV[:1])
            others_1V = without(q_LV[:1], first.view(1, 1))
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
