"""Block drafters: one forward drafts a whole block of tokens from the target's states. DFlash,
DSpark and JetSpec are presets of one network.

A block is an anchor followed by MASK tokens. The anchor is the newest token; it has no target state
yet. The queries of a layer come from the block; its keys and values from the block and from the
context, H = norm(fc(states of several target layers)) of all tokens before the anchor. All layers
project the same H. A cache keeps the keys and values of the context and nothing of a block.

| preset | source | `sample_from_anchor` | `causal` | `markov_rank`, `confidence` |
|---|---|---|---|---|
| dflash | arXiv 2602.06036 | no: slot k drafts token anchor + k, slot 0 nothing | no | - |
| jetspec | arXiv 2606.18394 | no | yes | - |
| dspark | arXiv 2607.05147 | yes: slot k drafts token anchor + k + 1 | no | both |

With a Markov head (rank 256; in a narrow target a quarter of its width) W2 W1[previous token] is
added to a slot's logits. A block is then sampled left to right, and q stays exact. The confidence
of a slot estimates alpha there, given the token before it.

MASK is an id of the target's vocabulary, with the target's own embedding, because the layouts of
other engines have no place for an embedding of the draft's own. Without a reserved id, training
takes the rarest token of its data: an unused row, if the target has one. Masking goes by slot, not
by id, so the MASK token can still occur in text and be drafted.

On disk: the names of DeepSpec's and z-lab's checkpoints, without copies of the target's embedding
and projection.

Legend: B rows, T tokens, A anchors of a row, S slots of a block, N = A * S, P cached tokens, H
hidden size, V target vocabulary, D draft vocabulary, R Markov rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import layout_of
from draftsmith.core.io import JsonObject
from draftsmith.core.models import vocabulary_size
from draftsmith.core.transformers_api import (
    LAYER_CACHE,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)
from draftsmith.drafts.draft_vocabulary import DraftVocabulary
from draftsmith.drafts.heads.borrowed import borrow, dtype_of
from draftsmith.drafts.heads.eagle import LayerConfig, Rotary, draw
from draftsmith.drafts.heads.eagle3 import aux_layers

# Queries of one attention: blocks are forwarded in groups, so that masks grow with the tokens, not
# with their square.
_QUERIES = 1024
# Keys of config.json that equal field names.
_SAME_KEYS = (
    "block_size",
    "num_target_layers",
    "draft_vocab_size",
    "sample_from_anchor",
    "markov_rank",
)


def target_layers_of(layers: int, chosen: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of a target whose outputs a fresh head reads: five as in DFlash, in a small target
    those of EAGLE-3.

    Raises InputError if the layers `chosen` instead are not the target's.
    """
    if chosen is not None:
        if sorted(set(chosen)) != list(chosen) or chosen[-1] >= layers:
            raise InputError(
                f"target_layers: {list(chosen)} are not ascending layers from 0 to {layers - 1}"
            )
        return tuple(chosen)
    if layers < 8:
        read = {entering - 1 for entering in aux_layers(layers) if entering}
        return tuple(sorted(read))
    step = (layers - 4) / 4
    return tuple(round(1 + index * step) for index in range(5))


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """The layers, the block, and the target layers it reads."""

    one_layer: ClassVar[bool] = False

    block_size: int
    """Tokens of a block, anchor included."""
    target_layer_ids: tuple[int, ...]
    """Layers of the target whose outputs are fused, from 0."""
    num_target_layers: int
    mask_token_id: int
    draft_vocab_size: int
    window: int | None = None
    """Sliding window: attend to context fewer than this many positions back; None: no window."""
    sample_from_anchor: bool = False
    markov_rank: int = 0
    confidence: bool = False
    causal: bool = False
    """A slot attends to the earlier slots of its block only."""
    confidence_temperatures: tuple[float, ...] = ()
    """Temperature of the confidence logit, per slot; empty: 1 for all."""

    def to_json(self) -> JsonObject:
        dspark = self.markov_rank > 0 or self.confidence
        inner: JsonObject = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "causal": self.causal,
        }
        if self.window is not None:
            inner |= {"use_swa": True, "swa_window_size": self.window}
        values = super().to_json() | {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3",
            **{key: getattr(self, key) for key in _SAME_KEYS},
            "dflash_config": inner,
        }
        if self.markov_rank:
            values["markov_head_type"] = "vanilla"
        if self.confidence:
            values["enable_confidence_head"] = True
            values["confidence_head_with_markov"] = self.markov_rank > 0
            values["confidence_temperatures"] = list(self.confidence_temperatures)
        return values

    @classmethod
    def from_json(cls, values: JsonObject, target: PreTrainedModel) -> Self:
        borrow(target).check_sizes(values)
        layers = layout_of(target).count - 1
        inner: JsonObject = values.get("dflash_config") or {}
        values = inner | values | {"qk_norm": True}
        last = max(values["target_layer_ids"])
        if last >= layers:
            raise InputError(
                f"'target_layer_ids' has {last} and the target has {layers} layers; use its own "
                "target"
            )
        if values.get("markov_head_type", "vanilla") != "vanilla":
            raise InputError(
                f"'markov_head_type' is {values['markov_head_type']}; only 'vanilla' can be loaded"
            )
        dspark = "DSpark" in values["architectures"][0]
        return cls.read(
            values,
            block_size=values["block_size"],
            target_layer_ids=tuple(values["target_layer_ids"]),
            num_target_layers=layers,
            mask_token_id=values["mask_token_id"],
            draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
            window=values.get("swa_window_size") if values.get("use_swa") else None,
            sample_from_anchor=bool(values.get("sample_from_anchor", dspark)),
            markov_rank=int(values.get("markov_rank") or 0),
            confidence=bool(values.get("enable_confidence_head")),
            causal=bool(values.get("causal", values.get("causal_head", False))),
            confidence_temperatures=tuple(values.get("confidence_temperatures", ())),
        )


class _Layer(Qwen3DecoderLayer):
    """A layer of Qwen 3. Both uses are calls of it: sharded training gathers weights only when a
    module is called.
    """

    def forward(
        self,
        hidden_states: Tensor,
        *given: Any,
        context: tuple[Tensor, Tensor] | None = None,
        **attending: Any,
    ) -> Any:
        """The states of blocks; if `context` (the rotation) is given, the context states' keys and
        values instead.
        """
        if context is None:
            return super().forward(hidden_states, *given, **attending)
        attention: Any = self.self_attn
        shape = (*hidden_states.shape[:2], attention.config.num_key_value_heads, attention.head_dim)
        keys = attention.k_proj(hidden_states).view(shape)
        keys = attention.k_norm(keys).transpose(1, 2)
        values = attention.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = context
        _, rotated = apply_rotary_pos_emb(keys, keys, cos, sin)
        return rotated, values


class BlockHead(DraftVocabulary):
    """The network of all presets. `hidden_layers`: numbers of the target's states that it fuses.

    `remember` and `states` append to any Cache of transformers; the caller must drop what `states`
    appended.
    """

    kind: ClassVar[str]
    preset: ClassVar[Mapping[str, int]] = {"block_size": 16}
    config_type = BlockConfig

    def __init__(self, config: BlockConfig, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        self.hidden_layers = tuple(layer + 1 for layer in config.target_layer_ids)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(self.hidden_layers) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            layer = _Layer(config.llama(), index)
            layer.self_attn = config.attention(hidden, index)  # type: ignore[assignment]
            self.layers.append(layer)
        self.rotary = Rotary(config.llama())
        if config.markov_rank:
            w1 = nn.Embedding(config.vocab_size, config.markov_rank)
            w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        if config.confidence:
            projection = nn.Linear(hidden + config.markov_rank, 1)
            self.confidence_head = nn.ModuleDict({"proj": projection})
        self.register_buffer("rows_DH", None, persistent=False)
        self.hold_vocabulary(config.draft_vocab_size, config.vocab_size)

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        *,
        seed: int = 0,
        draft_vocab: Sequence[int] | None = None,
        num_layers: int = 5,
        block_size: int | None = None,
        target_layers: Sequence[int] | None = None,
        window: int | None = None,
        mask_token_id: int | None = None,
    ) -> Self:
        """An untrained head on the target's device, in its dtype and in training mode.

        draft_vocab: sorted ids of the target's tokens to draft; None for all. mask_token_id: by
        default the last token. Raises InputError for layers that the target does not have.
        """
        layers = layout_of(target).count - 1
        size = vocabulary_size(target)
        preset = dict(cls.preset)
        if block_size is not None:
            preset["block_size"] = block_size
        if "markov_rank" in preset:
            preset["markov_rank"] = min(preset["markov_rank"], borrow(target).hidden_size // 4)
        target_layer_ids = target_layers_of(layers, target_layers)
        config = BlockConfig.like(
            target,
            {"qk_norm": True, "num_hidden_layers": num_layers},
            target_layer_ids=target_layer_ids,
            num_target_layers=layers,
            mask_token_id=size - 1 if mask_token_id is None else mask_token_id,
            draft_vocab_size=size if draft_vocab is None else len(draft_vocab),
            window=window,
            **preset,
        )
        head = cls(config, target)
        draw(head.fc, head, seed)
        if draft_vocab is not None and head.reduced:
            head.set_draft_vocab(draft_vocab)
        return head.to(target.device, target.dtype)

    @property
    def depths(self) -> int:
        """Number of tokens that a block drafts."""
        return self.config.block_size - (not self.config.sample_from_anchor)

    def outputs(self) -> list[nn.Module]:
        """Its own modules with a row for each token that it drafts."""
        return [self.markov_head["markov_w2"]] if self.config.markov_rank else []

    def read_draft_vocab(self) -> None:
        """Take the draft vocabulary from `d2t`, and its rows of the target's output projection."""
        super().read_draft_vocab()
        if self.reduced:
            weight_VH = self.borrowed.projection.weight_VH.detach()
            rows_DH = weight_VH.index_select(0, self.target_ids_D.to(weight_VH.device))
            self.rows_DH = rows_DH.to(self.fc.weight)

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """H `[B, T, H]` from the target's states `[B, T, H]` at `hidden_layers`, in that order."""
        joined = torch.cat(list(hidden), -1).to(dtype_of(self.fc))
        return self.hidden_norm(self.fc(joined))

    def remember(self, context_BTH: Tensor, positions_BT: Tensor, cache: Any) -> None:
        """Append the keys and values of H at these positions to the cache of every layer."""
        rotation = self.rotary(context_BTH, positions_BT)
        for index, layer in enumerate(self.layers):
            keys, values = layer(context_BTH, context=rotation)
            cache.update(keys, values, index)

    def states(self, ids_BN: Tensor, mask: Tensor, positions_BN: Tensor, cache: Any) -> Tensor:
        """Normed states `[B, N, H]` of blocks over the cached context; the cache gets the blocks'
        keys and values too.

        mask: additive or boolean, `[B or 1, 1, N, P + N]`.
        """
        states_BNH = self.borrowed.embed(ids_BN, dtype_of(self.fc))
        rotation = self.rotary(states_BNH, positions_BN)
        for layer in self.layers:
            states_BNH = layer(
                states_BNH,
                attention_mask=mask,
                **{LAYER_CACHE: cache},
                position_embeddings=rotation,
            )
        return self.norm(states_BNH)

    def slots(self, states_BSH: Tensor) -> Tensor:
        """The states of the slots that draft, `[B, depths, H]`."""
        return states_BSH[..., self.config.block_size - self.depths :, :]

    def block(self, anchors: Tensor) -> Tensor:
        """Tokens `[..., S]` of blocks that begin with these tokens `[...]`."""
        shape = (*anchors.shape, self.config.block_size)
        ids = anchors.new_full(shape, self.config.mask_token_id)
        ids[..., 0] = anchors
        return ids

    def drafted(
        self,
        ids_BT: Tensor,
        hidden: Sequence[Tensor],
        anchors_BA: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """States `[B, A, depths, H]` of blocks at these columns of whole texts, as decoding
        computes them there.

        hidden: the target's states at `hidden_layers`. positions, documents: for packed rows, in
        which a block sees its own document.
        """
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        context = _Context()
        self.remember(self.fuse(hidden), positions_BT, context)
        slots = self.config.block_size
        columns_S = torch.arange(slots, device=ids_BT.device)
        drafted = []
        for group_BG in anchors_BA.split(max(1, _QUERIES // slots), dim=1):
            # Later columns are hidden from all blocks of the group.
            context.shown = int(group_BG.max())
            positions_BGS = positions_BT.gather(1, group_BG)[..., None] + columns_S
            shown_BP = positions_BT[:, : context.shown]
            mask = self._mask(group_BG, positions_BGS, shown_BP, documents_BT)
            ids_BGS = self.block(ids_BT.gather(1, group_BG))
            states_BNH = self.states(ids_BGS.flatten(1), mask, positions_BGS.flatten(1), context)
            drafted.append(self.slots(states_BNH.unflatten(1, (-1, slots))))
        return torch.cat(drafted, dim=1)

    def _mask(
        self,
        anchors_BG: Tensor,
        positions_BGS: Tensor,
        positions_BP: Tensor,
        documents_BT: Tensor | None,
    ) -> Tensor:
        """Return `[B, 1, N, P + N]`: which keys, of the context and then of the blocks, each query
        sees.
        """
        rows, blocks, slots = positions_BGS.shape
        columns_P = torch.arange(positions_BP.shape[1], device=positions_BP.device)
        sees_BGSP = (columns_P < anchors_BG[..., None, None]).expand(-1, -1, slots, -1)
        if documents_BT is not None:
            own_BG11 = documents_BT.gather(1, anchors_BG)[..., None, None]
            context_B11P = documents_BT[:, None, None, : len(columns_P)]
            sees_BGSP = sees_BGSP & (context_B11P == own_BG11)
        if self.config.window is not None:
            back_BGSP = positions_BGS[..., None] - positions_BP[:, None, None]
            sees_BGSP = sees_BGSP & (back_BGSP < self.config.window)
        inside_SS = torch.ones(slots, slots, dtype=torch.bool, device=columns_P.device)
        if self.config.causal:
            inside_SS = inside_SS.tril()
        inside_NN = torch.block_diag(*[inside_SS] * blocks).expand(rows, -1, -1)
        return torch.cat([sees_BGSP.flatten(1, 2), inside_NN], dim=-1)[:, None]

    @property
    def bias_D(self) -> Tensor | None:
        """The bias of the target's output projection, at the tokens that it drafts."""
        bias_V = self.borrowed.bias_V
        return bias_V[self.target_ids_D] if self.reduced and bias_V is not None else bias_V

    def raw_logits(self, states: Tensor) -> Tensor:
        """Logits `[..., D]` from the target's output projection, before the Markov head."""
        if not self.reduced:
            return self.borrowed.project(states, finish=False)
        bias_D = None if self.bias_D is None else self.bias_D.to(states)
        return F.linear(self.borrowed.projection.prepare(states), self.rows_DH, bias_D)

    def logits(self, raw: Tensor, previous: Tensor | None = None) -> Tensor:
        """Logits over the target's vocabulary `[..., V]`, -inf for tokens that the head cannot
        draft.

        previous: tokens `[...]` before those that the slots draft; for the Markov head.
        """
        if self.config.markov_rank:
            assert previous is not None, "the Markov head needs the tokens before"
            embedded = self.markov_head["markov_w1"](previous)
            raw = raw + self.markov_head["markov_w2"](embedded)
        return self.to_target(self.borrowed.projection.finish(raw))

    def confidence_logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Logits `[...]` of the confidence before its temperatures, given states `[..., H]` and
        the tokens before them.
        """
        if self.config.markov_rank:
            states = torch.cat([states, self.markov_head["markov_w1"](previous)], dim=-1)
        out: Tensor = self.confidence_head["proj"](states).squeeze(-1)
        return out.float()

    def confidence(self, states: Tensor, previous: Tensor, slot: int) -> Tensor:
        """Estimated alpha `[...]` of the token that `slot` (from 0) drafts, given all before it."""
        temperatures = self.config.confidence_temperatures
        logits = self.confidence_logits(states, previous)
        return (logits / temperatures[slot] if temperatures else logits).sigmoid()


class _Context:
    """Cache of one context for several block forwards; it discards what `states` appends.

    shown: how many columns the next forward sees.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.shown: int | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Keep a layer's first keys and values; return the kept ones with all later."""
        if layer == len(self.kept):
            self.kept.append((keys, values))
            return keys, values
        old_keys, old_values = (old[:, :, : self.shown] for old in self.kept[layer])
        return torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)


class DFlashHead(BlockHead):
    """Masked slots that see each other, on the target's own output projection."""

    kind = "dflash"


class JetSpecHead(BlockHead):
    """DFlash, causal within the block."""

    kind = "jetspec"
    preset = {"block_size": 16, "causal": True}


class DSparkHead(BlockHead):
    """DFlash that drafts from its anchor on, with a Markov head and a confidence."""

    kind = "dspark"
    preset = {"block_size": 7, "sample_from_anchor": True, "markov_rank": 256, "confidence": True}
