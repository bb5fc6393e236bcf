"""The LLaMA decoder layer of EAGLE heads: its sizes on disk, its modules, how a head makes features through it.

Legend: B rows, T tokens, P cached tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from draftsmith_core.errors import InputError
from draftsmith_core.models import text_config
from draftsmith_core.sampling import generator

# Standard deviation of fresh weights, as in LLaMA.
_INITIALIZER_RANGE = 0.02
_VARIANTS = ("qkv_bias", "o_bias", "qk_norm")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes of a LLaMA decoder layer, under the names that they have in a Llama config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """All of these values but the variants."""
        return {key: value for key, value in asdict(self).items() if key not in _VARIANTS}


def layer_like(target: PreTrainedModel) -> LayerConfig:
    """A layer as wide as the target's own, for any family of targets; what a family lacks is as in LLaMA."""
    config = text_config(target)
    keys = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += ["max_position_embeddings", "rms_norm_eps", "rope_parameters"]
    return layer_from_json({key: getattr(config, key, None) for key in keys})


def layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    """The layer's part of config.json; rope also under the names that other engines and transformers 4 read."""
    values, rope = layer.sizes, dict(layer.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    values["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    values |= {"num_hidden_layers": 1, "attention_bias": layer.o_bias, "mlp_bias": False}
    return values | {key: True for key in ("qkv_bias", "qk_norm") if getattr(layer, key)}


def layer_from_json(values: Mapping[str, Any]) -> LayerConfig:
    """The layer that a config.json of transformers 4 or 5 describes."""
    present = {key: value for key, value in values.items() if value is not None}
    if (layers := present.get("num_hidden_layers", 1)) != 1:
        raise InputError(f"'num_hidden_layers' is {layers}; only heads of one layer can be loaded")
    hidden, heads, o_bias = present["hidden_size"], present["num_attention_heads"], present.get("attention_bias", False)
    rope = dict(present.get("rope_parameters", present.get("rope_scaling", {})))
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    # Gemma 3 has one set per kind of layer; the head's layer has full attention.
    rope = dict(rope.get("full_attention", rope))
    # A head rotates all dimensions, even if its target rotates a part.
    rope.pop("partial_rotary_factor", None)
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=present.get("intermediate_size", 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=present.get("num_key_value_heads", heads),
        head_dim=present.get("head_dim", hidden // heads),
        hidden_act=present.get("hidden_act", "silu"),
        max_position_embeddings=present.get("max_position_embeddings", 2048),
        rms_norm_eps=float(present.get("rms_norm_eps", 1e-6)),
        rope_parameters={"rope_type": "default", "rope_theta": float(present.get("rope_theta", 10000.0))} | rope,
        qkv_bias=present.get("qkv_bias", o_bias),
        o_bias=o_bias,
        qk_norm=present.get("qk_norm", False),
    )


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc, unused-ignore]
    """Rotary embedding whose frequencies stay fp32 when the head goes to half precision, as transformers loads them.

    In bf16 a frequency is off by up to 0.4 %, which is radians at position 1000.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def llama_parts(layer: LayerConfig, vocab_size: int) -> tuple[Any, Rotary]:
    """The config that transformers' modules of LLaMA and Qwen 3 take, and the rotary embedding."""
    values = layer.sizes | {"rope_parameters": dict(layer.rope_parameters)}
    config: Any = Qwen3Config(**values, vocab_size=vocab_size, num_hidden_layers=1, attention_bias=False)
    config.mlp_bias = False
    config._attn_implementation = "sdpa"
    return config, Rotary(config)


def attention(layer: LayerConfig, config: Any, inputs: int) -> nn.Module:
    """Self-attention over states `inputs` wide: LLaMA's, with the biases (Qwen 2) or norms (Qwen 3) of the layer."""
    module: nn.Module = (Qwen3Attention if layer.qk_norm else LlamaAttention)(config, 0)
    queries, keys = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    module.q_proj = nn.Linear(inputs, queries, bias=layer.qkv_bias)
    module.k_proj = nn.Linear(inputs, keys, bias=layer.qkv_bias)
    module.v_proj = nn.Linear(inputs, keys, bias=layer.qkv_bias)
    module.o_proj = nn.Linear(queries, layer.hidden_size, bias=layer.o_bias)
    return module


class FeatureHead(nn.Module):
    """A head that makes its next features, through one LLaMA layer, from features and the tokens after them."""

    fc: nn.Linear
    rotary: Rotary
    states: Callable[..., Tensor]
    logits: Callable[[Tensor], Tensor]

    def forward(self, input_ids_BT: Tensor, features_BTH: Tensor, *attending: Any) -> tuple[Tensor, Tensor]:
        """Logits of the token after each input token, and the features `[B, T, H]` under them, for a next step.

        `input_ids_BT[:, t]` is the token that follows the position of `features_BTH[:, t]`. `attending`: what the
        method of this name takes after the states.
        """
        states_BTH = self.states(input_ids_BT, features_BTH, *attending)
        return self.logits(states_BTH), states_BTH

    def attending(
        self,
        states_BTH: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> dict[str, Any]:
        """The arguments of the layer's attention. Default: causal, at positions `[1, T]` after the P cached tokens.

        mask: additive or boolean, `[B or 1, 1, T, P + T]`.
        """
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        queries = states_BTH.shape[1]
        if mask is None and past > 0 and queries > 1:
            # sdpa's own causal rule aligns the queries with the first keys; with a cache they belong to the last.
            least = torch.finfo(states_BTH.dtype).min
            mask = torch.full((queries, past + queries), least, dtype=states_BTH.dtype, device=states_BTH.device)
            mask = mask.triu(past + 1)[None, None]
        if positions is None:
            positions = torch.arange(past, past + queries, device=states_BTH.device).unsqueeze(0)
        return {
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": past_key_values,
            "position_embeddings": self.rotary(states_BTH, positions),
        }

    def draw(self, layer: nn.Module, seed: int) -> None:
        """Draw the weights of `fc`, whose outputs have the scale of its inputs, and of all linear maps in `layer`."""
        random = generator(seed)
        maps = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        for linear in (self.fc, *maps):
            std = 1 / math.sqrt(linear.in_features) if linear is self.fc else _INITIALIZER_RANGE
            nn.init.normal_(linear.weight, 0.0, std, generator=random)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
