"""A draft of another tokenizer drafts freely, and its text becomes the target's tokens: string-level exact match.

The draft is greedy, so that the text so far determines what is drafted, and the rules for such drafts apply; q is not
needed. Unlike token-level intersection (`draft_model`) the draft uses its whole vocabulary; what it writes counts where
the target's tokenizer spells it as the target goes on to (arXiv 2502.05202).

Legend: B rows, W pending tokens of the draft, V its vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.packed_linear import Packs
from decode.propose.draft_model import slots_per_step
from decode.propose.drafting_plan import DraftingPlan
from decode.propose.network import pending_block
from decode.propose.protocol import Outcome, Proposal, Session, SessionSetup
from decode.propose.text_proposer import EMPTY, FlatTrie, Forest, TextProposer, check_static
from decode.runner import Runner
from decode.supported_models import attention_windows, check_context
from decode.tree import Tree, TreeShape
from drafts.vocabulary import VocabularyMap, vocabulary_map
from draftsmith_core.models import context_length

# Tokens of the draft that one emitted token may add to its context; of more the last are read.
_MOST_PIECES = 4


class StringMatchProposer(TextProposer):
    """Drafts text with one language model of another tokenizer (`drafts.vocabulary.attach`)."""

    name = "string_match"

    def __init__(self, models: PreTrainedModel | Sequence[PreTrainedModel], *, fast: bool = True) -> None:
        own = [models] if isinstance(models, PreTrainedModel) else list(models)
        if len(own) != 1:
            raise ValueError(f"string_match drafts with one language model, and {len(own)} were given; give one")
        words = vocabulary_map(own[0])
        if words is None or words.encode is None:
            raise ValueError(
                "string_match is for a draft of another tokenizer, and this one has the target's; use proposer draft"
            )
        self.model, self.words = own[0], words
        self._packs = Packs(self.model) if fast else False
        self._windows, self._limit = attention_windows(self.model), context_length(self.model)

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse what is no plain chain: a text has one continuation."""
        if not check_static(self.name, tree).is_chain:
            raise ValueError(f"string_match drafts one text; use a chain, such as chain:{min(tree.depth, 8)}")

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse what does not fit the context of the draft, and a draft that was put back into training."""
        if self.model.training:
            raise ValueError("the draft is in training mode; call eval() on it first, dropout would change its drafts")
        read = [self.words.translate(prompt) for prompt in prompts]
        check_context("draft", self._limit, read, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        """Prefill the draft's cache with every prompt but its last token, in its own tokens."""
        assert isinstance(setup.tree, Tree)
        runner = Runner(self.model, self._windows, self._limit, fast=self._packs)
        known = [self.words.translate(prompt[:-1]) for prompt in setup.prompts]
        runner.prefill(known, _MOST_PIECES * (setup.max_new_tokens + setup.tree.depth + 2) + slots_per_step(setup.tree))
        plan = DraftingPlan.build(setup.tree, runner.device, setup.device)
        return StringMatchSession(runner, self.words, plan, Forest(setup.tree, setup.device), setup.prompts)


class StringMatchSession:
    """The draft's cache over the rows, its pending tokens, and each row's last token, beside which text is spelled."""

    def __init__(
        self, runner: Runner, words: VocabularyMap, plan: DraftingPlan, forest: Forest, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.runner, self.words, self.plan, self.forest = runner, words, plan, forest
        self._roots: list[int | None] = [prompt[-1] for prompt in prompts]
        self._pending = [words.translate(prompt[-1:])[-_MOST_PIECES:] for prompt in prompts]

    def propose(self, u_BN: Tensor | None) -> Proposal:
        """Write as many tokens as the chain is long, and spell them in the target's."""
        tokens_BW, self._lead = self.runner.open_pending(self._pending)
        self._width = tokens_BW.shape[1]
        block = pending_block(self._width, self.runner.device)
        drafted = [self._likeliest(self.runner.forward(tokens_BW, block, keep_logits=1)[0])]
        for depth in range(1, self.plan.tree.depth):
            block = self.plan.block(depth, self._width)
            drafted.append(self._likeliest(self.runner.forward(drafted[-1], block)[0]))
        written = torch.cat(drafted, dim=1).tolist()
        rows = zip(self._roots, written, strict=True)
        return self.forest.proposal([EMPTY if root is None else self._spelled(root, ids) for root, ids in rows])

    @staticmethod
    def _likeliest(logits_BqV: Tensor) -> Tensor:
        return logits_BqV[:, -1:].argmax(-1)

    def _spelled(self, root: int, ids: Sequence[int]) -> FlatTrie:
        trie = self.forest.trie()
        trie.add(self.words.spell(root, ids))
        return trie.flatten()

    def commit(self, outcome: Outcome) -> None:
        """Keep what was pending; what was emitted is pending now, in the draft's tokens."""
        live = [bool(tokens) for tokens in outcome.tokens]
        self.runner.keep(
            [[*range(lead, self._width)] if alive else [] for lead, alive in zip(self._lead, live, strict=True)]
        )
        for row, emitted in enumerate(outcome.tokens):
            if emitted:
                self._roots[row] = emitted[-1]
                self._pending[row] = self.words.translate(emitted)[-_MOST_PIECES * len(emitted) :]
            else:
                self.runner.finish(row)
                self._roots[row], self._pending[row] = None, self._pending[row][-1:]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self.runner.select_rows(rows)
        self._roots = [self._roots[row] for row in rows]
        self._pending = [self._pending[row] for row in rows]

    def join(self, other: "StringMatchSession") -> None:
        """Append the rows of another session of the same proposer."""
        self.runner.join(other.runner)
        self._roots += other._roots
        self._pending += other._pending
