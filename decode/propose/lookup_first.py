"""Prompt lookup first, a network where it finds nothing.

Whether a row copies or its network drafts depends only on the row's text, so every verifier that is
valid for the network stays valid. A copied chain counts as drawn from distributions with one token.

Legend: B rows, N drafted nodes, M = N + 1 with the root, D depth, E groups of siblings, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftsmith.decode.propose.network_proposer import NetworkProposer
from draftsmith.decode.propose.prompt_lookup import NgramIndex, PromptLookupProposer
from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.tree import Drawing, Tree, TreeShape
from draftsmith.decode.tree_batch import chain_batch, mix, mix_rows

# Fewest tokens that match before lookup drafts in the place of a network.
LEAST_MATCH = 2


class LookupFirst(Proposer):
    """Copies what followed the same tokens earlier in a row's text; where fewer than `min_ngram`
    tokens match, `draft` drafts.
    """

    def __init__(self, draft: NetworkProposer, min_ngram: int = LEAST_MATCH) -> None:
        self.draft = draft
        self.lookup = PromptLookupProposer(min_ngram=min_ngram)
        self.name = draft.name
        self.drafts = draft.drafts
        self.deepest = draft.deepest
        self.hidden_layers = draft.hidden_layers

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        return self.draft.drawings(tree)

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        self.draft.check(target, tree)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.draft.check_lengths(prompts, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        session = LookupFirstSession(self, setup)
        self.steps = self.draft.steps
        return session


class LookupFirstSession(Session):
    """The rows of one `generate` call: their texts, and the session of the network."""

    def __init__(self, proposer: LookupFirst, setup: SessionSetup) -> None:
        # A row whose batch mates copied for long has many pending tokens behind the longest row.
        self.draft = proposer.draft.start(replace(setup, max_new_tokens=2 * setup.max_new_tokens))
        self.texts: list[NgramIndex] = [proposer.lookup.row(prompt) for prompt in setup.prompts]
        self.setup = setup
        self.drafts = proposer.drafts
        self.copied: list[bool] = []
        self.asked = True  # whether the network drafted in this step
        tree = setup.tree
        # As in `TextSession`, uniforms are assigned by the widths of the whole tree.
        self.widths = tree.widths if isinstance(tree, Tree) else (tree.beam,) * tree.depth
        self.stop = tree.stop if isinstance(tree, Tree) else 0.0

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Copy for the rows that match, and draft only if a row does not. Recorded steps draft
        always: pending tokens of other numbers would be other shapes.
        """
        depth = self.setup.tree.depth
        found = [text.copied(depth, self.stop) for text in self.texts]
        self.copied = [bool(tokens) for tokens in found]
        self.asked = bool(self.setup.compile) or not all(self.copied)
        if not any(self.copied):
            return self.draft.propose(u_BN)
        # A stop ends some copies early. Recorded steps keep their shape.
        size = depth if self.setup.compile else max(map(len, found))
        drafted = [[-1, *tokens, *[-1] * (size - len(tokens))] for tokens in found]
        copies = self._copies(torch.tensor(drafted, device=self.setup.device))
        if self.asked:
            copies = _mixed(self.copied, copies, self.draft.propose(u_BN))
        return replace(copies, copied=tuple(self.copied))

    def _copies(self, tokens_BM: Tensor) -> Proposal:
        drawing = self.setup.drawing
        q_BEV = None
        if drawing != "deterministic":
            tokens_BD1 = tokens_BM[:, 1:, None].clamp(min=0)
            rows, depth, _ = tokens_BD1.shape
            q_BDV = torch.zeros(rows, depth, self.setup.vocabulary, device=tokens_BM.device)
            # A chain that a stop ends has no law behind its end.
            q_BDV.scatter_(2, tokens_BD1, (tokens_BM[:, 1:, None] >= 0).float())
            q_BEV = q_BDV.repeat_interleave(self.drafts, dim=1)
        tree = chain_batch(tokens_BM.shape[1] - 1, self.widths, self.setup.device)
        return Proposal(tree, tokens_BM, q_BEV, drawing, self.drafts)

    def commit(self, outcome: Outcome) -> None:
        for text, emitted in zip(self.texts, outcome.tokens, strict=True):
            text.read(emitted)
        if not self.asked:
            self.draft.network.skip(outcome)
            return
        # The network has forwarded nothing of what was copied.
        pairs = zip(outcome.paths, self.copied, strict=True)
        paths = [[] if copied else path for path, copied in pairs]
        self.draft.commit(replace(outcome, paths=paths))

    def select_rows(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.draft.select_rows(rows)


def _mixed(copied: Sequence[bool], copies: Proposal, drafts: Proposal) -> Proposal:
    """Return the copies in the rows that copied, and the drafts in the others."""
    copied_B = torch.tensor(copied, device=copies.tokens_BM.device)
    nodes = max(copies.tokens_BM.shape[1], drafts.tokens_BM.shape[1])
    tokens_BM = mix_rows(
        copied_B, _padded(copies.tokens_BM, nodes, -1), _padded(drafts.tokens_BM, nodes, -1)
    )
    q_BEV = drafts.q_BEV
    if q_BEV is not None and copies.q_BEV is not None:
        slots = max(copies.q_BEV.shape[1], q_BEV.shape[1])
        q_BEV = mix_rows(copied_B, _padded(copies.q_BEV, slots, 0), _padded(q_BEV, slots, 0))
    tree = mix(copied_B, copies.tree, drafts.tree)
    return replace(drafts, tree=tree, tokens_BM=tokens_BM, q_BEV=q_BEV)


def _padded(values: Tensor, size: int, value: int) -> Tensor:
    """Return values with `size` entries along the second axis."""
    behind = (0, 0) * (values.ndim - 2) + (0, size - values.shape[1])
    return pad(values, behind, value=value)
