"""What we assume of transformers 5.17 to 5.24, of which minor versions move and rename things: its
inner modules, how a cache is named, what a layer returns, and how a config names its layers.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicLayer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.hub import cached_file

# Kinds of layers in `layer_types`.
FULL = "full_attention"
SLIDING = "sliding_attention"
# How forwards name their cache, in inputs and outputs: since 5.24, before, and of recurrent models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_name(forward: Callable[..., object]) -> str:
    """Return the argument that takes a cache, "" if none does."""
    taken = signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), "")


# Of decoder layers and attention.
LAYER_CACHE = cache_name(LlamaDecoderLayer.forward)


def layer_states(returned: Any) -> Tensor:
    """The states among what a layer returned."""
    states: Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return states


def layer_kinds(config: Any) -> Sequence[str]:
    """The kind of each layer. Without layer_types a window applies to every layer (Mistral)."""
    windowed = getattr(config, "sliding_window", None) is not None
    layers = getattr(config, "num_hidden_layers", None) or 0
    usual = [SLIDING if windowed else FULL] * layers
    return getattr(config, "layer_types", None) or usual
