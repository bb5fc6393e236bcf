"""Small language models draft the tree, one forward per level; several of them propose siblings in
turn (SpecInfer).

Legend: B rows, W pending tokens, e nodes of a level, d drafts, V vocabulary of the target.

A draft's cache lags behind the text by one or two *pending* tokens per row: the target's own token,
and the last node of a fully accepted path. They are forwarded first in the next step,
right-aligned, so that the root is the last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.models import context_length, vocabulary_size
from draftsmith.decode.compiled.runner import make_runner
from draftsmith.decode.compiled.steps import steps_for
from draftsmith.decode.packed_weights import packs_of
from draftsmith.decode.propose.network import (
    CachedNetwork,
    Frontier,
    Network,
    NetworkForward,
    NodeNumbers,
    fit_vocabulary,
    pending_block,
)
from draftsmith.decode.propose.network_proposer import NetworkProposer, slots_per_step
from draftsmith.decode.propose.protocol import Outcome, SessionSetup
from draftsmith.decode.runner import Runner
from draftsmith.decode.supported_models import ability, check_context, check_tree
from draftsmith.decode.tree import TreeShape
from draftsmith.drafts.vocabulary import VocabularyMap, vocabulary_map

# Most pieces of one target token that a draft with another vocabulary reads.
_MOST_PIECES = 4


class DraftModelProposer(NetworkProposer):
    """Drafts with one language model or several that share the target's tokenizer; vocabularies may
    be padded.

    A draft of another tokenizer (`drafts.vocabulary.attach`) drafts the tokens that both have
    (arXiv 2502.05202): its logits are restricted to them before anything is drawn, so q is exact.
    With several drafts the child of rank k is drawn from draft `k % len(models)`, independently of
    its siblings (SpecInfer, arXiv 2305.09781, section 4).
    """

    def __init__(
        self, models: PreTrainedModel | Sequence[PreTrainedModel], *, fast: bool = True
    ) -> None:
        super().__init__()
        self.models = [models] if isinstance(models, PreTrainedModel) else list(models)
        self.drafts = len(self.models)
        names = [model.name_or_path or type(model).__name__ for model in self.models]
        self.name = "draft " + " or ".join(names)
        self._abilities = [ability(model) for model in self.models]
        self._trees = all(able.drafts == "tree" for able in self._abilities)
        self._packs = [packs_of(model) if fast else None for model in self.models]
        self._words = [vocabulary_map(model) for model in self.models]
        self._fast = fast

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        if self.drafts > 1 and any(self._words):
            raise ValueError(
                f"{self.drafts} drafts of which one has another tokenizer cannot draft together; "
                "use one"
            )
        if tree.grows and self.drafts > 1:
            raise ValueError(
                f"{self.drafts} drafts cannot grow one tree by confidence; use one draft, or "
                "kary:4,2,2"
            )
        for model, able in zip(self.models, self._abilities, strict=True):
            check_tree(model, able, tree)

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if any(model.training for model in self.models):
            raise ValueError("a draft is in training mode; call eval() on it first")
        for model, words in zip(self.models, self._words, strict=True):
            read = prompts if words is None else [words.translate(prompt) for prompt in prompts]
            check_context("draft", context_length(model), read, max_new_tokens)

    def network(self, setup: SessionSetup) -> Network:
        # Drafts with caches of their own are not recorded.
        backend = setup.compile if self._trees else False
        self.steps = steps_for(self.models, backend, self._fast, self.steps)
        networks = []
        for index, model in enumerate(self.models):
            words = self._words[index]
            runner = make_runner(
                model,
                self._abilities[index],
                context_length(model),
                self._packs[index],
                self.steps[index] if self.steps else None,
            )
            largest = vocabulary_size(model) - 1
            cached = [_read(prompt[:-1], words, largest) for prompt in setup.prompts]
            roots = [_read(prompt[-1:], words, largest)[-_MOST_PIECES:] for prompt in setup.prompts]
            room = setup.max_new_tokens
            if words is not None:
                room = _MOST_PIECES * (setup.max_new_tokens + 2)
            runner.prefill(cached, room + slots_per_step(setup.tree))
            networks.append(_OneNetwork(runner, roots, setup.vocabulary, words))
        return networks[0] if len(networks) == 1 else _SeveralNetworks(networks)


def _read(tokens: Sequence[int], words: VocabularyMap | None, largest: int) -> list[int]:
    """Return the target's tokens as a draft reads them. It may lack the last ones."""
    if words is not None:
        return words.translate(tokens)
    return [min(token, largest) for token in tokens]


class _OneNetwork(CachedNetwork):
    def __init__(
        self,
        runner: Runner,
        pending: list[list[int]],
        vocabulary: int,
        words: VocabularyMap | None,
    ) -> None:
        self.runner = runner
        self.device = runner.device
        self.rows = pending
        self.vocabulary = vocabulary
        self.draft_vocabulary = vocabulary_size(runner.model)
        self.words = words
        if words is not None:
            self.draft_of_V = words.draft_of_V.to(runner.device)

    def forward(self, frontier: Frontier | None) -> NetworkForward:
        words = self.words
        if frontier is None:
            tokens_Bq, self.lead = self.runner.open_pending(self.rows)
            self.width = tokens_Bq.shape[1]
            bound = self.runner.bind(pending_block(self.width, self.device), keep_logits=1)
        else:
            tokens_Bq = frontier.tokens_Be
            if words is not None:
                tokens_Bq = self.draft_of_V[tokens_Bq]
            bound = self.runner.bind(frontier.block)

        def run(tokens_Bq: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, None]:
            # The target may emit a token that the draft has no embedding for; whatever the draft
            # then guesses is verified.
            if words is None and self.draft_vocabulary < self.vocabulary:
                tokens_Bq = tokens_Bq.clamp(max=self.draft_vocabulary - 1)
            logits, _ = bound.run(tokens_Bq, inputs)
            if words is None:
                return fit_vocabulary(logits, self.vocabulary), None
            return words.to_target(logits), None

        return NetworkForward(run, (tokens_Bq, bound.inputs), bound.name, call=self.runner.call)

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        # The accepted path stays in the cache; emitted tokens that were never forwarded become
        # pending.
        slots: list[list[int]] = []
        for row, (path, emitted) in enumerate(zip(expanded, outcome.tokens, strict=True)):
            cached = [self.width + index for index in path if index is not None]
            pending = range(self.lead[row], self.width)
            slots.append([*pending, *cached])
            self.rows[row] = self._pieces(emitted[len(cached) :])
        self.runner.keep(slots)

    def skip(self, outcome: Outcome) -> None:
        for row, emitted in enumerate(outcome.tokens):
            self.rows[row] = self.rows[row] + self._pieces(emitted)

    def _pieces(self, tokens: Sequence[int]) -> list[int]:
        if self.words is None:
            return list(tokens)
        # A token that is not shared can be many pieces, of which the last are read: whatever a
        # draft has read, its guesses are verified.
        pieces = []
        for token in tokens:
            pieces += self.words.translate([token])[-_MOST_PIECES:]
        return pieces


class _SeveralNetworks(Network):
    """Several drafts on one tree; at every node their logits stand side by side. Each records its
    own forwards.
    """

    def __init__(self, networks: Sequence[_OneNetwork]) -> None:
        self.networks = networks
        self.drafts = len(networks)
        self.device = networks[0].device

    def open(self) -> Tensor:
        logits = [network.open() for network in self.networks]
        self.width = self.networks[0].width
        return self._side_by_side(logits)

    def extend(self, frontier: Frontier) -> Tensor:
        return self._side_by_side([network.extend(frontier) for network in self.networks])

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        for network in self.networks:
            network.commit(expanded, outcome)

    def skip(self, outcome: Outcome) -> None:
        for network in self.networks:
            network.skip(outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        for network in self.networks:
            network.select_rows(rows)

    def _side_by_side(self, logits: list[Tensor]) -> Tensor:
        here = [logits_BeV.to(self.device) for logits_BeV in logits]
        return torch.stack(here, dim=2).flatten(1, 2)
