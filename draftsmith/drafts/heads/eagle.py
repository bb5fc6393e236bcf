"""EAGLE-1/2 head: predicts the target's next top feature from a feature and the token after it; and
the LLaMA layer that it shares with EAGLE-3 heads.

Legend: B rows, T tokens, P cached tokens, H hidden size, V vocabulary.

Source: EAGLE (arXiv 2401.15077, section 4.1). On disk as its authors' checkpoints are: a Llama
config of one layer with the key `bias` (of `fc`), tensors without a prefix, and a copy of the
target's embedding, which is not trained.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import of_all_layers, text_config, vocabulary_size
from draftsmith.core.sampling import generator
from draftsmith.core.transformers_api import (
    FULL,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    Qwen3Attention,
)
from draftsmith.drafts.heads.borrowed import ReadsLastState, borrow
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.unrolled_attention import UNROLLED

# Standard deviation of fresh weights, as in LLaMA.
_INITIALIZER_RANGE = 0.02

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A head of LLaMA decoder layers: their sizes, under the names that they have in a Llama
    config.json.
    """

    one_layer: ClassVar[bool] = True

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: JsonObject
    vocab_size: int
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def like(cls, target: PreTrainedModel, changes: JsonObject | None = None, **more: Any) -> Self:
        """A layer as wide as one of the target, for any family of targets. What a family lacks is
        as in LLaMA.
        """
        config = text_config(target)
        values: JsonObject = {key: of_all_layers(config, key) for key in _SIZES}
        values["hidden_size"] = borrow(target).hidden_size
        values["vocab_size"] = vocabulary_size(target)
        like = cls.read(values | (changes or {}), **more)
        rope = like.rope_parameters
        if rope["rope_type"] != "longrope":
            return like
        # Engines choose its factors by their longest text, so a fresh head has none.
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return replace(like, rope_parameters=plain)

    @classmethod
    def read(cls, values: JsonObject, **more: Any) -> Self:
        """The layer that a config.json of transformers 4 or 5 describes."""
        present = {key: value for key, value in values.items() if value is not None}
        layers = present.get("num_hidden_layers", 1)
        if cls.one_layer and layers != 1:
            raise InputError(
                f"'num_hidden_layers' is {layers}; only heads of one layer can be loaded"
            )
        hidden = present["hidden_size"]
        # A model without attention has no heads (Mamba).
        heads = present.get("num_attention_heads", hidden // math.gcd(hidden, 64))
        bias = present.get("attention_bias", False)
        usual = {
            "intermediate_size": 4 * hidden,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "qkv_bias": bias,
            "qk_norm": False,
        }
        return cls(
            hidden_size=hidden,
            num_attention_heads=heads,
            rope_parameters=_rope_parameters(present),
            vocab_size=values["vocab_size"],
            num_hidden_layers=layers,
            o_bias=bias,
            **{key: present.get(key, value) for key, value in usual.items()},
            **more,
        )

    def to_json(self) -> JsonObject:
        """config.json, with rope also under the names that other engines and transformers 4
        read.
        """
        scaling = dict(self.rope_parameters)
        sizes = {key: getattr(self, key) for key in (*_SIZES, "hidden_act")}
        flags = {key: True for key in ("qkv_bias", "qk_norm") if getattr(self, key)}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_theta": scaling.pop("rope_theta"),
            "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
            "num_hidden_layers": self.num_hidden_layers,
            "attention_bias": self.o_bias,
            "mlp_bias": False,
            **flags,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
        }

    def llama(self) -> Any:
        """The config that transformers' modules of LLaMA and Qwen 3 take."""
        keys = (*_SIZES, "hidden_act", "vocab_size", "num_hidden_layers")
        values = {key: getattr(self, key) for key in keys}
        values["rope_parameters"] = dict(self.rope_parameters)
        config: Any = Qwen3Config(**values, attention_bias=False)
        config.mlp_bias = False
        config._attn_implementation = UNROLLED
        return config

    def attention(self, inputs: int, layer: int = 0) -> nn.Module:
        """Self-attention over states `inputs` wide: LLaMA's, with biases (Qwen 2) or norms (Qwen 3)
        if the config has them.
        """
        attention = Qwen3Attention if self.qk_norm else LlamaAttention
        module: nn.Module = attention(self.llama(), layer)
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        module.q_proj = nn.Linear(inputs, queries, bias=self.qkv_bias)
        module.k_proj = nn.Linear(inputs, keys, bias=self.qkv_bias)
        module.v_proj = nn.Linear(inputs, keys, bias=self.qkv_bias)
        module.o_proj = nn.Linear(queries, self.hidden_size, bias=self.o_bias)
        return module


def _rope_parameters(values: JsonObject) -> JsonObject:
    """The rotary parameters of a config of transformers 4 or 5, as version 5 names them."""
    key = "rope_parameters" if "rope_parameters" in values else "rope_scaling"
    rope: JsonObject = dict(values.get(key, {}))
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    # Some have one set per kind of layer (Gemma 3); the head's layer has full attention.
    by_kind = {kind: part for kind, part in rope.items() if isinstance(part, dict)}
    if by_kind:
        rope = dict(by_kind.get(FULL, next(iter(by_kind.values()))))
    # A head rotates all dimensions, even if its target rotates a part.
    rope.pop("partial_rotary_factor", None)
    base = float(values.get("rope_theta", 10000.0))
    rope = {"rope_type": "default", "rope_theta": base} | rope
    if rope["rope_type"] == "dynamic":
        # The same within the context, beyond which it scales; engines scale within it too.
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc, unused-ignore]
    """Rotary embedding whose frequencies depend on no other token, and stay fp32 when the head goes
    to half precision.

    In bf16 a frequency is off by up to 0.4 %, which is radians at position 1000. Those of longrope
    are the ones within the original context, which `context_length` is.
    """

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, T, E]` of positions `[B, T]`, in the dtype of `x`."""
        half = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([half, half], dim=-1)
        cosines, sines = (part * self.attention_scaling for part in (angles.cos(), angles.sin()))
        return cosines.to(x.dtype), sines.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def join_scale(fc: nn.Linear) -> float:
    """The spread of weights with which the outputs of `fc` have the scale of its inputs."""
    return 1 / math.sqrt(fc.in_features)


def draw(fc: nn.Linear, layers: nn.Module, seed: int) -> None:
    """Draw the weights of `fc`, whose outputs have the scale of its inputs, and those of all maps
    in `layers`.
    """
    random = generator(seed)
    others = [module for module in layers.modules() if module is not fc]
    for drawn in (fc, *others):
        if isinstance(drawn, nn.Linear | nn.Embedding):
            std = join_scale(fc) if drawn is fc else _INITIALIZER_RANGE
            nn.init.normal_(drawn.weight, 0.0, std, generator=random)
        if isinstance(drawn, nn.Linear) and drawn.bias is not None:
            nn.init.zeros_(drawn.bias)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """The layer, and whether `fc` has a bias."""

    bias: bool = False

    def to_json(self) -> JsonObject:
        return super().to_json() | {"bias": self.bias}

    @classmethod
    def from_json(cls, values: JsonObject, target: PreTrainedModel) -> "EagleConfig":
        """Read config.json. Raises InputError if its sizes are not the target's."""
        borrow(target).check_sizes(values)
        # The authors' code gives `fc` a bias if the key is absent.
        return cls.read(values, bias=values.get("bias", True))


class EagleHead(ReadsLastState, FeatureHead):
    """fc over [embedding, feature], one LLaMA layer without input norm, the target's own output
    projection.
    """

    kind: ClassVar[str] = "eagle"
    config_type = EagleConfig

    def __init__(self, config: EagleConfig, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.bias)
        layer = LlamaDecoderLayer(config.llama(), 0)
        layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        layer.self_attn = config.attention(hidden)  # type: ignore[assignment]
        self.layers = nn.ModuleList([layer])
        self.rotary = Rotary(config.llama())

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, seed: int = 0) -> "EagleHead":
        """An untrained head on the target's device, in its dtype and in training mode."""
        head = cls(EagleConfig.like(target), target)
        draw(head.fc, head.layers, seed)
        return head.to(target.device, target.dtype)
