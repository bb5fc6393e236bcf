"""Layouts of Medusa and Hydra heads."""

import logging
import re

import torch

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.drafts.layouts.layout import ExportedHead, Functions, HeadFiles, Names

log = logging.getLogger(__name__)
_BLOCK = r"(\d+)\.(\d+)\.linear\.weight"


def _is_medusa(values: JsonObject, names: Names) -> bool:
    return "medusa_num_heads" in values or values.get("model_type") == "medusa"


def _read_medusa(files: HeadFiles) -> None:
    """Keep the heads only, and count them: published configs say two heads where their files hold
    five.
    """
    own = [name for name in files.tensors if re.match(r"\d+\.\d+\.", name)]
    if others := len(files.tensors) - len(own):
        log.warning("Medusa: ignoring %d tensors of its base model", others)
    tensors = {name: files.tensors[name] for name in own}
    files.tensors = tensors
    heads, layers = files.count_heads_and_layers(_BLOCK)
    for name in own:
        if name.endswith("linear.weight"):
            zeros = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
            tensors.setdefault(name.replace("weight", "bias"), zeros)
    projections = [f"{i}.{layers}.weight" for i in range(heads)]
    if heads and tensors.keys().isdisjoint(projections):
        log.warning("Medusa: its heads have no output projections; they start from the target's")
        tensors |= dict.fromkeys(projections, files.lm_head_VH.detach().cpu())
    declared = files.values.get("medusa_num_heads", heads)
    if declared != heads:
        log.warning(
            "Medusa: its config says %s heads, its file holds %d; using those", declared, heads
        )
    files.values |= {"medusa_num_heads": heads, "medusa_num_layers": layers}


def _is_vllm_medusa(values: JsonObject, names: Names) -> bool:
    return _is_medusa(values, names) and any("blocks.0.layers.0." in name for name in names())


def _read_vllm_medusa(files: HeadFiles) -> None:
    size = len(files.lm_head_VH)
    if "token_map" in files.tensors or files.values.get("truncated_vocab_size") not in (None, size):
        raise InputError(
            "Medusa heads with a reduced vocabulary cannot be run; use the checkpoint with the "
            "full one"
        )
    heads, layers = files.count_heads_and_layers(_BLOCK)
    shared = files.tensors.pop("lm_head.weight", None)
    if shared is None and files.values.get("original_lm_head") is True:
        shared = files.tensors.get(f"0.{layers}.weight")
    if shared is not None:
        for i in range(heads):
            files.tensors.setdefault(f"{i}.{layers}.weight", shared)
    _read_medusa(files)


def _vllm_config(head: ExportedHead) -> JsonObject:
    # Without the first key vLLM builds the blocks without a bias and ignores ours.
    return head.values | {"medusa_fc_bias": True, "original_lm_head": False}


# Another value means another network.
_HYDRA_PLAIN = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


def _read_hydra(files: HeadFiles) -> None:
    heads, layers = files.count_heads_and_layers(r"heads\.(\d+)\.(\d+)\..+")
    if "projections.0.weight" not in files.tensors or "hydra_own_projection" in files.values:
        return  # our own layout
    # Their config's default for an absent `grounded_heads` is false.
    values = _HYDRA_PLAIN | {"grounded_heads": False} | files.values
    for key, plain in _HYDRA_PLAIN.items():
        if values[key] != plain:
            raise InputError(
                f"'{key}' is {values[key]!r}; only Hydra's MLP heads that read drafted tokens "
                "can run"
            )
    files.values |= {
        "hidden_size": files.lm_head_VH.shape[-1],
        "vocab_size": len(files.lm_head_VH),
        "hydra_num_heads": heads,
        "hydra_num_layers": layers,
        "hydra_own_projection": True,
        "hydra_skip_bias": True,
    }


FUNCTIONS = {
    "vllm-medusa": Functions(known=_is_vllm_medusa, read=_read_vllm_medusa, config=_vllm_config),
    "medusa": Functions(known=_is_medusa, read=_read_medusa),
    "hydra": Functions(known=lambda values, _: "hydra_num_heads" in values, read=_read_hydra),
}
