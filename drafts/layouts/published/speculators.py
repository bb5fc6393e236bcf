"""EAGLE-3 as the speculators library writes it: the layer's config in `transformer_layer_config`, tensors `layers.0.*`.

Source: `src/speculators/models/eagle3` of github.com/vllm-project/speculators, versions 0.1 to 0.7.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drafts.layouts.published import eagle3
from drafts.layouts.published.found import Found, Layout, Names
from draftsmith_core.errors import InputError


def known(values: Mapping[str, Any], names: Names) -> bool:
    """By the key that vLLM looks for too."""
    return "speculators_model_type" in values


def read(found: Found) -> Found:
    """The two parts of the config as one; absent flags have the library's defaults."""
    layer = found.values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise InputError(f"{found.config_file}: 'transformer_layer_config' is {layer!r}; it must be of type dict")
    windows = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
    kinds = layer.get("layer_types") or ["sliding_attention" if windows else "full_attention"]
    if "sliding_attention" in kinds[:1]:
        raise InputError(f"{found.config_file}: its layer attends to a window; only full attention can be run")
    ours = {key: value for key, value in found.values.items() if key != "transformer_layer_config"}
    defaults = {"norm_before_residual": False, "num_hidden_layers": 1}
    return eagle3.read(replace(found, values=defaults | layer | ours))


SPECULATORS = Layout("speculators EAGLE-3", "eagle3", known, read, speculators_type="eagle3")
