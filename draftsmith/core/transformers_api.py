"""What we assume of transformers 5.17 to 5.24: a minor version renames arguments."""

from collections.abc import Callable
from inspect import signature

from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# How forwards name their cache, in inputs and outputs: since 5.24, before, and of recurrent models.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_name(forward: Callable[..., object]) -> str:
    """Return the argument that takes a cache, "" if none does."""
    taken = signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), "")


# Of decoder layers and attention.
LAYER_CACHE = cache_name(LlamaDecoderLayer.forward)
