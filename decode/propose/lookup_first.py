"""Prompt lookup beside a network: copies are a chain next to the network's tree, which keeps every
verifier (`verify.copies`). After a long match they stand alone, and the network is not asked.

What is copied, and whether alone, depends only on the row's text.

Legend: B rows, N drafted nodes, M = N + 1 with the root, C copied tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.prompt_lookup import NgramIndex, PromptLookupProposer
from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.supported_models import ability, check_tree
from draftsmith.decode.tree import Drawing, Tree, TreeShape
from draftsmith.decode.tree_batch import chain_batch

# Tokens that match before lookup copies in the place of a network. On SmolLM2's answers that loses
# at most 2 % of the tokens per call, and saves up to half of the network's steps.
ALONE = 8
# The same where one of the two must do.
LEAST_MATCH = 2
# What a target verifies at least where copies stand beside a tree.
BESIDE = Tree((-1, -1))


def stands_beside(device: torch.device, trees: bool) -> bool:
    """Whether copies stand beside a network's tree, not in its place. trees: whether the target
    verifies trees.

    On a CPU every token that a step verifies costs: with both, SmolLM2 wrote 4 to 22 % fewer tokens
    in a second of a processor.
    """
    return trees and device.type != "cpu"


class LookupFirst(Proposer):
    """Copies what followed the same tokens earlier in a row's text, beside what `draft` drafts;
    where `alone` tokens match, `draft` is left out. beside: null is `stands_beside`.
    """

    def __init__(
        self, draft: NetworkProposer, alone: int = ALONE, beside: bool | None = None
    ) -> None:
        self.draft = draft
        self.alone = alone
        self.beside = beside
        self.name = draft.name
        self.drafts = draft.drafts
        self.deepest = draft.deepest
        self.hidden_layers = draft.hidden_layers

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        return self.draft.drawings(tree)

    def longest_copy(self, tree: TreeShape) -> int:
        return tree.depth

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        self.draft.check(target, tree)
        if self.beside:
            check_tree(target, ability(target), BESIDE)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.draft.check_lengths(prompts, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        session = LookupFirstSession(self, setup)
        self.steps = self.draft.steps
        return session


def copy_at(
    text: NgramIndex, length: int, alone: int = ALONE, *, stop: float = 0.0, beside: bool = True
) -> tuple[list[int], bool]:
    """Return what is copied at the end of a text, at most `length` tokens, and whether it stands
    alone. beside: as `stands_beside`.
    """
    matching = text.matching(alone)
    stands = matching >= (alone if beside else min(alone, LEAST_MATCH))
    return text.copied(length, stop) if beside or stands else [], stands


def texts_of(setup: SessionSetup) -> list[NgramIndex]:
    """What each row can copy from."""
    lookup = PromptLookupProposer()
    return [lookup.row(prompt) for prompt in setup.prompts]


def longer(setup: SessionSetup) -> SessionSetup:
    """The options of a network that does not draft at every step: a row whose batch mates copied
    for long has many pending tokens behind the longest row.
    """
    return replace(setup, max_new_tokens=2 * setup.max_new_tokens)


def nothing(setup: SessionSetup, rows: int) -> Proposal:
    """A proposal without a draft."""
    roots_B1 = torch.full((rows, 1), -1, device=setup.device)
    return Proposal(chain_batch(0, (), setup.device), roots_B1, None, setup.drawing)


def with_copies(proposal: Proposal, copies: Sequence[Sequence[int]], size: int) -> Proposal:
    """A proposal with these tokens by row beside its tree, padded to `size`."""
    if not size:
        return proposal
    padded = [[*tokens, *[-1] * (size - len(tokens))] for tokens in copies]
    return replace(proposal, copies_BC=torch.tensor(padded, device=proposal.tokens_BM.device))


def on_tree(outcome: Outcome, nodes: int) -> Outcome:
    """An outcome as the network sees it: it has forwarded nothing of what was copied."""
    paths = [path if path and path[0] < nodes else [] for path in outcome.paths]
    return replace(outcome, paths=paths)


class LookupFirstSession(Session):
    """The rows of one `generate` call: their texts, and the session of the network."""

    def __init__(self, proposer: LookupFirst, setup: SessionSetup) -> None:
        self.draft = proposer.draft.start(longer(setup))
        self.texts = texts_of(setup)
        self.alone = proposer.alone
        beside = proposer.beside
        self.beside = stands_beside(setup.device, setup.trees) if beside is None else beside
        self.setup = setup
        self.asked = True  # whether the network drafted in this step
        self.nodes = 1  # of its tree, the root included
        self.stop = setup.tree.stop if isinstance(setup.tree, Tree) else 0.0

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Copy for the rows that match, and draft unless all copies stand alone. Recorded steps
        draft always: pending tokens of other numbers would be other shapes.
        """
        setup = self.setup
        depth = setup.tree.depth
        copies: list[list[int]] = []
        alone: list[bool] = []
        for text in self.texts:
            tokens, stands = copy_at(text, depth, self.alone, stop=self.stop, beside=self.beside)
            copies.append(tokens)
            alone.append(stands)
        self.asked = bool(setup.compile) or not all(alone)
        proposal = self.draft.propose(u_BN) if self.asked else nothing(setup, len(alone))
        if self.asked and any(alone):
            alone_B1 = torch.tensor(alone, device=setup.device).unsqueeze(1)
            tokens_BM = proposal.tokens_BM.masked_fill(alone_B1, -1)
            proposal = replace(proposal, tokens_BM=tokens_BM)
        self.nodes = proposal.nodes
        # Recorded steps keep their shape.
        return with_copies(proposal, copies, depth if setup.compile else max(map(len, copies)))

    def commit(self, outcome: Outcome) -> None:
        for text, emitted in zip(self.texts, outcome.tokens, strict=True):
            text.read(emitted)
        if self.asked:
            self.draft.commit(on_tree(outcome, self.nodes))
        else:
            self.draft.network.skip(outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.draft.select_rows(rows)
