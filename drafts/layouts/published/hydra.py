"""Hydra as its authors publish it: `hydra_lm_head.pt` with `hydra_mlp.*` and a projection per head.

Source: `hydra/model/hydra_heads/mlp_head.py` of github.com/zankner/Hydra.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drafts.layouts.published.found import Found, Layout, Names
from draftsmith_core.errors import InputError

_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)")
# What another value would mean is another network.
_PLAIN = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


def known(values: Mapping[str, Any], names: Names) -> bool:
    """By the number of heads in the config."""
    return "hydra_num_heads" in values


def read(found: Found) -> Found:
    """Renamed to our names; a file in our own layout is left as it is."""
    if not any(key.startswith("hydra_mlp.") for key in found.tensors):
        return found
    for key, plain in _PLAIN.items():
        # Their config's defaults, where a key is absent, are those of heads that do not read tokens.
        value = found.values.get(key, False if key == "grounded_heads" else plain)
        if value != plain:
            raise InputError(
                f"{found.config_file}: '{key}' is {value!r}; only Hydra's MLP heads that read the drafted tokens "
                f"({key} {plain!r}) can be run"
            )
    tensors = {_name(key, found): tensor for key, tensor in found.tensors.items()}
    layers = 1 + max(int(key.split(".")[2]) for key in tensors if key.startswith("heads."))
    heads = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("heads."))
    values = {
        **found.values,
        "hidden_size": found.lm_head_VH.shape[-1],
        "vocab_size": len(found.lm_head_VH),
        "hydra_num_heads": heads,
        "hydra_num_layers": layers,
        "hydra_own_projection": True,
        "hydra_skip_bias": True,
    }
    return replace(found, values=values, tensors=tensors)


def _name(key: str, found: Found) -> str:
    if match := _MLP.fullmatch(key):
        head, block, part, which = match.groups()
        return f"heads.{head}.{block}.{'linear' if part == 'linear' else 'skip'}.{which}"
    if match := _PROJECTION.fullmatch(key):
        return "projections.{}.{}".format(*match.groups())
    raise InputError(f"{found.tensor_file}: holds the tensor '{key}' that Hydra's MLP heads do not have")


HYDRA = Layout("Hydra of its authors", "hydra", known, read)
