"""Heads on the target's features draft the tree: EAGLE, EAGLE-3, Medusa, Hydra, and blockwise parallel decoding.

Legend: B rows, W pending tokens, e nodes of a level, E nodes expanded so far, d depth, K heads, T positions, V
vocabulary, H feature size.

A feature is the target's hidden state at a position; the token after it was chosen from it. EAGLE heads forward every
token of the text with the feature of the position before it, and drafted tokens with features that the head itself
predicted. Once the target has scored them, the accepted ones are forwarded again with true features (arXiv 2401.15077,
section 3). Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109) heads have no cache: they read the feature from which
the root was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.defaults import default_tree
from decode.packed_weights import packs_of
from decode.propose.network import Frontier, Network, StaticCall, fit_vocabulary, pending_block
from decode.propose.network_proposer import NetworkProposer, slots_per_step
from decode.propose.protocol import Outcome, SessionSetup
from decode.runner import Block, Runner
from decode.static_steps import steps_for
from decode.tree import Tree, TreeShape
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.hydra import HydraHeads
from drafts.heads.medusa import MedusaHeads
from drafts.load import depth_limit

AnyHead = EagleHead | Eagle3Head | MedusaHeads | HydraHeads


class HeadProposer(NetworkProposer):
    """Drafts with a trained head; `chains_only` makes independent heads blockwise parallel decoding (Stern et al. 2018,
    arXiv 1811.03115).
    """

    def __init__(self, head: AnyHead, *, chains_only: bool = False, fast: bool = True) -> None:
        super().__init__()
        self.head = head
        self.name = f"draft head {type(head).__name__}"
        self.hidden_layers = tuple(head.hidden_layers)
        self._chains_only = chains_only
        self._model = _HeadAsModel(head) if isinstance(head, EagleHead | Eagle3Head) else None
        self._packs = packs_of(self._model) if self._model is not None and fast else None

    def default_tree(self) -> Tree:
        """The usual chain, no longer than there are heads."""
        return default_tree(heads=depth_limit(self.head))

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        """Refuse a tree that is deeper than there are heads, and a target of another size."""
        width = int(target.config.get_text_config().hidden_size)
        reads = self.head.config.target_hidden_size if isinstance(self.head, Eagle3Head) else feature_size(self.head)
        if reads != width:
            raise ValueError(f"head for hidden size {reads}, target has {width}; use its own target")
        heads = depth_limit(self.head) or tree.depth
        if tree.depth > heads:
            raise ValueError(
                f"tree of depth {tree.depth}, but there are {heads} heads; use a tree such as chain:{heads}"
            )
        if self._chains_only and not tree.is_chain:
            raise ValueError(f"blockwise decoding drafts chains only; use chain:{tree.depth}, or proposer medusa")

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse a head in training. Heads reach as far as their target, whose own context is checked."""
        if self.head.training:
            raise ValueError("the head is in training mode; call eval() on it first")

    def network(self, setup: SessionSetup) -> Network:
        """The head over the features of the prompts."""
        if self._model is None:
            kind = MedusaNetwork if isinstance(self.head, MedusaHeads) else HydraNetwork
            return kind(self.head, setup)
        self.steps = steps_for([self._model], setup.compile, False, self.steps)
        steps = self.steps[0] if self.steps else None
        runner = Runner(self._model, {"full_attention": None}, None, self._packs, steps)  # type: ignore[arg-type]
        return EagleNetwork(self._model, runner, setup)


def feature_size(head: AnyHead) -> int:
    """Width of the features that a head drafts with; an EAGLE-3 head fuses them from states of the target's width."""
    return head.config.layer.hidden_size if isinstance(head, EagleHead | Eagle3Head) else head.config.hidden_size


def last_features(prompts: Sequence[Sequence[int]], hidden_BTH: Tensor) -> list[Tensor]:
    """By row `[H]`: the state that the last prompt token was chosen from; zeros when no token is before it."""
    return [
        hidden_BTH[row, len(prompt) - 2] if len(prompt) > 1 else hidden_BTH.new_zeros(hidden_BTH.shape[2])
        for row, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class _Output:
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


@dataclass(frozen=True)
class _HeadConfig:
    """What a `Runner` reads from a configuration."""

    num_hidden_layers: int
    hidden_size: int

    def get_text_config(self, decoder: bool = True) -> "_HeadConfig":
        return self


class _HeadAsModel(nn.Module):
    """An EAGLE head in the form of a model for a `Runner`, which passes tokens only: `features_BTH` holds the features
    that belong to the tokens of the coming forwards.
    """

    def __init__(self, head: EagleHead | Eagle3Head) -> None:
        super().__init__()
        self.head: EagleHead | Eagle3Head = head
        self.features_BTH: Tensor | None = None
        self.config: Any = _HeadConfig(1, feature_size(head))
        weight = next(head.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.head

    def allocate(self, cache: TreeCache) -> None:
        """Give the cache its memory, by a forward of one token."""
        one_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        size: int = self.config.hidden_size
        self.head(one_11, torch.zeros(1, 1, size, dtype=self.dtype, device=self.device), None, one_11, cache)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        past_key_values: Any,
        use_cache: bool,
        **options: Any,
    ) -> _Output:
        """Forward tokens with the next `input_ids.shape[1]` features."""
        assert self.features_BTH is not None
        now = input_ids.shape[1]
        features, self.features_BTH = self.features_BTH.split([now, self.features_BTH.shape[1] - now], 1)
        logits, features = self.head(input_ids, features, attention_mask, position_ids, past_key_values)
        return _Output(logits, (features,))


class EagleNetwork(Network):
    """An EAGLE or EAGLE-3 head, its cache, and its pending tokens with their true features."""

    def __init__(self, model: _HeadAsModel, runner: Runner, setup: SessionSetup) -> None:
        self.model, self.runner, self.device, self._vocabulary = model, runner, setup.device, setup.vocabulary
        self.head = model.head
        features_BTH = self._fuse(setup.hidden_BTH)
        self.model.features_BTH = features_BTH[:, : max(features_BTH.shape[1] - 1, 0)]
        self.runner.prefill(
            [prompt[1:-1] for prompt in setup.prompts], setup.max_new_tokens + slots_per_step(setup.tree)
        )
        self._tokens = [[prompt[-1]] for prompt in setup.prompts]
        self._features = [feature.unsqueeze(0) for feature in last_features(setup.prompts, features_BTH)]

    def open(self) -> Tensor:
        """Forward the text that is new, with the target's features."""
        logits, features_BWH = self._forward(*self._pending(), 1)
        self._outputs_BEH = features_BWH[:, -1:]
        return logits

    def extend(self, frontier: Frontier) -> Tensor:
        """Forward a level with the features that the head predicted for the parents."""
        logits, features_BeH = self._forward(*self._level(frontier), 0)
        self._outputs_BEH = torch.cat([self._outputs_BEH, features_BeH], dim=1)
        return logits

    def static(self, frontier: Frontier | None) -> StaticCall | None:
        """The forward of `open` or `extend`; None if nothing is recorded."""
        if self.runner.steps is None:
            return None
        tokens_Bq, features_BqH, block = self._pending() if frontier is None else self._level(frontier)
        run = self.runner.static(block.offsets_RT.shape[1], 0, (0,))
        opening = frontier is None

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            logits, (features_BqH,) = run(*inputs)
            return self._logits(logits[:, -1:] if opening else logits), features_BqH

        def learn(features_BqH: Tensor) -> None:
            before = () if frontier is None else (self._outputs_BEH,)
            self._outputs_BEH = torch.cat([*before, features_BqH[:, -1:] if frontier is None else features_BqH], dim=1)

        inputs = (tokens_Bq, *self.runner.inputs(block), features_BqH)
        return StaticCall(self.runner.steps, run.name, forward, inputs, learn)

    def _pending(self) -> tuple[Tensor, Tensor, Block]:
        tokens_BW, self._lead = self.runner.open_pending(self._tokens)
        self.width = tokens_BW.shape[1]
        features = [nn.functional.pad(f, (0, 0, lead, 0)) for f, lead in zip(self._features, self._lead, strict=True)]
        return tokens_BW, torch.stack(features), pending_block(self.width, self.runner.device)

    def _level(self, frontier: Frontier) -> tuple[Tensor, Tensor, Block]:
        index = frontier.parents_Re.expand(frontier.tokens_Be.shape[0], -1).unsqueeze(2)
        features = self._outputs_BEH.gather(1, index.expand(-1, -1, self._outputs_BEH.shape[2]))
        return frontier.tokens_Be, features, frontier.block

    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """Keep only what was forwarded with true features; the emitted tokens now have theirs and are pending."""
        live = [bool(tokens) for tokens in outcome.tokens]
        self.runner.keep(
            [[*range(lead, self.width)] if alive else [] for lead, alive in zip(self._lead, live, strict=True)]
        )
        for row, tokens in enumerate(outcome.tokens):
            if not tokens:
                self.runner.finish(row)
                self._tokens[row], self._features[row] = self._tokens[row][-1:], self._features[row][-1:]
                continue
            self._tokens[row] = list(tokens)
            self._features[row] = self._fuse([state.unsqueeze(0) for state in outcome.hidden[row]])[0]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self.runner.select_rows(rows)
        self._tokens = [self._tokens[row] for row in rows]
        self._features = [self._features[row] for row in rows]

    def join(self, other: "EagleNetwork") -> None:
        """Append the rows of another network of the same kind."""
        self.runner.join(other.runner)
        self._tokens += other._tokens
        self._features += other._features

    def _fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        return self.head.fuse(hidden) if isinstance(self.head, Eagle3Head) else hidden[0]

    def _forward(self, tokens_Bq: Tensor, features_BqH: Tensor, block: Block, keep: int) -> tuple[Tensor, Tensor]:
        logits, (features,) = self.runner.forward(tokens_Bq, block, hidden_layers=(0,), features_BqH=features_BqH)
        return self._logits(logits[:, -keep:]), features

    def _logits(self, logits: Tensor) -> Tensor:
        if isinstance(self.head, Eagle3Head):
            logits = self.head.to_target(logits)
        return fit_vocabulary(logits, self._vocabulary)


class FeatureNetwork(Network):
    """Heads without a cache, which read the feature that each row's root was chosen from. Nothing is recorded."""

    def __init__(self, heads: nn.Module, setup: SessionSetup) -> None:
        self.heads, self.device, self._vocabulary = heads, setup.device, setup.vocabulary
        self._features = last_features(setup.prompts, setup.hidden_BTH[0])
        self._roots = [prompt[-1] for prompt in setup.prompts]

    def commit(self, expanded: Sequence[Sequence[int | None]], outcome: Outcome) -> None:
        """The new root was chosen at the last accepted node."""
        for row, states in enumerate(outcome.hidden):
            if outcome.tokens[row]:
                self._features[row], self._roots[row] = states[0][-1], outcome.tokens[row][-1]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch, in this order."""
        self._features = [self._features[row] for row in rows]
        self._roots = [self._roots[row] for row in rows]

    def join(self, other: "FeatureNetwork") -> None:
        """Append the rows of another network of the same kind."""
        self._features += other._features
        self._roots += other._roots


class MedusaNetwork(FeatureNetwork):
    """Medusa heads: head d gives the same distribution at all nodes of depth d + 1, whatever their path."""

    def open(self) -> Tensor:
        """Run all heads on the last features; returns the first head's logits, `[B, 1, V]`."""
        logits_BKV = self.heads(torch.stack(self._features).unsqueeze(1))[:, 0]
        self._logits_BKV = fit_vocabulary(logits_BKV, self._vocabulary)
        self._depth = 0
        return self._logits_BKV[:, :1]

    def extend(self, frontier: Frontier) -> Tensor:
        """The next head's logits, repeated for every node."""
        self._depth += 1
        return self._logits_BKV[:, self._depth : self._depth + 1].expand(-1, frontier.tokens_Be.shape[1], -1)


class HydraNetwork(FeatureNetwork):
    """Hydra heads: head d reads the feature and the tokens from the root down to a node of depth d."""

    reads_paths = True

    def open(self) -> Tensor:
        """The first head, below the root."""
        self._features_B1H = torch.stack(self._features).unsqueeze(1)
        self._roots_B11 = torch.tensor(self._roots, device=self._features_B1H.device).view(-1, 1, 1)
        return fit_vocabulary(self.heads(self._features_B1H, self._roots_B11), self._vocabulary)

    def extend(self, frontier: Frontier) -> Tensor:
        """The head of this depth, below every node."""
        count = frontier.tokens_Be.shape[1]
        tokens_Bed = torch.cat([self._roots_B11.expand(-1, count, -1), frontier.paths_Bed.clamp(min=0)], dim=2)
        logits = self.heads(self._features_B1H.expand(-1, count, -1), tokens_Bed)
        return fit_vocabulary(logits, self._vocabulary)
