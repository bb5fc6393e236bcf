"""Models that a token tree cannot be run through are refused with the reason that is theirs."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
)

from decode import SpeculativeDecoder
from decode.supported_models import attention_windows


def tiny(kind: str, **options: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model(kind, **sizes | options)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for each in (model.config, model.generation_config):
        each.eos_token_id, each.pad_token_id, each.bos_token_id = None, 0, None
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "MambaForCausalLM is recurrent: its state cannot go back"),
        ("rwkv", "RwkvForCausalLM is recurrent: its state cannot go back"),
        ("openai-gpt", "OpenAIGPTLMHeadModel keeps no key/value cache"),
        ("bloom", "BloomForCausalLM does not take position_ids"),
        ("gpt_neo", "masks by a table of its own"),
        ("lfm2", "layers of type 'conv'"),
        ("llama", "LlamaForCausalLM attends to all tokens, and its config.json sets a sliding window"),
        ("olmo2", "Olmo2ForCausalLM attends to all tokens, and its config.json sets a sliding window"),
        ("doge", "gives other outputs with a cache"),
    ],
)
def test_the_reason_is_the_right_one(kind: str, reason: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "llama": {"sliding_window": 8},
        "olmo2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2},
    }
    with pytest.raises(ValueError, match=reason) as caught:
        SpeculativeDecoder(tiny(kind, **options.get(kind, {})))
    assert "\n" not in str(caught.value)


class Renamed(MistralForCausalLM):
    """A class of one's own, whose file says nothing of windows."""


def test_a_window_of_the_class_below_is_a_window() -> None:
    model = tiny("mistral", sliding_window=8)
    model.__class__ = Renamed
    assert attention_windows(model) == {"sliding_attention": 8}
    model.config.sliding_window = None
    assert attention_windows(model) == {"full_attention": None}
