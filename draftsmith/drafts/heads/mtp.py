"""MTP head: the multi-token-prediction layer that many models ship with, or a fresh one like it.

    fc([norm(embedding of the next token); norm(hidden state)]) -> decoder layer -> norm -> logits

The decoder layer is of the target's own kind (transformers' class of its family, full attention).
Embedding, rotary embedding and output projection are the target's. The hidden state is the one
after the final norm: of the target at the first depth, of the head itself at the next ones. One
module serves all depths, as in vLLM and SGLang.

Legend: B rows, T tokens, H hidden size, V vocabulary.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); the models of Qwen3-Next in vLLM and SGLang,
whose tensor names these are.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.models import text_config, vocabulary_size
from draftsmith.core.sampling import generator
from draftsmith.core.transformers_api import FULL, LAYER_CACHE
from draftsmith.drafts.heads.borrowed import ReadsLastState, borrow
from draftsmith.drafts.heads.eagle import LayerConfig, Rotary, join_scale
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.heads.unrolled_attention import UNROLLED

_PARTS = ("layers", "norm", "rotary_emb")
_ARGUMENTS = {"attention_mask", "position_embeddings", LAYER_CACHE}
# Families whose layers serve targets of others.
_FOR_ANY_TARGET = (LlamaConfig.model_type, Qwen2Config.model_type)
_LAYER = "layers.0."
# Keys of a transformers config that do not describe a layer.
_NOT_OF_THE_LAYER = (
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "quantization_config",
    "transformers_version",
)
# The embedding of the one-layer model that the layer is taken from; the target's is used.
_FEWEST_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerConfig):
    """The layer, its sizes, and what differs between families."""

    layer: JsonObject
    """The transformers config of a model of this one layer."""
    hidden_first: bool = False
    """`fc` reads [hidden state; embedding] (MiMo), not [embedding; hidden state]."""

    @property
    def num_experts_per_tok(self) -> int | None:
        """Experts that a token has, if the layer is a mixture."""
        return self.layer.get("num_experts_per_tok")

    def to_json(self) -> JsonObject:
        return {
            "architectures": ["MtpHead"],
            "hidden_first": self.hidden_first,
            "layer": self.layer,
        }

    @classmethod
    def from_json(cls, values: JsonObject, target: PreTrainedModel) -> "MtpConfig":
        """Read config.json. Raises InputError if its sizes or its family are not the target's."""
        if "layer" in values:
            layer = values["layer"]
        else:
            layer = layer_of(target, values["family"])
        config = cls.read(layer, layer=layer, hidden_first=values["hidden_first"])
        borrow(target).check_sizes(vars(config))
        family = config.layer["model_type"]
        known = text_config(target).model_type
        if family not in (known, *_FOR_ANY_TARGET):
            raise InputError(
                f"'layer' is of a {family} model and the target is a {known} model; use the "
                "target it was trained for"
            )
        return config

    def model(self, seed: int = 0) -> Any:
        """A fresh model of the one layer, on the CPU and in fp32, with an embedding of a few
        tokens.
        """
        values = copy.deepcopy(self.layer)
        config: Any = AutoConfig.for_model(values.pop("model_type"), **values)
        config.vocab_size = _FEWEST_TOKENS
        config.pad_token_id = None
        config._attn_implementation = UNROLLED
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return AutoModel.from_config(config, dtype=torch.float32)


def layer_of(target: PreTrainedModel, family: str | None = None) -> JsonObject:
    """The transformers config of a layer of the target's own kind with full attention; of a LLaMA
    layer as wide as one of the target for a family whose layers cannot run on their own.

    family: another one, LLaMA-like, to which the layer belongs (`qwen2`).
    """
    config = None if family else _own_layer(target)
    if config is None:
        config = _llama_like(target, family or LlamaConfig.model_type)
    values: JsonObject = json.loads(json.dumps(config.to_dict()))
    for key in _NOT_OF_THE_LAYER:
        values.pop(key, None)
    return values | {"vocab_size": vocabulary_size(target)}


def _own_layer(target: PreTrainedModel) -> PretrainedConfig | None:
    """The config of a model of one full-attention layer of the target's family; None if the family
    has no such layer that takes mask, cache and rotary embeddings from outside.

    As `get_mtp_config` of transformers: experts wherever a family has them.
    """
    config: Any = copy.deepcopy(text_config(target))
    types = getattr(config, "layer_types", None)
    if types is not None and FULL not in types:
        return None
    try:
        config.num_hidden_layers = 1
        if types is not None:
            config.layer_types = [FULL]
        elif getattr(config, "sliding_window", None) is not None:
            config.sliding_window = None
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mlp_layer_types = config.mlp_layer_types[-1:]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        with torch.device("meta"):
            model: Any = AutoModel.from_config(config)
    except Exception:
        # Families check their configs with errors of several types; this one cannot have one layer.
        return None
    missing = [part for part in _PARTS if not hasattr(model, part)]
    # Dory writes a layer as two.
    written = config.to_dict().get("num_hidden_layers", 1)
    if missing or written != 1 or not model._supports_sdpa:
        return None
    takes = signature(model.layers[0].forward).parameters
    if not takes.keys() >= _ARGUMENTS:
        return None
    return config


def _llama_like(target: PreTrainedModel, family: str) -> PretrainedConfig:
    like = LayerConfig.like(target)
    return AutoConfig.for_model(
        family,
        vocab_size=like.vocab_size,
        hidden_size=like.hidden_size,
        intermediate_size=like.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.num_key_value_heads,
        head_dim=like.head_dim,
        max_position_embeddings=like.max_position_embeddings,
        rms_norm_eps=like.rms_norm_eps,
        rope_parameters=dict(like.rope_parameters),
        bos_token_id=None,
        eos_token_id=None,
    )


@dataclass(frozen=True, eq=False)
class _TargetRotary:
    """The target's rotary embedding, in a plain object so that the head does not own its
    buffers.
    """

    module: Any
    options: dict[str, str]

    def __deepcopy__(self, memo: dict[int, object]) -> "_TargetRotary":
        return self

    def __call__(self, states_BTH: Tensor, positions: Tensor) -> Any:
        """What the family's layers read: cosines and sines, or complex numbers (DeepSeek-V2)."""
        return self.module(states_BTH, positions, **self.options)


class MtpHead(ReadsLastState, FeatureHead):
    """Two norms, `fc` over both, one decoder layer, the final norm, the target's output
    projection.
    """

    kind: ClassVar[str] = "mtp"
    config_type = MtpConfig

    def __init__(self, config: MtpConfig, target: PreTrainedModel, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        model = config.model(seed)
        self.norm: nn.Module = model.norm
        self.pre_fc_norm_embedding = copy.deepcopy(model.norm)
        self.pre_fc_norm_hidden = copy.deepcopy(model.norm)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([model.layers[0]])
        if config.layer["model_type"] == text_config(target).model_type:
            rope = model.config.rope_parameters.values()
            nested = any(isinstance(parameters, dict) for parameters in rope)
            options = {"layer_type": FULL} if nested else {}
            self.rotary = _TargetRotary(target.get_decoder().rotary_emb, options)
        else:
            self.rotary = Rotary(model.config)

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, seed: int = 0) -> "MtpHead":
        """An untrained head on the target's device, in its dtype and in training mode."""
        layer = layer_of(target)
        head = cls(MtpConfig.read(layer, layer=layer), target, seed)
        nn.init.normal_(head.fc.weight, 0.0, join_scale(head.fc), generator=generator(seed))
        return head.to(target.device, target.dtype)

    def of_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of tensors whose decoder layer has the names that its family has on disk
        (experts one by one).
        """
        model = self.config.model()
        whole = {name: tensor for name, tensor in model.state_dict().items() if _LAYER not in name}
        own: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            (whole if name.startswith(_LAYER) else own)[name] = tensor
        try:
            one, info = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=whole,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except RuntimeError:
            family = model.config.model_type
            raise RuntimeError(f"its decoder layer is not one of a {family} model") from None
        for name, tensor in one.layers[0].state_dict(prefix=_LAYER).items():
            if name not in info["missing_keys"]:
                own[name] = tensor
        # `load_state_dict` names what is missing, and these.
        return own | {name: whole[name] for name in info["unexpected_keys"]}

    def on_disk(self) -> dict[str, Tensor]:
        """The inverse of `of_checkpoint`: the tensors, the decoder layer's as its family has them
        on disk.
        """
        model = self.config.model()
        model.layers[0].load_state_dict(self.layers[0].state_dict())
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory, max_shard_size="1000GB")
            whole = load_file(Path(directory) / "model.safetensors")
        tensors = {name: whole[name] for name in whole if name.startswith(_LAYER)}
        for name, tensor in self.state_dict().items():
            if not name.startswith(_LAYER):
                tensors[name] = tensor
        return tensors

    def inputs(
        self, input_ids_BT: Tensor, features_BTH: Tensor, dtype: torch.dtype
    ) -> Sequence[Tensor]:
        embedded_BTH, hidden_BTH = super().inputs(input_ids_BT, features_BTH, dtype)
        normed = [self.pre_fc_norm_embedding(embedded_BTH), self.pre_fc_norm_hidden(hidden_BTH)]
        return normed[::-1] if self.config.hidden_first else normed

    def ending(self, states_BTH: Tensor) -> Tensor:
        return self.norm(states_BTH)
