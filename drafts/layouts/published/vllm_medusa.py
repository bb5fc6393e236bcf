"""Medusa under the names that vLLM loads: `blocks.i.layers.j.*`, `lm_heads.i.weight`.

Source: `vllm/model_executor/models/medusa.py`. Blocks have a bias only with `medusa_fc_bias`; with `original_lm_head`
all heads share one projection.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drafts.layouts.published import medusa
from drafts.layouts.published.found import Found, Layout, Names
from draftsmith_core.errors import InputError

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def known(values: Mapping[str, Any], names: Names) -> bool:
    """By the names of the blocks."""
    if "medusa_num_heads" not in values and values.get("model_type") != "medusa":
        return False
    return any(_BLOCK.fullmatch(name.removeprefix("medusa_heads.")) for name in names())


def read(found: Found) -> Found:
    """The same head under the tensor names of Medusa's authors."""
    size = found.values.get("truncated_vocab_size")
    if "token_map" in found.tensors or (size is not None and size != len(found.lm_head_VH)):
        raise InputError(
            f"{found.tensor_file}: drafts only the tokens of its 'token_map'; Medusa heads with a part of the "
            f"vocabulary cannot be run, use the checkpoint that it was made from"
        )
    tensors, shared = {}, None
    heads = layers = 0
    for key, tensor in found.tensors.items():
        name = key.removeprefix("medusa_heads.")
        if match := _BLOCK.fullmatch(name):
            tensors["{}.{}.linear.{}".format(*match.groups())] = tensor
            heads, layers = max(heads, 1 + int(match[1])), max(layers, 1 + int(match[2]))
        elif match := _HEAD.fullmatch(name):
            tensors[f"projection.{match[1]}"] = tensor
        elif name == "lm_head.weight":
            shared = tensor
        else:
            raise InputError(f"{found.tensor_file}: holds the tensor '{key}' that vLLM's Medusa does not have")
    if shared is None and found.values.get("original_lm_head") is True:
        shared = tensors.get("projection.0")
    for i in range(heads):
        projection = tensors.pop(f"projection.{i}", shared)
        if projection is not None:
            tensors[f"{i}.{layers}.weight"] = projection
    return medusa.read(replace(found, tensors=tensors))


VLLM_MEDUSA = Layout("Medusa as vLLM names it", "medusa", known, read)
