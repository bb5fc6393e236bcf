"""Layouts in which others publish drafts, each read into our own: `PUBLISHED` is the table.

To add one, write a file with its `Layout` and enter it. Order matters: the first that knows a directory reads it.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from drafts.layouts.published.eagle import EAGLE
from drafts.layouts.published.eagle3 import EAGLE3
from drafts.layouts.published.files import read_tensors, tensor_names
from drafts.layouts.published.found import Found, Layout
from drafts.layouts.published.hydra import HYDRA
from drafts.layouts.published.medusa import MEDUSA
from drafts.layouts.published.speculators import SPECULATORS
from drafts.layouts.published.vllm_medusa import VLLM_MEDUSA

PUBLISHED: dict[str, Layout] = {
    "speculators": SPECULATORS,
    "vllm-medusa": VLLM_MEDUSA,
    "medusa": MEDUSA,
    "hydra": HYDRA,
    "eagle3": EAGLE3,
    "eagle": EAGLE,
}

__all__ = ["PUBLISHED", "Found", "Layout", "layout_of", "may_be_head", "read_tensors"]


def layout_of(directory: Path, values: Mapping[str, Any]) -> Layout | None:
    """The layout that knows a directory with these values in config.json; None for a language model."""
    names = cache(lambda: tensor_names(directory))
    layouts = (each for each in PUBLISHED.values() if each.speculators_type == values.get("speculators_model_type"))
    return next((layout for layout in layouts if layout.known(values, names)), None)


def may_be_head(values: Mapping[str, Any]) -> bool:
    """Whether a config.json can be that of a head, before its tensors are there to tell."""
    return values.get("num_hidden_layers") == 1 or any(each.known(values, frozenset) for each in PUBLISHED.values())
