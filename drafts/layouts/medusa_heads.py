"""Medusa heads as vLLM reads them: other names than in their authors' checkpoints, which it skips without a word."""

import re
from pathlib import Path

from drafts.heads.medusa import MedusaHeads
from drafts.layouts import shapes
from drafts.layouts.source import Proof, Source, check_plain, head_tensors, write_layout
from draftsmith_core.errors import InputError


def write(source: Source, out: Path) -> Proof:
    """Write `config.json` and `model.safetensors`; returns what proves them."""
    if not isinstance(source.draft, MedusaHeads):
        raise InputError(f"--format medusa: {source.name} is of kind '{source.kind}'; it is for Medusa heads")
    check_plain(source, "medusa", "vLLM")
    tensors = {}
    for name, tensor in head_tensors(source).items():
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
        new = f"blocks.{block[1]}.layers.{block[2]}.{block[3]}" if block else f"lm_heads.{name.split('.')[0]}.weight"
        tensors[new] = tensor
    # Without the first key vLLM builds the blocks without a bias and leaves ours out.
    config = source.draft.config.to_json() | {"medusa_fc_bias": True, "original_lm_head": False}
    return write_layout(out, tensors, config, shapes.medusa(config), "vLLM reads")
