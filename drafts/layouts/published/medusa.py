"""Medusa as its authors publish it: `medusa_lm_head.pt` beside a small config, or in a whole model (`medusa_head.*`).

Source: `medusa/model/medusa_model.py` and `medusa_model_legacy.py` of github.com/FasterDecoding/Medusa. Published
configs say two heads where their files hold five, so the heads are counted in the file. The first version has no
output projections; its heads read the target's.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from drafts.layouts.published.found import Found, Layout, Names
from draftsmith_core.errors import InputError

log = logging.getLogger(__name__)
_HEAD = re.compile(r"(medusa_head\.)?\d+\.\d+\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


def known(values: Mapping[str, Any], names: Names) -> bool:
    """By the number of heads in the config."""
    return "medusa_num_heads" in values or values.get("model_type") == "medusa"


def read(found: Found) -> Found:
    """Only the heads; how many there are is read from the tensors, and projections that are absent are the target's."""
    tensors = {key.removeprefix("medusa_head."): t for key, t in found.tensors.items() if _HEAD.match(key)}
    if left := len(found.tensors) - len(tensors):
        log.warning("%s: %d tensors of its base model are left out; the target has its own", found.tensor_file, left)
    blocks = [tuple(map(int, match.groups())) for match in map(_BLOCK.fullmatch, tensors) if match]
    if not blocks:
        raise InputError(f"{found.tensor_file}: holds no Medusa head ('0.0.linear.weight'); export it again")
    heads, layers = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    for i in range(heads):
        for j in range(layers):
            weight = tensors.get(f"{i}.{j}.linear.weight")
            if weight is not None:
                tensors.setdefault(f"{i}.{j}.linear.bias", torch.zeros(len(weight), dtype=weight.dtype))
    absent = [i for i in range(heads) if f"{i}.{layers}.weight" not in tensors]
    if len(absent) == heads:
        log.warning("%s: its heads have no output projections; they start from the target's", found.tensor_file)
        tensors |= {f"{i}.{layers}.weight": found.lm_head_VH.detach().cpu() for i in absent}
    said = found.values.get("medusa_num_heads")
    if said is not None and said != heads:
        log.warning("%s: says %s heads, its file holds %d; those are used", found.config_file, said, heads)
    values = found.values | {"medusa_num_heads": heads, "medusa_num_layers": layers}
    return replace(found, values=values, tensors=tensors)


MEDUSA = Layout("Medusa of its authors", "medusa", known, read)
