"""EAGLE-3 head: predicts tokens of a reduced vocabulary from fused states of three target layers,
then from its own.

Legend: B rows, T tokens, H hidden size, V target vocabulary, D draft vocabulary (Vd in the
literature).

Source: EAGLE-3 (arXiv 2503.01840, section 3). On disk as its authors' checkpoints are, and as
SGLang and vLLM read them: `midlayer.*`, `fc`, `norm`, `lm_head`, and where D < V the offsets `d2t`
(target id = draft id + offset) and the mask `t2d`. Variants that others publish: an embedding of
its own (`embed_tokens`), a width other than the target's (`target_hidden_size`), norms in other
places (EAGLE-3.1), attention as in Qwen 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import layout_of
from draftsmith.core.io import JsonObject
from draftsmith.core.models import vocabulary_size
from draftsmith.core.transformers_api import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from draftsmith.drafts.draft_vocabulary import DraftVocabulary
from draftsmith.drafts.heads.borrowed import borrow, dtype_of, start_as
from draftsmith.drafts.heads.eagle import LayerConfig, Rotary, draw
from draftsmith.drafts.heads.feature_head import FeatureHead

_AUX = "eagle_aux_hidden_state_layer_ids"
# Places of norms, under the keys that speculators, SpecForge and vLLM give them.
_VARIANTS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
# `eagle31`: those of EAGLE-3.1 (arXiv 2605.09992), which `fc_norm` and `norm_output` turn on.
Norms: TypeAlias = Literal["eagle3", "eagle31"]


def aux_layers(layers: int) -> tuple[int, ...]:
    """Numbers of a target's low, middle and high states: those entering layers 2, n // 2, n - 3.

    In a target of fewer than seven layers these coincide or do not exist; then the nearest layers
    that differ.
    """
    low = min(2, max(layers - 3, 0))
    high = max(layers - 3, low + 2)
    middle = min(max(layers // 2, low + 1), high - 1)
    return tuple(min(layer, layers) for layer in (low, middle, high))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """The layer, both vocabularies, and which states of the target are fused."""

    one_layer: ClassVar[bool] = False

    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    target_hidden_size: int
    own_embedding: bool = False
    norm_before_residual: bool = False
    """The residual of the layer starts from the normed features."""
    norm_output: bool = False
    """The features of the next step are those after the final norm."""
    norm_before_fc: bool = False
    """One norm over all fused states."""
    fc_norm: bool = False
    """A norm for each of the fused states."""

    def to_json(self) -> JsonObject:
        variants = {key: True for key in _VARIANTS if getattr(self, key)}
        values = super().to_json() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab_size,
            _AUX: list(self.eagle_aux_hidden_state_layer_ids),
            "norm_before_residual": self.norm_before_residual,
            **variants,
        }
        if self.own_embedding:
            values["embed_requires_grad"] = True
        if self.target_hidden_size != self.hidden_size:
            values["target_hidden_size"] = self.target_hidden_size
        return values

    @classmethod
    def from_json(cls, values: JsonObject, target: PreTrainedModel) -> "Eagle3Config":
        hidden = values["hidden_size"]
        vocab_size = values["vocab_size"]
        width = values.get("target_hidden_size") or hidden
        own_embedding = bool(values.get("embed_requires_grad"))
        borrow(target).check_sizes(values | {"hidden_size": width})
        if width != hidden and not own_embedding:
            sizes = f"'hidden_size' is {hidden} and the target's is {width}"
            raise InputError(
                f"{sizes}, and the file holds no 'embed_tokens.weight'; export it again with it"
            )
        layers = layout_of(target).count - 1
        states = _aux_from_json(values, layers)
        # Some authors' files say how many the target has.
        declared = values.get("num_hidden_layers", 1)
        held = values.get("held_layers", declared)
        if declared not in (held, layers):
            raise InputError(
                f"the file holds {held} layers and 'num_hidden_layers' is {declared}; fetch all "
                "files of this head"
            )
        return cls.read(
            values | {"num_hidden_layers": held},
            draft_vocab_size=values.get("draft_vocab_size") or vocab_size,
            eagle_aux_hidden_state_layer_ids=states,
            target_hidden_size=width,
            own_embedding=own_embedding,
            **{key: bool(values.get(key)) for key in _VARIANTS},
        )


def _aux_from_json(values: JsonObject, layers: int) -> tuple[int, ...]:
    """The numbers of the target's states; the paper's if config.json has none."""
    ids: Sequence[int] = [layer for layer in values.get(_AUX) or [] if layer is not None]
    if not ids:
        # SGLang names a layer by its output, which is the state that enters the next.
        outputs = (values.get("eagle_config") or {}).get(_AUX) or []
        ids = [layer + 1 for layer in outputs if layer is not None] or aux_layers(layers)
    fused = values.get("fused_states", len(ids))
    if fused != len(ids):
        raise InputError(
            f"'fc.weight' reads {fused} states of the target and '{_AUX}' names {len(ids)} (none "
            "stands for the usual three); fetch the config.json that names them"
        )
    if min(ids) < 0 or max(ids) > layers:
        raise InputError(
            f"'{_AUX}' is {ids} and the target has {layers} layers; use the target it was "
            "trained for"
        )
    return tuple(ids)


class _MidLayer(nn.Module):
    """A LLaMA layer whose attention reads the embedding beside the feature, each with its own
    norm.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(hidden, eps=eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.self_attn = config.attention(2 * hidden)
        self.mlp = LlamaMLP(config.llama())

    def forward(self, embedded_BTH: Tensor, features_BTH: Tensor, **attending: Any) -> Tensor:
        """The next features `[B, T, H]`, before the head's final norm."""
        normed_BTH = self.hidden_norm(features_BTH)
        both = torch.cat([self.input_layernorm(embedded_BTH), normed_BTH], dim=-1)
        attended, _ = self.self_attn(hidden_states=both, **attending)
        residual_BTH = normed_BTH if self.norm_before_residual else features_BTH
        states: Tensor = residual_BTH + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Head(DraftVocabulary, FeatureHead):
    """Fused target states or own features in; logits over the draft vocabulary and the next own
    features out.

    The features that it reads are `fuse` of the target's states, or its own. `hidden_layers` are
    the numbers of these states, low to high.
    """

    kind: ClassVar[str] = "eagle3"
    config_type = Eagle3Config
    layers: nn.ModuleDict  # type: ignore[assignment]

    def __init__(self, config: Eagle3Config, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        self.hidden_layers = config.eagle_aux_hidden_state_layer_ids
        hidden = config.hidden_size
        width = config.target_hidden_size
        fused = len(self.hidden_layers)
        eps = config.rms_norm_eps
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(fused * width, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in range(fused))
        self.fc = nn.Linear(fused * width, hidden, bias=False)
        self.midlayer = _MidLayer(config)
        # Under the numbers that they have on disk.
        self.layers = nn.ModuleDict()
        for index in range(1, config.num_hidden_layers):
            layer = LlamaDecoderLayer(config.llama(), index)
            layer.self_attn = config.attention(hidden, index)  # type: ignore[assignment]
            self.layers[str(index)] = layer
        self.norm = LlamaRMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.llama())
        self.hold_vocabulary(config.draft_vocab_size, config.vocab_size)

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        *,
        draft_vocab: Sequence[int] | None = None,
        norms: Norms = "eagle31",
        num_layers: int = 1,
        seed: int = 0,
    ) -> "Eagle3Head":
        """An untrained head on the target's device, in its dtype and in training mode.

        draft_vocab: sorted ids of the target's tokens to draft; None for all. Their rows of the
        target's output projection start the head's.
        """
        ids = list(range(vocabulary_size(target)) if draft_vocab is None else draft_vocab)
        layers = layout_of(target).count - 1
        states = aux_layers(layers)
        config = Eagle3Config.like(
            target,
            {"num_hidden_layers": num_layers},
            draft_vocab_size=len(ids),
            eagle_aux_hidden_state_layer_ids=states,
            target_hidden_size=borrow(target).hidden_size,
            fc_norm=norms == "eagle31",
            norm_output=norms == "eagle31",
        )
        head = cls(config, target)
        draw(head.fc, nn.ModuleList([head.midlayer, *head.deeper]), seed)
        start_as(head.lm_head.weight, head.borrowed, torch.tensor(ids))
        if head.reduced:
            head.set_draft_vocab(ids)
        return head.to(target.device, target.dtype)

    def outputs(self) -> list[nn.Module]:
        """Its own modules with a row for each token that it drafts."""
        return [self.lm_head]

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """Features `[B, T, H]` from the target's states `[B, T, H]` at `hidden_layers`, in that
        order.
        """
        dtype = dtype_of(self.fc)
        states = [state.to(dtype) for state in hidden]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        return self.fc(joined)

    def opening(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The layer reads both."""
        return inputs

    @property
    def layer(self) -> nn.Module:
        return self.midlayer

    @property
    def deeper(self) -> Sequence[nn.Module]:
        return list(self.layers.values())

    def ending(self, states_BTH: Tensor) -> Tensor:
        return self.norm(states_BTH) if self.config.norm_output else states_BTH

    def normed(self, states: Tensor) -> Tensor:
        return states if self.config.norm_output else self.norm(states)

    def embedded(self, input_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings `[B, T, H]` of tokens: the head's own, or the target's."""
        if self.config.own_embedding:
            own_BTH: Tensor = self.embed_tokens(input_ids_BT)
            return own_BTH.to(dtype)
        return super().embedded(input_ids_BT, dtype)

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., D]` of the head's own features."""
        return self.borrowed.projection.finish(self.lm_head(self.normed(states)))
