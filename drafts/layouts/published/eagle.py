"""EAGLE-1/2 as its authors publish it (yuhuili/EAGLE-*): a one-layer config of the target's family, `layers.0.*`, `fc`.

Source: `eagle/model/cnets1.py` and the configs of github.com/SafeAILab/EAGLE. Configs of heads for Mixtral and Qwen 2
carry those families' `model_type`; the layer is a LLaMA layer all the same, for Qwen 2 with biases in q, k and v.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drafts.layouts.published.found import Found, Layout, Names, architectures

_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


def known(values: Mapping[str, Any], names: Names) -> bool:
    """One layer of a LLaMA-like family with the key `bias`, or with the map `fc` that no language model has."""
    if any("Eagle" in name for name in architectures(values)):
        return True
    one_layer = values.get("num_hidden_layers") == 1 and values.get("model_type", "llama") in _FAMILIES
    return one_layer and ("bias" in values or "fc.weight" in names())


def read(found: Found) -> Found:
    """Which biases there are, from the tensors: their code draws those that a file lacks at random."""
    return replace(found, values={**found.values, **biases(found, "layers.0."), "bias": "fc.bias" in found.tensors})


def biases(found: Found, prefix: str) -> dict[str, bool]:
    """The layer's `qkv_bias` and `attention_bias` (of its output), by the tensors in the file."""
    attention = f"{prefix}self_attn."
    return {
        "qkv_bias": f"{attention}q_proj.bias" in found.tensors,
        "attention_bias": f"{attention}o_proj.bias" in found.tensors,
    }


EAGLE = Layout("EAGLE-1/2 of its authors", "eagle", known, read)
