"""EAGLE-1/2 head: predicts the target's next top feature from a feature and the token after it.

Legend: B rows, T tokens, H hidden size, V vocabulary.

Source: EAGLE (arXiv 2401.15077, section 4.1). On disk as its authors' checkpoints are: a Llama config of one layer with
the key `bias` (of `fc`), tensors without a prefix, and a copy of the target's embedding, which is not trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drafts.heads.borrowed import ReadsLastState, borrow
from drafts.heads.llama_layer import (
    FeatureHead,
    LayerConfig,
    attention,
    layer_from_json,
    layer_like,
    layer_to_json,
    llama_parts,
)
from draftsmith_core.models import vocabulary_size


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The layer, the target's vocabulary, and whether `fc` has a bias."""

    layer: LayerConfig
    vocab_size: int
    bias: bool = False

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **layer_to_json(self.layer),
            "vocab_size": self.vocab_size,
            "bias": self.bias,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: PreTrainedModel) -> "EagleConfig":
        """Read config.json. Raises InputError if its sizes are not the target's."""
        borrow(target).check_sizes(values["hidden_size"], values["vocab_size"])
        # The authors' code gives `fc` a bias if the key is absent.
        return cls(layer=layer_from_json(values), vocab_size=values["vocab_size"], bias=values.get("bias", True))


class EagleHead(ReadsLastState, FeatureHead):
    """fc over [embedding, feature], one LLaMA layer without input norm, the target's own output projection."""

    kind: ClassVar[str] = "eagle"
    config_type = EagleConfig

    def __init__(self, config: EagleConfig, target: PreTrainedModel) -> None:
        super().__init__()
        self.config = config
        self.borrowed = borrow(target)
        llama, rotary = llama_parts(config.layer, config.vocab_size)
        hidden = config.layer.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.bias)
        layer = LlamaDecoderLayer(llama, 0)
        layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        layer.self_attn = attention(config.layer, llama, hidden)  # type: ignore[assignment]
        self.layers = nn.ModuleList([layer])
        self.rotary = rotary

    @classmethod
    def fresh(cls, target: PreTrainedModel, *, seed: int = 0) -> "EagleHead":
        """An untrained head on the target's device, in its dtype and in training mode."""
        head = cls(EagleConfig(layer=layer_like(target), vocab_size=vocabulary_size(target)), target)
        head.draw(head.layers, seed)
        return head.to(device=target.device, dtype=target.dtype)

    def states(self, input_ids_BT: Tensor, features_BTH: Tensor, *attending: Any) -> Tensor:
        """The predicted features `[B, T, H]` of `forward`."""
        dtype = self.fc.weight.dtype
        embedded_BTH = self.borrowed.embed(input_ids_BT, dtype)
        states_BTH: Tensor = self.fc(torch.cat([embedded_BTH, features_BTH.to(dtype)], dim=-1))
        states_BTH = self.layers[0](states_BTH, **self.attending(states_BTH, *attending))
        return states_BTH

    def logits(self, states_BTH: Tensor) -> Tensor:
        """`[B, T, V]`, the target's own of the predicted features."""
        return self.borrowed.project(states_BTH)
