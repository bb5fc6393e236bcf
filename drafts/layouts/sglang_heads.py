"""EAGLE and EAGLE-3 heads as SGLang reads them (the layout that SpecForge exports)."""

from pathlib import Path

import torch

from drafts.heads.eagle import EagleHead
from drafts.layouts import shapes
from drafts.layouts.eagle_heads import eagle_head
from drafts.layouts.source import (
    Proof,
    Source,
    check_layout,
    head_tensors,
    write_tensors,
)
from draftsmith_core.errors import InputError


def write(source: Source, out: Path) -> Proof:
    """`config.json` and `model.safetensors`."""
    head = eagle_head(source, "sglang")
    if head.borrowed.scales_embedding:
        raise InputError(
            "--format sglang: the target scales its embedding (the Gemma family), and SGLang gives a head the bare "
            "table; use --format speculators for an EAGLE-3 head, which has a table of its own"
        )
    config, tensors = head.config.to_json(), head_tensors(source)
    if isinstance(head, EagleHead):
        # SGLang's fc always has a bias, and one that is not in the file stays as it was drawn.
        tensors.setdefault("fc.bias", torch.zeros(head.config.layer.hidden_size, dtype=source.dtype))
        tensors["embed_tokens.weight"] = head.borrowed.embedding_table.to(source.dtype)
        config |= {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
        expected = shapes.eagle(config)
    else:
        # It names a layer by its output, which is the state that enters the next one.
        ids = [layer - 1 for layer in head.hidden_layers]
        if min(ids) < 0:
            raise InputError(
                f"--format sglang: the head reads states {list(head.hidden_layers)}, and SGLang cannot give the "
                f"embedding; use --format speculators"
            )
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        # vLLM reads this key as we do, and the one above too where this one is missing.
        expected = shapes.eagle3(config)
    write_tensors(out, tensors, config)
    count = check_layout(out / "model.safetensors", expected)
    return Proof(None, f"published layout: names and shapes of {count} tensors are those that SGLang reads")
