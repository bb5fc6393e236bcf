"""Small language models draft the tree, one forward per level; several of them propose siblings in turn (SpecInfer).

Legend: B rows, W pending tokens, e nodes of a level, d drafts, V vocabulary of the target.

A draft's cache lags behind the text: the draft never forwarded the target's own token, nor the last node of a fully
accepted path, because nothing hangs below it. These one or two *pending* tokens of each row are forwarded first in the
next step, right-aligned, so that the root is the last of them in every row.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.packed_weights import packs_of
from decode.propose.drafting_plan import DraftingPlan
from decode.propose.dynamic_tree import DynamicTreeSession
from decode.propose.network import Frontier, Network, StaticCall, fit_vocabulary, pending_block
from decode.propose.protocol import Outcome, Proposer, Session, SessionSetup
from decode.propose.static_tree import StaticTreeSession
from decode.runner import Block, Runner
from decode.static_steps import StaticSteps, steps_for
from decode.supported_models import attention_windows, check_context
from decode.tree import Drawing, DynamicTree, Tree, TreeShape
from drafts.vocabulary import VocabularyMap, vocabulary_map
from draftsmith_core.models import context_length, vocabulary_size

# One target token may be several tokens of a draft with another vocabulary: so many of them are read at most.
_MOST_PIECES = 4
# Plans by tree, the device that drafts and the device of the target.
Plans = dict[tuple[Tree, torch.device, torch.device], DraftingPlan]


class DraftModelProposer(Proposer):
    """Drafts with one language model or several that share the target's tokenizer.

    Their vocabularies may be padded to other sizes than the target's. One draft of another tokenizer
    (`drafts.vocabulary.attach`) drafts the tokens that both have, by token-level intersection (arXiv 2502.05202): its
    logits are restricted to them before anything is drawn, so q is exact. With several drafts the child of rank k is
    the choice of draft `k % len(models)`, drawn independently of its siblings (SpecInfer, arXiv 2305.09781, section 4).
    """

    def __init__(self, models: PreTrainedModel | Sequence[PreTrainedModel], *, fast: bool = True) -> None:
        self.models = [models] if isinstance(models, PreTrainedModel) else list(models)
        if not self.models:
            raise ValueError("no draft model was given; pass at least one")
        self.drafts = len(self.models)
        self.name = "draft " + " or ".join(model.name_or_path or type(model).__name__ for model in self.models)
        self._packs = [packs_of(model) if fast else None for model in self.models]
        self._windows = [attention_windows(model) for model in self.models]
        self._limits = [context_length(model) for model in self.models]
        self._words = [vocabulary_map(model) for model in self.models]
        self._plans: Plans = {}
        self._fast = fast
        self.steps: list[StaticSteps] = []

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        """Any method for one draft. With several, only independent draws let each sibling have its own distribution."""
        if tree.grows:
            return frozenset({"deterministic"})
        if self.drafts > 1:
            return frozenset({"with_replacement"})
        return frozenset({"without_replacement", "with_replacement", "top_and_one", "deterministic"})

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse what cannot be drafted for this target."""
        if self.drafts > 1 and any(self._words):
            raise ValueError(f"{self.drafts} drafts of which one has another tokenizer cannot draft together; use one")
        if tree.grows and self.drafts > 1:
            raise ValueError(f"{self.drafts} drafts cannot grow one tree by confidence; use one draft, or kary:4,2,2")

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse what does not fit the context of a draft, and a draft that was put back into training."""
        if any(model.training for model in self.models):
            raise ValueError(
                "a draft is in training mode; call eval() on it first, dropout would change what it drafts"
            )
        for limit, words in zip(self._limits, self._words, strict=True):
            read = prompts if words is None else [words.translate(prompt) for prompt in prompts]
            check_context("draft", limit, read, max_new_tokens)

    def start(self, setup: SessionSetup) -> Session:
        """Prefill the drafts' caches with every prompt but its last token."""
        networks: list[DraftModelNetwork] = []
        roots = [prompt[-1] for prompt in setup.prompts]
        self.steps = steps_for(self.models, setup.compile, self._fast, self.steps)
        every_steps: Sequence[StaticSteps | None] = self.steps or [None] * len(self.models)
        parts = zip(self.models, self._windows, self._limits, self._packs, self._words, every_steps, strict=True)
        for model, windows, limit, packs, words, steps in parts:
            runner = Runner(model, windows, limit, packs, steps)
            if words is None:
                largest = vocabulary_size(model) - 1
                known = [[min(token, largest) for token in prompt[:-1]] for prompt in setup.prompts]
                runner.prefill(known, setup.max_new_tokens + slots_per_step(setup.tree))
                networks.append(DraftModelNetwork(runner, [[root] for root in roots], setup.vocabulary))
                continue
            known = [words.translate(prompt[:-1]) for prompt in setup.prompts]
            runner.prefill(known, _MOST_PIECES * (setup.max_new_tokens + 2) + slots_per_step(setup.tree))
            pending = [words.translate([root])[-_MOST_PIECES:] for root in roots]
            networks.append(DraftModelNetwork(runner, pending, setup.vocabulary, words))
        network = networks[0] if len(networks) == 1 else SeveralNetworks(networks)
        return make_session(network, setup, self._plans, networks[0].runner.device)


def make_session(network: Network, setup: SessionSetup, plans: Plans, device: torch.device) -> Session:
    """The session of a network on `device` for a static tree, or for one that grows."""
    if isinstance(setup.tree, DynamicTree):
        return DynamicTreeSession(network, setup.tree, setup.sampling, setup.device)
    key = (setup.tree, device, setup.device)
    if key not in plans:
        plans[key] = DraftingPlan.build(setup.tree, device, setup.device)
    return StaticTreeSession(network, plans[key], setup.drawing, setup.sampling, recorded=bool(setup.compile))


def slots_per_step(tree: TreeShape) -> int:
    """Cache slots that one step needs behind the text: pending tokens and every node that may be expanded."""
    if isinstance(tree, DynamicTree):
        return tree.depth + 2 + max(tree.nodes, tree.beam * (tree.depth - 1))
    return tree.depth + 2 + tree.size


class DraftModelNetwork:
    """One draft model, its cache and its pending tokens."""

    drafts = 1
    reads_paths = False

    def __init__(
        self, runner: Runner, pending: list[list[int]], vocabulary: int, words: VocabularyMap | None = None
    ) -> None:
        """pending: tokens of the draft. words: for a draft of another vocabulary."""
        self.runner, self._pending, self._vocabulary, self._words = runner, pending, vocabulary, words
        if words is not None:
            self._draft_of_V = words.draft_of_V.to(runner.device)
        self._own = vocabulary_size(runner.model)
        self.width = 1

    def open(self) -> Tensor:
        """Forward the pending tokens."""
        tokens_BW, self._lead = self.runner.open_pending(self._pending)
        self.width = tokens_BW.shape[1]
        return self._forward(tokens_BW, pending_block(self.width, self.runner.device), 1)

    def extend(self, frontier: Frontier) -> Tensor:
        """Forward the nodes of a level."""
        tokens_Be = frontier.tokens_Be if self._words is None else self._draft_of_V[frontier.tokens_Be]
        return self._forward(tokens_Be, frontier.block, 0)

    def static(self, frontier: Frontier | None) -> StaticCall | None:
        """The forward of `open` (None) or `extend` as a function of tensors; None where nothing is recorded."""
        if self.runner.steps is None or self._words is not None:
            return None
        if frontier is None:
            tokens_Bq, self._lead = self.runner.open_pending(self._pending)
            self.width = tokens_Bq.shape[1]
            block = pending_block(self.width, self.runner.device)
        else:
            tokens_Bq, block = frontier.tokens_Be, frontier.block
        run = self.runner.static(block.offsets_RT.shape[1], 1 if frontier is None else 0)

        def forward(tokens_Bq: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            logits, _ = run(self._own_tokens(tokens_Bq), *rest)
            return (fit_vocabulary(logits, self._vocabulary),)

        return StaticCall(self.runner.steps, run.name, forward, (tokens_Bq, *self.runner.inputs(block)))

    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """Keep the accepted path in the cache; what was never forwarded becomes pending."""
        kept: list[list[int]] = []
        for row, (path, emitted) in enumerate(zip(expanded, outcome.tokens, strict=True)):
            if not emitted:
                kept.append([])
                continue
            cached = [index for index in path if index is not None]
            kept.append([*range(self._lead[row], self.width), *(self.width + index for index in cached)])
            new = list(emitted[len(cached) :])
            if self._words is not None:
                # What was drafted is shared, one token for one. Only the target's own token can be many pieces, of
                # which the last are read: whatever a draft has read, its guesses are verified.
                new = [*self._words.translate(new[:-1]), *self._words.translate(new[-1:])[-_MOST_PIECES:]]
            self._pending[row] = new
        self.runner.keep(kept)
        for row, emitted in enumerate(outcome.tokens):
            if not emitted:
                self.runner.finish(row)
                self._pending[row] = self._pending[row][-1:]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._pending)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self.runner.select_rows(rows)
        self._pending = [self._pending[row] for row in rows]

    def join(self, other: "DraftModelNetwork") -> None:
        """Append the rows of another network of the same kind."""
        self.runner.join(other.runner)
        self._pending += other._pending

    def _forward(self, tokens_Bq: Tensor, block: Block, keep_logits: int) -> Tensor:
        logits, _ = self.runner.forward(self._own_tokens(tokens_Bq), block, keep_logits=keep_logits)
        return fit_vocabulary(logits, self._vocabulary) if self._words is None else self._words.to_target(logits)

    def _own_tokens(self, tokens_Bq: Tensor) -> Tensor:
        # The target may emit a token that the draft has no embedding for; whatever the draft then guesses is verified
        # like anything else.
        fewer = self._words is None and self._own < self._vocabulary
        return tokens_Bq.clamp(max=self._own - 1) if fewer else tokens_Bq


class SeveralNetworks:
    """Several drafts on one tree; at every node their logits stand side by side."""

    reads_paths = False

    def __init__(self, networks: Sequence[DraftModelNetwork]) -> None:
        self.networks = networks
        self.drafts = len(networks)

    @property
    def width(self) -> int:
        """Pending tokens per row, the same for every draft."""
        return self.networks[0].width

    def open(self) -> Tensor:
        """Logits of every draft at the root."""
        return self._beside([network.open() for network in self.networks])

    def extend(self, frontier: Frontier) -> Tensor:
        """Logits of every draft at every node."""
        return self._beside([network.extend(frontier) for network in self.networks])

    def static(self, frontier: Frontier | None) -> StaticCall | None:
        """All forwards in one function, where they are recorded."""
        found = [network.static(frontier) for network in self.networks]
        calls = [call for call in found if call is not None]
        if len(calls) < len(found):
            return None
        counts = [len(call.inputs) for call in calls]

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            rest = iter(inputs)
            each = [call.function(*islice(rest, count))[0] for call, count in zip(calls, counts, strict=True)]
            return (self._beside(each),)

        inputs = tuple(tensor for call in calls for tensor in call.inputs)
        return StaticCall(calls[0].steps, tuple(call.name for call in calls), forward, inputs)

    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """All of them learn the same."""
        for network in self.networks:
            network.commit(expanded, outcome)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.networks[0].rows

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        for network in self.networks:
            network.select_rows(rows)

    def join(self, other: "SeveralNetworks") -> None:
        """Append the rows of another network of the same kind."""
        for network, theirs in zip(self.networks, other.networks, strict=True):
            network.join(theirs)

    def _beside(self, logits: list[Tensor]) -> Tensor:
        device = logits[0].device
        return torch.stack([each.to(device) for each in logits], dim=2).flatten(1, 2)
