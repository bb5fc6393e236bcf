"""EAGLE and EAGLE-3 heads as their authors' code (SafeAILab/EAGLE) and vLLM read them, and as SGLang does."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from drafts.layouts import shapes
from drafts.layouts.source import Proof, Source, check_plain, head_tensors, write_layout
from draftsmith_core.errors import InputError
from draftsmith_core.models import text_config

# What the authors' rotary embedding can do.
_ROPE = ("default", "linear", "dynamic")


def eagle_head(source: Source, form: str) -> EagleHead | Eagle3Head:
    """The head, or InputError where it is none of the two, or where its target's logits need more than a layout."""
    head = source.draft
    if not isinstance(head, EagleHead | Eagle3Head):
        what = "a language model" if isinstance(head, PreTrainedModel) else f"a {source.kind} head"
        other = "hf or gguf" if isinstance(head, PreTrainedModel) else "medusa, where it is of that kind"
        raise InputError(f"--format {form}: {source.name} is {what}; it is for EAGLE and EAGLE-3 heads, use {other}")
    check_plain(source, form, form)
    if isinstance(head, Eagle3Head):
        assert source.target is not None
        says = ("norm_before_residual",) if form in ("speculators", "gguf") else ()
        for key in ("norm_before_residual", "norm_output"):
            if getattr(head.config, key) and key not in says:
                raise InputError(
                    f"--format {form}: the head has '{key}', a norm in another place, which this layout cannot say, so "
                    f"its engine would compute other logits; use the head here"
                )
        layers = int(text_config(source.target).num_hidden_layers)
        ids = head.hidden_layers
        if len(set(ids)) < len(ids) or max(ids) >= layers:
            raise InputError(
                f"--format {form}: the head reads states {list(ids)} of a target of {layers} layers; engines can give "
                f"three different ones, each entering a layer, which needs a target of at least five layers"
            )
    return head


def check_authors_code(source: Source, head: EagleHead | Eagle3Head) -> None:
    """InputError for what the authors' classes read wrongly or not at all."""
    layer = head.config.layer
    if layer.head_dim * layer.num_attention_heads != layer.hidden_size:
        raise InputError(
            f"--format eagle: head size {layer.head_dim} is not {layer.hidden_size} / {layer.num_attention_heads}, "
            f"which SafeAILab's code takes for granted; use --format sglang or speculators"
        )
    rope = str(layer.rope_parameters.get("rope_type", "default"))
    if rope not in _ROPE:
        raise InputError(
            f"--format eagle: rope of type '{rope}' is unknown to SafeAILab's code ({', '.join(_ROPE)}); "
            f"use --format sglang or speculators"
        )
    assert source.target is not None
    layers = int(text_config(source.target).num_hidden_layers)
    fixed = (2, layers // 2, layers - 3)
    if isinstance(head, Eagle3Head) and head.hidden_layers != fixed:
        raise InputError(
            f"--format eagle: the head reads states {list(head.hidden_layers)} and SafeAILab's code always gives "
            f"{list(fixed)} of {layers} layers; use --format sglang or speculators"
        )


def authors_config(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    """config.json; rope scaling also under the key that the authors' code asks for."""
    config = head.config.to_json()
    if config["rope_scaling"] is not None:
        config["rope_scaling"] = config["rope_scaling"] | {"type": config["rope_scaling"]["rope_type"]}
    return config


def write(source: Source, out: Path) -> Proof:
    """Write `config.json` and `model.safetensors` in the authors' layout; returns what proves them."""
    head = eagle_head(source, "eagle")
    check_authors_code(source, head)
    config, tensors = authors_config(head), head_tensors(source)
    if isinstance(head, EagleHead):
        tensors["embed_tokens.weight"] = head.borrowed.embedding_table.to(source.dtype)
        expected = shapes.eagle(config)
    else:
        config["architectures"] = ["LlamaForCausalLM"]
        # Engines give the head the target's own table, which lacks what the Gemma family multiplies it by.
        own = head.borrowed.scales_embedding
        if own:
            tensors["embed_tokens.weight"] = head.borrowed.embedding_table.to(source.dtype)
        expected = shapes.eagle3(config, embedding=own)
    return write_layout(out, tensors, config, expected, "SafeAILab/EAGLE and vLLM read")


def write_for_sglang(source: Source, out: Path) -> Proof:
    """Write `config.json` and `model.safetensors` in the layout that SGLang reads; returns what proves them."""
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
    return write_layout(out, tensors, config, expected, "SGLang reads")
