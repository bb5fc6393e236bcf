"""EAGLE-3 heads as speculators and, through it, vLLM read them (`vllm serve DIR` needs nothing else)."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafts.heads.eagle3 import Eagle3Head
from drafts.layouts import shapes
from drafts.layouts.eagle_heads import eagle_head
from drafts.layouts.hf_directory import probe_ids
from drafts.layouts.source import Proof, Source, compared, head_tensors, write_layout
from drafts.neighbours import program, work
from draftsmith_core.errors import InputError, RunError

# The version whose keys these are; later ones add flags that must stay off for heads of the original form.
_VERSION = "0.7.0"
_SPECULATIVE_TOKENS = 3


def _config(source: Source, head: Eagle3Head) -> dict[str, Any]:
    plain = head.config.to_json()
    layer = {key: value for key, value in plain.items() if key not in ("architectures", "draft_vocab_size")}
    for key in ("eagle_aux_hidden_state_layer_ids", "norm_before_residual"):
        layer.pop(key)
    assert source.target is not None and source.target_name is not None
    path = Path(source.target_name)
    verifier = {
        # vLLM loads the target by this name from wherever it is started.
        "name_or_path": str(path.resolve()) if path.is_dir() else source.target_name,
        "architectures": list(source.target.config.architectures or [type(source.target).__name__]),
    }
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.hidden_layers),
        # Readers disagree on what is meant where this is absent.
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
    }


def write(source: Source, out: Path) -> Proof:
    """`config.json` and `model.safetensors`; proven by speculators where it is installed."""
    head = eagle_head(source, "speculators")
    if not isinstance(head, Eagle3Head):
        raise InputError("--format speculators: it is for EAGLE-3 heads, and this is EAGLE-1; use --format eagle")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head_tensors(source).items()}
    tensors["embed_tokens.weight"] = head.borrowed.embedding_table.to(source.dtype)
    config = _config(source, head)
    sizes = config["transformer_layer_config"] | {"draft_vocab_size": head.config.draft_vocab_size}
    expected = shapes.eagle3(sizes, "layers.0.", embedding=True)
    published = write_layout(out, tensors, config, expected, "speculators reads")
    python = program("speculators")
    return published if python is None else _proof(source, head, out, python)


@torch.no_grad()
def _proof(source: Source, head: Eagle3Head, out: Path, python: Path) -> Proof:
    assert source.target is not None
    ids = probe_ids(source.target)
    hidden = source.target(ids, output_hidden_states=True).hidden_states
    states = [hidden[layer][:, :-1] for layer in head.hidden_layers]
    ours, _ = head(ids[:, 1:], head.fuse(states))
    with tempfile.TemporaryDirectory() as place:
        given, answer = Path(place) / "inputs.safetensors", Path(place) / "logits.safetensors"
        save_file({"ids": ids[:, 1:].contiguous(), "states": torch.cat(states, dim=-1).contiguous()}, given)
        found = work(python, "speculators_logits.py", out, given, answer)
        theirs = load_file(answer)["logits"]
    if found["aux"] != list(head.hidden_layers):
        raise RunError(f"{out}: speculators reads states {found['aux']}, not {list(head.hidden_layers)}")
    return compared(out, found["engine"], theirs, ours, "positions compared")
