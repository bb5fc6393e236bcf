"""The LLaMA decoder layer of EAGLE heads: its sizes on disk, its modules, how a head makes features through it.

Legend: B rows, T tokens, P cached tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from drafts.heads.head_config import count, setting
from draftsmith_core.errors import InputError
from draftsmith_core.models import text_config

# Standard deviation of fresh weights, as in LLaMA.
_INITIALIZER_RANGE = 0.02


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


def layer_like(target: PreTrainedModel) -> LayerConfig:
    """A layer as wide as the target's own, for any family of targets; what a family lacks is as in LLaMA."""
    config = text_config(target)
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    if hidden % heads:
        raise InputError(f"{type(target).__name__}: hidden size {hidden} does not divide into {heads} attention heads")
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        hidden_act="silu",
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_parameters=_rope(getattr(config, "rope_parameters", None)),
    )


def _rope(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rope parameters for full attention over whole head dimensions, from those of any family."""
    found = dict(parameters or {})
    if isinstance(found.get("full_attention"), Mapping):
        # One set per kind of layer (Gemma 3); the head's layer has full attention.
        found = dict(found["full_attention"])
    # A head rotates all dimensions, also where its target rotates a part.
    found.pop("partial_rotary_factor", None)
    return {"rope_type": "default", "rope_theta": 10000.0} | found


def layer_to_json(layer: LayerConfig) -> dict[str, Any]:
    """The layer's part of config.json; rope also under the names that other engines and transformers 4 read."""
    values = _sizes(layer)
    rope = dict(layer.rope_parameters)
    values["rope_parameters"] = rope
    values["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    variants = {key: True for key in ("qkv_bias", "qk_norm") if getattr(layer, key)}
    return values | {"num_hidden_layers": 1, "attention_bias": layer.o_bias, "mlp_bias": False} | variants


def _sizes(layer: LayerConfig) -> dict[str, Any]:
    return {key: value for key, value in asdict(layer).items() if key not in ("qkv_bias", "o_bias", "qk_norm")}


def layer_from_json(values: Mapping[str, Any], where: str) -> LayerConfig:
    """The layer that a config.json describes; InputError, one line, names file and key."""
    layers = setting(values, "num_hidden_layers", int, where, 1)
    if layers != 1:
        raise InputError(f"{where}: 'num_hidden_layers' is {layers}; only heads of one layer can be loaded")
    hidden, heads = count(values, "hidden_size", where), count(values, "num_attention_heads", where)
    rope = values.get("rope_parameters")
    if rope is None:
        scaling = dict(setting(values, "rope_scaling", dict, where, {}))
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        rope = scaling
    if not isinstance(rope, Mapping):
        raise InputError(f"{where}: 'rope_parameters' is {rope!r}; it must be of type dict")
    rope = {"rope_theta": setting(values, "rope_theta", float, where, 10000.0)} | dict(rope)
    kv_heads = count(values, "num_key_value_heads", where, heads)
    if heads % kv_heads or hidden % heads:
        raise InputError(
            f"{where}: 'num_attention_heads' is {heads}, not a multiple of {kv_heads}, or does not divide {hidden}"
        )
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=count(values, "intermediate_size", where),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=count(values, "head_dim", where, hidden // heads),
        hidden_act=setting(values, "hidden_act", str, where, "silu"),
        max_position_embeddings=count(values, "max_position_embeddings", where, 2048),
        rms_norm_eps=setting(values, "rms_norm_eps", float, where, 1e-6),
        rope_parameters=_rope(rope),
        qkv_bias=setting(values, "qkv_bias", bool, where, setting(values, "attention_bias", bool, where, False)),
        o_bias=setting(values, "attention_bias", bool, where, False),
        qk_norm=setting(values, "qk_norm", bool, where, False),
    )


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc, unused-ignore]
    """Rotary embedding whose frequencies stay fp32 when the head goes to half precision.

    In bf16 a frequency is off by up to 0.4 %, which is radians at position 1000. transformers' own loading keeps
    them in fp32, `Module.to(dtype)` does not.
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

    def tables(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[B, T, head_dim]` in the dtype of `states`."""
        return cast(tuple[Tensor, Tensor], self(states, position_ids))


def llama_parts(layer: LayerConfig, vocab_size: int) -> tuple[LlamaConfig, Rotary]:
    """The config that transformers' modules take, and the rotary embedding; InputError for values they refuse."""
    values = _sizes(layer) | {"rope_parameters": dict(layer.rope_parameters)}
    try:
        config = LlamaConfig(**values, vocab_size=vocab_size, num_hidden_layers=1, attention_bias=False, mlp_bias=False)
        rotary = Rotary(config)
        ACT2FN[layer.hidden_act]
    except (ValueError, TypeError, KeyError) as error:
        # Rope types are looked up by name, and each asks for keys of its own.
        reason = (str(error).strip().splitlines() or [""])[-1].strip()
        raise InputError(
            f"no LLaMA layer can be built with rope {dict(layer.rope_parameters)} and activation "
            f"'{layer.hidden_act}' ({type(error).__name__}: {reason}); correct the config"
        ) from None
    config._attn_implementation = "sdpa"
    return config, rotary


def attention(layer: LayerConfig, llama: LlamaConfig, inputs: int) -> nn.Module:
    """Self-attention over states `inputs` wide: LLaMA's, with the biases (Qwen 2) or norms (Qwen 3) asked for."""
    module: nn.Module
    if layer.qk_norm:
        values = _sizes(layer) | {"rope_parameters": dict(layer.rope_parameters)}
        qwen = Qwen3Config(**values, num_hidden_layers=1)
        qwen._attn_implementation = llama._attn_implementation
        module = Qwen3Attention(qwen, 0)
    else:
        module = LlamaAttention(llama, 0)
    queries, keys = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    module.q_proj = nn.Linear(inputs, queries, bias=layer.qkv_bias)
    module.k_proj = nn.Linear(inputs, keys, bias=layer.qkv_bias)
    module.v_proj = nn.Linear(inputs, keys, bias=layer.qkv_bias)
    module.o_proj = nn.Linear(queries, layer.hidden_size, bias=layer.o_bias)
    return module


class FeatureHead(nn.Module):
    """A head that makes its next features, through one LLaMA layer, from features and the tokens after them."""

    rotary: Rotary

    def states(self, input_ids_BT: Tensor, features_BTH: Tensor, *attending: Any) -> Tensor:
        """The next features `[B, T, H]` of `forward`, without the logits that they give."""
        raise NotImplementedError

    def logits(self, states_BTH: Tensor) -> Tensor:
        """What the head predicts where its features are these."""
        raise NotImplementedError

    def forward(self, input_ids_BT: Tensor, features_BTH: Tensor, *attending: Any) -> tuple[Tensor, Tensor]:
        """Logits of the token after each input token, and the features `[B, T, H]` under them, for a next step.

        `input_ids_BT[:, t]` is the token that follows the position of `features_BTH[:, t]`. `attending` is what the
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
        """What the layer's attention takes: what is given, else causal attention after the P cached tokens, and
        positions `[1, T]` that follow them.

        The mask is additive (one that is given may be boolean), `[B or 1, 1, T, P + T]`, or None where sdpa's own
        causal rule is right: without a mask sdpa aligns the queries with the first keys, and with a cache they belong
        to the last.
        """
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        queries = states_BTH.shape[1]
        if mask is None and past > 0 and queries > 1:
            least = torch.finfo(states_BTH.dtype).min
            mask = torch.full((queries, past + queries), least, dtype=states_BTH.dtype, device=states_BTH.device)
            mask = mask.triu(past + 1)[None, None]
        if positions is None:
            positions = torch.arange(past, past + queries, device=states_BTH.device).unsqueeze(0)
        return {
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": past_key_values,
            "position_embeddings": self.rotary.tables(states_BTH, positions),
        }


@torch.no_grad()
def init_linear(linear: nn.Linear, std: float | None, generator: torch.Generator) -> None:
    """Normal weights, zero bias. `std` None is 1 / sqrt(inputs), so that outputs have the scale of the inputs."""
    weight = torch.empty(linear.weight.shape, dtype=torch.float32)
    weight.normal_(0.0, 1 / math.sqrt(linear.in_features) if std is None else std, generator=generator)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.zero_()


def init_layer(layer: nn.Module, generator: torch.Generator) -> None:
    """Initialise every linear map of a fresh layer; norms are created as ones."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            init_linear(module, _INITIALIZER_RANGE, generator)
