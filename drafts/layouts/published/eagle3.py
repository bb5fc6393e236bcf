"""EAGLE-3 as its authors, SpecForge (SGLang) and vLLM's trainers write it.

Legend: V target vocabulary, D draft vocabulary, H hidden size.

Sources: `eagle/model/cnets.py` of github.com/SafeAILab/EAGLE (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`, `t2d`; an
embedding only where it is not the target's), SGLang's and vLLM's `llama_eagle3.py` for the names that their loaders
map: `layers.0.*`, a prefix `model.`, `aux_norm_low/mid/high`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafts.draft_vocabulary import offsets
from drafts.layouts.published.eagle import biases
from drafts.layouts.published.found import Found, Layout, Names, architectures
from draftsmith_core.errors import InputError

_EMBEDDING = "embed_tokens.weight"
_AUX_NORMS = {f"aux_norm_{which}.weight": f"fc_norm.{i}.weight" for i, which in enumerate(("low", "mid", "high"))}
# In memory during training; the target has them.
_TARGETS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")


def known(values: Mapping[str, Any], names: Names) -> bool:
    """The key `draft_vocab_size`, an architecture named after it, or the layer's own name."""
    if "draft_vocab_size" in values or any("Eagle3" in name for name in architectures(values)):
        return True
    if values.get("num_hidden_layers", 1) != 1:
        return False
    return any(name.endswith("midlayer.hidden_norm.weight") for name in names())


def read(found: Found) -> Found:
    """In our own layout. What a file leaves out is filled as its engines do: `t2d` from `d2t`, `lm_head` from the
    target's rows.
    """
    tensors: dict[str, Tensor] = {}
    for key, tensor in found.tensors.items():
        if _name(key) in tensors:
            raise InputError(f"{found.tensor_file}: holds '{_name(key)}' under two names, one is '{key}'; delete one")
        if key not in _TARGETS_OWN:
            tensors[_name(key)] = tensor
    values = _flat(found)
    size = values.get("vocab_size") or len(found.lm_head_VH)
    if not isinstance(size, int):
        raise InputError(f"{found.config_file}: 'vocab_size' is {size!r}; it must be of type int")
    lm_head = tensors.get("lm_head.weight")
    drafted = len(tensors["d2t"]) if "d2t" in tensors else size if lm_head is None else len(lm_head)
    if values.get("draft_vocab_size") is None:
        values["draft_vocab_size"] = drafted
    _vocabulary(found, values, tensors, size)
    if lm_head is None:
        _targets_projection(found, values, tensors, size)
    found = replace(found, values=values, tensors=tensors)
    values |= biases(found, "midlayer.")
    values["qk_norm"] = "midlayer.self_attn.q_norm.weight" in tensors
    values["fc_norm"] = "fc_norm.0.weight" in tensors
    values["norm_before_fc"] = "input_norm.weight" in tensors
    if _EMBEDDING in tensors:
        narrower = tensors[_EMBEDDING].shape[-1] != found.lm_head_VH.shape[-1]
        values["embed_requires_grad"] = narrower or values.get("embed_requires_grad") is True
    else:
        values["embed_requires_grad"] = False
    return found


def _name(key: str) -> str:
    key = key.removeprefix("model.")
    return _AUX_NORMS.get(key, key.replace("layers.0.", "midlayer.", 1) if key.startswith("layers.0.") else key)


def _flat(found: Found) -> dict[str, Any]:
    """The config's values with those flags at the top that some write into `eagle_config`."""
    inner = found.values.get("eagle_config")
    inner = inner if isinstance(inner, dict) else {}
    if inner.get("use_aux_hidden_state") is False:
        raise InputError(
            f"{found.config_file}: 'use_aux_hidden_state' is false; only heads on several of the target's layers can "
            f"be run"
        )
    flags = {key: inner[key] for key in ("norm_before_fc", "norm_output", "norm_before_residual") if key in inner}
    return flags | found.values


def _vocabulary(found: Found, values: dict[str, Any], tensors: dict[str, Tensor], size: int) -> None:
    """`d2t` as offsets and `t2d` as a mask; neither where every token can be drafted."""
    for key, dtype in (("d2t", torch.int64), ("t2d", torch.bool)):
        if key in tensors and tensors[key].is_floating_point():
            raise InputError(f"{found.tensor_file}: '{key}' is {tensors[key].dtype}; it must be like {dtype}")
        if key in tensors and tensors[key].ndim != 1:
            raise InputError(f"{found.tensor_file}: '{key}' has {tensors[key].ndim} dimensions; it must have one")
        if key in tensors:
            tensors[key] = tensors[key].to(dtype)
    if values["draft_vocab_size"] == size:
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    if "d2t" not in tensors and "t2d" in tensors:
        tensors["d2t"] = offsets(tensors["t2d"].nonzero().flatten())
    if "d2t" in tensors:
        chosen = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if bool((chosen < 0).any() or (chosen >= size).any()):
            raise InputError(f"{found.tensor_file}: 'd2t' names tokens outside 0 to {size - 1}; export it again")
    if "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, chosen, True)


def _targets_projection(found: Found, values: dict[str, Any], tensors: dict[str, Tensor], size: int) -> None:
    """Without an `lm_head` of its own the head reads the target's, as vLLM does; here a copy of the rows it drafts."""
    weight_VH = found.lm_head_VH.detach().cpu()
    if values.get("hidden_size") != weight_VH.shape[-1]:
        raise InputError(
            f"{found.tensor_file}: holds no 'lm_head.weight', and the target's is {weight_VH.shape[-1]} wide where "
            f"the head is {values.get('hidden_size')}; export it again with it"
        )
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(size)
    tensors["lm_head.weight"] = weight_VH[ids]


EAGLE3 = Layout("EAGLE-3 of its authors, SpecForge and ModelOpt", "eagle3", known, read)
