"""Heads on the target's features draft the tree: EAGLE, EAGLE-3, MTP, Medusa, Hydra, block
drafters, and blockwise parallel decoding.

Legend: B rows, W pending tokens, S slots of a block, e nodes of a level, E nodes expanded so far, d
depth, K heads, T positions, V vocabulary, H feature size.

A feature is the target's hidden state at a position; the token after it was chosen from it. EAGLE
and MTP heads forward drafted tokens with features that the head itself predicted, and accepted ones
again with true features (arXiv 2401.15077, section 3). Medusa (arXiv 2401.10774) and Hydra (arXiv
2402.05109) heads read the feature from which the root was chosen. A block drafter (DFlash, arXiv
2602.06036; DSpark, arXiv 2607.05147; JetSpec, arXiv 2606.18394) attends to the features of all
tokens before the root and forwards the root with the slots behind it at once; a Markov head then
adds what depends on the token above a node.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from draftsmith.core.transformers_api import FULL, CausalLMOutput
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.compiled.runner import make_runner
from draftsmith.decode.compiled.steps import steps_for
from draftsmith.decode.packed_weights import Packs, packs_of
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
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import Ability
from draftsmith.decode.tree import TreeShape
from draftsmith.drafts.heads import Head
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.load import depth_limit


class HeadProposer(NetworkProposer):
    """Drafts with a trained head. chains_only: blockwise parallel decoding (Stern et al. 2018,
    arXiv 1811.03115).
    """

    def __init__(self, head: Head, *, chains_only: bool = False, fast: bool = True) -> None:
        super().__init__()
        self.head = head
        self.name = f"draft head {type(head).__name__}"
        self.deepest = depth_limit(head)
        self.hidden_layers = tuple(head.hidden_layers)
        self._chains_only = chains_only
        self._model: HeadAsModel | None = None
        if isinstance(head, BlockHead):
            self._model = BlockAsModel(head)
        elif isinstance(head, FeatureHead):
            self._model = HeadAsModel(head)
        self._packs = packs_of(self._model or head) if fast else None

    def check(self, target: PreTrainedModel, tree: TreeShape) -> None:
        width = int(target.config.get_text_config().hidden_size)
        reads = self.head.borrowed.hidden_size
        if reads != width:
            raise ValueError(
                f"head for hidden size {reads}, target has {width}; use its own target"
            )
        heads = self.deepest or tree.depth
        if tree.depth > heads:
            block = isinstance(self.head, BlockHead)
            what = f"a block drafts {heads} tokens" if block else f"there are {heads} heads"
            raise ValueError(
                f"tree of depth {tree.depth}, but {what}; use for example chain:{heads}"
            )
        if self._chains_only and not tree.is_chain:
            raise ValueError(
                f"blockwise decoding drafts chains only; use chain:{tree.depth}, or proposer medusa"
            )

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if self.head.training:
            raise ValueError("the head is in training mode; call eval() on it first")

    def network(self, setup: SessionSetup) -> Network:
        if self._model is None:
            if isinstance(self.head, MedusaHeads):
                return _MedusaNetwork(self.head, self._packs, setup)
            assert isinstance(self.head, HydraHeads)
            return _HydraNetwork(self.head, self._packs, setup)
        self.steps = steps_for([self._model], setup.compile, False, self.steps)
        steps = self.steps[0] if self.steps else None
        window = None
        kind: type[_EagleNetwork] = _EagleNetwork
        if isinstance(self.head, BlockHead):
            window = self.head.config.window
            kind = _BlockNetwork
        able = Ability("tree", {FULL: window})
        runner = make_runner(self._model, able, None, self._packs, steps)  # type: ignore[arg-type]
        return kind(self._model, runner, setup)


class _Pending(NamedTuple):
    """What a head has not read of a row: its newest tokens, the root last, and features."""

    tokens: list[int]
    features_nH: Tensor


def _first_rows(prompts: Sequence[Sequence[int]], features_BTH: Tensor) -> list[_Pending]:
    """Return the last token of each prompt with the state that it was chosen from; zeros if no
    token is before it.
    """
    rows = []
    for prompt, features_TH in zip(prompts, features_BTH, strict=True):
        feature_1H = features_TH[len(prompt) - 2 : len(prompt) - 1]
        if len(prompt) == 1:
            feature_1H = features_TH.new_zeros(1, features_TH.shape[1])
        rows.append(_Pending([prompt[-1]], feature_1H))
    return rows


class HeadAsModel(nn.Module):
    """A head as a model for a `Runner`, which passes features beside the tokens."""

    def __init__(self, head: FeatureHead | BlockHead) -> None:
        super().__init__()
        self.head: Any = head
        sizes: Any = head.config
        self.config = PreTrainedConfig.from_dict(
            {"num_hidden_layers": sizes.num_hidden_layers, "hidden_size": sizes.hidden_size}
        )
        weight = next(head.parameters())
        self.dtype = weight.dtype
        self.device = weight.device
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.head

    def allocate(self, cache: TreeCache) -> None:
        """Give the cache its memory, by a forward of one token."""
        one_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        one_11H = torch.zeros(1, 1, self.config.hidden_size, dtype=self.dtype, device=self.device)
        self(one_11, None, one_11, cache, one_11H)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache,
        features_BTH: Tensor,
        **_: object,
    ) -> CausalLMOutput:
        """Forward every token with its feature. A head has no use for a runner's other options."""
        logits, features_BqH = self.head(
            input_ids, features_BTH, attention_mask, position_ids, cache
        )
        return CausalLMOutput(logits=logits, hidden_states=(features_BqH,))


class BlockAsModel(HeadAsModel):
    """A block drafter as a model: its first tokens are those of the features, the rest one block.
    It gives no logits; its hidden states are those of the slots that draft.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache,
        features_BTH: Tensor,
        **_: object,
    ) -> CausalLMOutput:
        """Cache the features; return the states of the slots that draft, none without a block."""
        known = features_BTH.shape[1]
        self.head.remember(features_BTH, position_ids[:, :known], cache)
        if known == input_ids.shape[1]:
            return CausalLMOutput(logits=features_BTH[:, :0])
        if isinstance(cache, TreeCache):
            cache.column += known  # where the block is written
        assert attention_mask is not None
        states = self.head.states(
            input_ids[:, known:], attention_mask[:, :, known:], position_ids[:, known:], cache
        )
        slots = self.head.slots(states)
        return CausalLMOutput(logits=slots[:, :0], hidden_states=(slots,))


class _HeadNetwork(Network):
    """A head; each row is a `_Pending`."""

    def __init__(self, head: Any, setup: SessionSetup) -> None:
        self.head = head
        self.device = setup.device
        self.vocabulary = setup.vocabulary

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        self.rows = self._new(outcome)

    def skip(self, outcome: Outcome) -> None:
        for row, new in enumerate(self._new(outcome)):
            tokens, features_nH = self.rows[row]
            features_nH = torch.cat([features_nH, new.features_nH])
            self.rows[row] = _Pending(tokens + new.tokens, features_nH)

    def _new(self, outcome: Outcome) -> list[_Pending]:
        rows = []
        for emitted, hidden in zip(outcome.tokens, outcome.hidden, strict=True):
            features_1nH = self.head.fuse([state.unsqueeze(0) for state in hidden])
            rows.append(_Pending(list(emitted), features_1nH[0]))
        return rows


class _EagleNetwork(_HeadNetwork, CachedNetwork):
    def __init__(self, model: HeadAsModel, runner: Runner, setup: SessionSetup) -> None:
        super().__init__(model.head, setup)
        self.runner = runner
        self._prefill(setup, self.head.fuse(setup.hidden_BTH))

    def _prefill(self, setup: SessionSetup, features_BTH: Tensor) -> None:
        room = setup.max_new_tokens + slots_per_step(setup.tree)
        prompts = [prompt[1:-1] for prompt in setup.prompts]
        self.runner.prefill(prompts, room, features_BTH=features_BTH[:, :-1])
        self.rows = _first_rows(setup.prompts, features_BTH)

    def forward(self, frontier: Frontier | None) -> NetworkForward:
        opening = frontier is None
        if frontier is None:
            tokens_Bq, self.lead = self.runner.open_pending([row.tokens for row in self.rows])
            self.known = self.width = tokens_Bq.shape[1]
            features_BqH = self._features()
            self.outputs_BEH = features_BqH[:, :0]
            block = pending_block(self.width, self.runner.device)
        else:
            tokens_Bq = frontier.tokens_Be
            block = frontier.block
            # A drafted token goes with the feature that the head predicted for its parent.
            parents_Re1 = frontier.parents_Re.unsqueeze(2)
            features_BqH = self.outputs_BEH.take_along_dim(parents_Re1, dim=1)
        bound = self.runner.bind(block, keep_logits=int(opening), hidden_layers=(0,))

        def run(
            tokens_Bq: Tensor, inputs: tuple[Tensor, ...], features_BqH: Tensor
        ) -> tuple[Tensor, Tensor]:
            logits, (features_BqH,) = bound.run(tokens_Bq, inputs, features_BqH)
            if opening:
                features_BqH = features_BqH[:, -1:]
            logits = self.head.to_target(logits)
            return fit_vocabulary(logits, self.vocabulary), features_BqH

        inputs = (tokens_Bq, bound.inputs, features_BqH)
        name = (opening, bound.name)
        return NetworkForward(run, inputs, name, learn=self._learn, call=self.runner.call)

    def _learn(self, features_BqH: Tensor | None) -> None:
        assert features_BqH is not None
        self.outputs_BEH = torch.cat([self.outputs_BEH, features_BqH], dim=1)

    def commit(self, expanded: NodeNumbers, outcome: Outcome) -> None:
        # Only tokens forwarded with true features stay; the emitted ones now have theirs and are
        # pending.
        self.runner.keep([range(lead, self.known) for lead in self.lead])
        super().commit(expanded, outcome)

    def _features(self) -> Tensor:
        """Features of the pending tokens, right-aligned as they are."""
        features = [row.features_nH for row in self.rows]
        if any(self.lead):
            pairs = zip(features, self.lead, strict=True)
            features = [pad(features_nH, (0, 0, lead, 0)) for features_nH, lead in pairs]
        return torch.stack(features)


class _BlockNetwork(_EagleNetwork):
    """Every step forwards the features of the tokens emitted in the last one, and the block that
    the newest begins.
    """

    def _prefill(self, setup: SessionSetup, features_BTH: Tensor) -> None:
        config = self.head.config
        room = setup.max_new_tokens + slots_per_step(setup.tree) + config.block_size
        prompts = [prompt[:-1] for prompt in setup.prompts]
        self.runner.prefill(prompts, room, features_BTH=features_BTH)
        self.deepest = setup.tree.depth
        # Torch multiplies up to four rows in bf16 slowly.
        packs = self.runner.packs
        self.draft_rows = packs.rows(self.head.rows_DH) if packs and self.head.reduced else None
        self.rows = [_Pending([prompt[-1]], features_BTH[0, :0]) for prompt in setup.prompts]

    def open(self) -> Tensor:
        config = self.head.config
        slots = config.block_size
        masks = [config.mask_token_id] * (slots - 1)
        blocks: list[list[int]] = []
        for tokens, features_nH in self.rows:
            blocks.append([0] * len(features_nH) + [tokens[-1]] + masks)
        tokens_BT, self.lead = self.runner.open_pending(blocks)
        self.known = tokens_BT.shape[1] - slots
        block = block_behind(self.known, slots, config.causal, self.runner.device)
        bound = self.runner.bind(block, hidden_layers=(0,))
        _, (states_BSH,) = self.runner.call(
            ("forward", bound.name), bound.run, tokens_BT, bound.inputs, self._features()
        )
        self.depth = 0
        self.states_BDH = states_BDH = states_BSH[:, : self.deepest]
        if self.draft_rows is None:
            self.raw_BDV = self.head.raw_logits(states_BDH)
        else:
            states_XH = states_BDH.flatten(0, 1).float().contiguous()
            bias_D = self.head.bias_D
            raw_XV = self.draft_rows.linear(states_XH, None if bias_D is None else bias_D.float())
            self.raw_BDV = raw_XV.unflatten(0, states_BDH.shape[:2]).to(states_BDH.dtype)
        self.roots_B1 = tokens_BT[:, self.known : self.known + 1]
        return self._logits_below(self.roots_B1)

    def extend(self, frontier: Frontier) -> Tensor:
        self.depth += 1
        return self._logits_below(frontier.tokens_Be)

    # `open` records the one forward; what depends on the tree is a few products.
    forward = Network.forward

    def confidence(self, tokens_Bc: Tensor) -> Tensor | None:
        if not self.head.config.confidence:
            return None
        sure_Bc = self._sure(self.depth + 1, tokens_Bc)
        return sure_Bc if self.depth else sure_Bc * self._sure(0, self.roots_B1)

    def _sure(self, slot: int, above_Be: Tensor) -> Tensor:
        states_BeH = self.states_BDH[:, slot : slot + 1].expand(-1, above_Be.shape[1], -1)
        return self.head.confidence(states_BeH, above_Be.clamp(min=0), slot)

    def _logits_below(self, above_Be: Tensor) -> Tensor:
        raw_BeV = self.raw_BDV[:, self.depth : self.depth + 1].expand(-1, above_Be.shape[1], -1)
        return fit_vocabulary(self.head.logits(raw_BeV, above_Be), self.vocabulary)


@lru_cache(maxsize=64)
def block_behind(width: int, slots: int, causal: bool, device: torch.device) -> Block:
    """The forward of `width` features, which attend to nothing, and one block, which attends to
    them and to itself.
    """
    total = width + slots
    sees_TT = torch.eye(total, dtype=torch.bool, device=device)
    sees_TT[width:] = True
    if causal:
        sees_TT = sees_TT.tril()
    return Block(torch.arange(total, device=device).unsqueeze(0), sees_TT[None], static=True)


class _FeatureNetwork(_HeadNetwork):
    """Heads without a cache, which read the root and its feature. Nothing is recorded."""

    def __init__(
        self, head: MedusaHeads | HydraHeads, packs: Packs | None, setup: SessionSetup
    ) -> None:
        super().__init__(head, setup)
        if packs is not None:
            packs.prepare(head)
        self.rows = _first_rows(setup.prompts, setup.hidden_BTH[0])

    def features(self) -> Tensor:
        return torch.stack([row.features_nH[-1:] for row in self.rows])


class _MedusaNetwork(_FeatureNetwork):
    """Head d gives all nodes of depth d + 1 the same distribution; it runs when it is needed."""

    def open(self) -> Tensor:
        self.open_B1H = self.features()
        self.depth = 0
        return self._logits()

    def extend(self, frontier: Frontier) -> Tensor:
        self.depth += 1
        return self._logits().expand(-1, frontier.tokens_Be.shape[1], -1)

    def _logits(self) -> Tensor:
        logits_B1V = self.head.logits_of(self.depth, self.open_B1H)
        return fit_vocabulary(logits_B1V, self.vocabulary)


class _HydraNetwork(_FeatureNetwork):
    """Head d reads the feature and the tokens from the root down to a node of depth d."""

    def open(self) -> Tensor:
        self.open_B1H = self.features()
        roots = [[row.tokens[-1:]] for row in self.rows]
        # The tokens from the root down to each node of the newest level, and how many nodes were
        # expanded before it.
        self.paths_Bed = torch.tensor(roots, device=self.open_B1H.device)
        self.before = 0
        return self._logits()

    def extend(self, frontier: Frontier) -> Tensor:
        above_Re1 = (frontier.parents_Re - self.before).unsqueeze(2)
        self.before += self.paths_Bed.shape[1]
        paths_Bed = self.paths_Bed.take_along_dim(above_Re1, dim=1)
        self.paths_Bed = torch.cat([paths_Bed, frontier.tokens_Be.unsqueeze(2)], dim=2)
        return self._logits()

    def _logits(self) -> Tensor:
        paths_Bed = self.paths_Bed
        features_BeH = self.open_B1H.expand(-1, paths_Bed.shape[1], -1)
        inputs_BeX = self.head.inputs(features_BeH, paths_Bed)
        logits_BeV = self.head.logits_of(paths_Bed.shape[2] - 1, inputs_BeX)
        return fit_vocabulary(logits_BeV, self.vocabulary)
