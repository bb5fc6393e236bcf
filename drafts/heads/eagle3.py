"""EAGLE-3 head: predicts tokens of a reduced vocabulary from fused states of three target layers, then from its own.

Legend: B rows, T tokens, H hidden size, V target vocabulary, D draft vocabulary (Vd in the literature).

Source: EAGLE-3 (arXiv 2503.01840, section 3). On disk as its authors' checkpoints are, and as SGLang and vLLM read
them: `midlayer.*`, `fc`, `norm`, `lm_head`, and where D < V the offsets `d2t` (target id = draft id + offset) and the
mask `t2d`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from drafts.heads.borrowed import borrow, text_config
from drafts.heads.head_config import check_equal, count, setting
from drafts.heads.llama_layer import (
    LayerConfig,
    init_layer,
    init_linear,
    layer_from_json,
    layer_like,
    layer_to_json,
    llama_parts,
    mask_and_positions,
)
from draftsmith_core.errors import InputError
from draftsmith_core.models import vocabulary_size
from draftsmith_core.sampling import generator

_AUX = "eagle_aux_hidden_state_layer_ids"
# Variants of the layer that add no tensor, so that only the config tells of them. Such a head cannot be run here.
_VARIANTS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


def aux_layers(layers: int) -> tuple[int, int, int]:
    """Indices into `hidden_states` of a target's low, middle and high states: those entering layers 2, n // 2, n - 3.

    In a target of fewer than seven layers these coincide or do not exist, and the nearest that differ are taken. A
    target of one layer has only two states, and its last one is used twice.
    """
    low = min(2, max(layers - 3, 0))
    high = max(layers - 3, low + 2)
    middle = min(max(layers // 2, low + 1), high - 1)
    return min(low, layers), min(middle, layers), min(high, layers)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The layer, both vocabularies, and which states of the target are fused."""

    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **layer_to_json(self.layer),
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            _AUX: list(self.eagle_aux_hidden_state_layer_ids),
            "norm_before_residual": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str, target: PreTrainedModel) -> "Eagle3Config":
        """Read and checked against the target; InputError, one line, names file and key."""
        for key in _VARIANTS:
            if setting(values, key, bool, where, False):
                raise InputError(f"{where}: '{key}' is true; only heads of the original EAGLE-3 form can be loaded")
        parts, layers = borrow(target), int(text_config(target).num_hidden_layers)
        vocab_size = count(values, "vocab_size", where)
        config = cls(
            layer=layer_from_json(values, where),
            vocab_size=vocab_size,
            draft_vocab_size=count(values, "draft_vocab_size", where, vocab_size),
            eagle_aux_hidden_state_layer_ids=_aux_from_json(values, where, layers),
        )
        check_equal(where, "hidden_size", config.layer.hidden_size, parts.hidden_size)
        check_equal(where, "vocab_size", config.vocab_size, parts.vocab_size)
        width = setting(values, "target_hidden_size", int, where, parts.hidden_size)
        check_equal(where, "target_hidden_size", width, parts.hidden_size)
        if config.draft_vocab_size > vocab_size:
            raise InputError(
                f"{where}: 'draft_vocab_size' is {config.draft_vocab_size}, more than 'vocab_size' {vocab_size}"
            )
        return config


def _aux_from_json(values: Mapping[str, Any], where: str, layers: int) -> tuple[int, ...]:
    """The indices into `hidden_states`; the paper's where config.json does not say."""
    found, shift = values.get(_AUX), 0
    if found is None and isinstance(values.get("eagle_config"), Mapping):
        # SGLang names a layer by its output, which is the state that enters the next.
        found, shift = values["eagle_config"].get(_AUX), 1
    if found is None:
        return aux_layers(layers)
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found) or len(found) != 3:
        raise InputError(f"{where}: '{_AUX}' is {found!r}; it must be a list of three layer numbers")
    ids = tuple(i + shift for i in found)
    if min(ids) < 0 or max(ids) > layers:
        raise InputError(
            f"{where}: '{_AUX}' is {found} and the target has {layers} layers; use the target it was trained for"
        )
    return ids


class _MidLayer(nn.Module):
    """A LLaMA layer whose attention reads the embedding beside the feature, each with its own norm."""

    def __init__(self, layer: LayerConfig, llama: LlamaConfig) -> None:
        super().__init__()
        hidden, head = layer.hidden_size, layer.head_dim
        self.hidden_norm = LlamaRMSNorm(hidden, eps=layer.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=layer.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=layer.rms_norm_eps)
        self.self_attn = LlamaAttention(llama, 0)
        self.self_attn.q_proj = nn.Linear(2 * hidden, layer.num_attention_heads * head, bias=False)
        self.self_attn.k_proj = nn.Linear(2 * hidden, layer.num_key_value_heads * head, bias=False)
        self.self_attn.v_proj = nn.Linear(2 * hidden, layer.num_key_value_heads * head, bias=False)
        self.mlp = LlamaMLP(llama)

    def forward(
        self,
        embedded_BTH: Tensor,
        features_BTH: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Cache | None,
    ) -> Tensor:
        """The next features `[B, T, H]`, before the head's final norm."""
        both = torch.cat([self.input_layernorm(embedded_BTH), self.hidden_norm(features_BTH)], dim=-1)
        attended, _ = self.self_attn(
            hidden_states=both,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        states: Tensor = features_BTH + attended
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3Head(nn.Module):
    """Fused target states or own features in; logits over the draft vocabulary and the next own features out."""

    kind: ClassVar[str] = "eagle3"

    d2t: Tensor
    t2d: Tensor
    target_ids_D: Tensor

    def __init__(self, config: Eagle3Config, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        llama, rotary = llama_parts(config.layer, config.vocab_size)
        hidden = config.layer.hidden_size
        self.fc = nn.Linear(len(config.eagle_aux_hidden_state_layer_ids) * hidden, hidden, bias=False)
        self.midlayer = _MidLayer(config.layer, llama)
        self.norm = LlamaRMSNorm(hidden, eps=config.layer.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = rotary
        ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("target_ids_D", ids, persistent=False)
        if self.reduced:
            self.register_buffer("d2t", torch.zeros_like(ids))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.set_draft_vocab(range(config.draft_vocab_size))

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, draft_vocab: Sequence[int] | None = None, seed: int = 0) -> "Eagle3Head":
        """An untrained head on the target's device, in its dtype and in training mode.

        `draft_vocab` are the sorted ids of the target's tokens that it can draft; None for all. Its projection begins
        as those rows of the target's.
        """
        size = vocabulary_size(target)
        ids = list(range(size)) if draft_vocab is None else list(draft_vocab)
        if not ids or ids[0] < 0 or ids[-1] >= size or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise InputError(f"draft_vocab: must be ids from 0 to {size - 1}, sorted, each once, at least one")
        config = Eagle3Config(
            layer=layer_like(target),
            vocab_size=size,
            draft_vocab_size=len(ids),
            eagle_aux_hidden_state_layer_ids=aux_layers(int(text_config(target).num_hidden_layers)),
        )
        head = cls(config, target)
        random = generator(seed)
        init_linear(head.fc, None, random)
        init_layer(head.midlayer, random)
        with torch.no_grad():
            weight = head.borrowed.projection.weight_VH
            head.lm_head.weight.copy_(weight[torch.tensor(ids, device=weight.device)])
        if head.reduced:
            head.set_draft_vocab(ids)
        return head.to(device=target.device, dtype=target.dtype)

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which of the target's `hidden_states` it fuses, low to high."""
        return self.config.eagle_aux_hidden_state_layer_ids

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    def set_draft_vocab(self, ids: Sequence[int]) -> None:
        """Make these the tokens it drafts: sorted target ids, as many as its projection has rows."""
        chosen = torch.tensor(ids, dtype=torch.long, device=self.d2t.device)
        self.d2t = chosen - torch.arange(len(ids), device=chosen.device)
        self.t2d = torch.zeros_like(self.t2d).index_fill_(0, chosen, True)
        self.target_ids_D = chosen

    def check_loaded(self, where: str) -> None:
        """Take the draft vocabulary from loaded `d2t` and `t2d`; InputError when the two disagree."""
        if not self.reduced:
            return
        ids = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        size = self.config.vocab_size
        valid = bool((ids >= 0).all() and (ids < size).all() and (ids.diff() > 0).all())
        if not valid or not torch.equal(self.t2d.nonzero().flatten(), ids):
            raise InputError(f"{where}: 'd2t' and 't2d' do not describe one set of {len(ids)} tokens; export it again")
        self.target_ids_D = ids

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """Features `[B, T, H]` from the target's states `[B, T, H]` at `hidden_layers`, in that order."""
        if len(hidden) != len(self.hidden_layers):
            raise ValueError(f"fuse: {len(hidden)} states given; states {self.hidden_layers} of the target are needed")
        fused: Tensor = self.fc(torch.cat([state.to(self.fc.weight.dtype) for state in hidden], dim=-1))
        return fused

    def states(
        self,
        input_ids_BT: Tensor,
        features_BTH: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """The head's own features `[B, T, H]` of `forward`, before its norm and without the logits that they give."""
        dtype = self.fc.weight.dtype
        embedded_BTH = self.borrowed.embed(input_ids_BT, dtype)
        features_BTH = features_BTH.to(dtype)
        mask, positions = mask_and_positions(features_BTH, attention_mask, position_ids, past_key_values)
        tables = self.rotary.tables(features_BTH, positions)
        g_BTH: Tensor = self.midlayer(embedded_BTH, features_BTH, mask, tables, past_key_values)
        return g_BTH

    def forward(
        self,
        input_ids_BT: Tensor,
        features_BTH: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[B, T, D]` of the token after each input token, and its own features `[B, T, H]` for a next step.

        `features_BTH[:, t]` is `fuse` of the states, or the head's own feature, at the position before token
        `input_ids_BT[:, t]`. Mask and positions as for `EagleHead.forward`.
        """
        g_BTH = self.states(input_ids_BT, features_BTH, attention_mask, position_ids, past_key_values)
        return self.borrowed.finish(self.lm_head(self.norm(g_BTH))), g_BTH

    def to_target(self, logits_BTD: Tensor) -> Tensor:
        """Logits over the target's vocabulary `[..., V]`: -inf for tokens that the head cannot draft."""
        if not self.reduced:
            return logits_BTD
        logits_BTV = logits_BTD.new_full((*logits_BTD.shape[:-1], self.vocab_size), -torch.inf)
        return logits_BTV.index_copy(-1, self.target_ids_D, logits_BTD)
