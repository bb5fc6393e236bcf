"""Merge drafts by adding up their weights, as `MergeConfig` describes. Nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cards import write_record
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, atomic_dir, read_json
from draftsmith.core.models import fingerprint, hash_tensors, load_model, vocabulary_size
from draftsmith.core.options import configured
from draftsmith.core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith.core.runs import command_line, provenance, read_record
from draftsmith.core.tokenization import find_tokenizer
from draftsmith.drafts.alike import check_alike, shared_target, shared_vocabulary
from draftsmith.drafts.config import MergeConfig
from draftsmith.drafts.draft_vocabulary import write_draft_vocabulary
from draftsmith.drafts.heads import head_kind
from draftsmith.drafts.heads.store import read_tensors, write_tensors

State = Mapping[str, Tensor]


def merge_states(
    states: Sequence[tuple[State, float]], base: State | None = None
) -> dict[str, Tensor]:
    """base + sum of weight x (state - base), in fp32; without a base, sum of weight x state.

    states: (weights of a draft by name, its weight). Tensors that are not floating point (the
    vocabulary maps of an EAGLE-3 head) must be equal in all of them.
    """
    first = states[0][0]
    everything = [state for state, _ in states] + ([] if base is None else [base])
    rest = 1 - sum(weight for _, weight in states)
    merged: dict[str, Tensor] = {}
    for name in sorted(set().union(*everything)):
        if len({state[name].shape if name in state else None for state in everything}) > 1:
            raise InputError(f"--draft: the drafts differ in the shape of the tensor '{name}'")
        if first[name].is_floating_point():
            total = torch.zeros(first[name].shape) if base is None else base[name].float() * rest
            for state, weight in states:
                total = total.add(state[name].float(), alpha=weight)
            merged[name] = total
        elif all(torch.equal(state[name], first[name]) for state in everything):
            merged[name] = first[name].clone()
        else:
            raise InputError(f"--draft: the drafts differ in '{name}', which cannot be averaged")
    return merged


def merge(
    config: MergeConfig | None = None, command: str | None = None, **options: Any
) -> JsonObject:
    """Write the merged draft to `config.out`, unless the same merge is there; returns the summary,
    a dictionary.

    The checkpoint has the tokenizer and the shape of the first draft, fp32 weights, a record of its
    parts and their weights, and the hashes of all prompts that any part was trained on. Raise
    InputError for drafts that compute differently, and for heads of different targets.
    """
    config = configured(MergeConfig, config, options)
    out = Path(config.out)
    weights = dict(config.weights())
    sources = config.sources()
    kind = head_kind(sources[0]) or "draft-lm"
    record: JsonObject = {
        "kind": kind,
        **shared_target(sources, kind),
        "merged_from": [{"draft": source, "weight": weight} for source, weight in weights.items()],
        "merge_base": config.base,
    }
    merged = read_record(out)
    if any(merged.get(key) != value for key, value in record.items()):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"--out {out}: exists; choose another, or delete it")
        merged = record | provenance(command or command_line("merge", config), asdict(config))
        write = _merge_models if kind == "draft-lm" else _merge_heads
        with atomic_dir(out) as directory:
            merged["fingerprint"] = write(config, directory)
            hashes = [read_prompt_hashes(Path(source)) for source in sources]
            if known := [each for each in hashes if each is not None]:
                write_prompt_hashes(directory, np.concatenate(known).tolist())
            write_record(directory, merged)
    return {
        "checkpoint": str(out),
        "kind": kind,
        "weights": weights,
        "fingerprint": merged["fingerprint"],
    }


def _merge_heads(config: MergeConfig, directory: Path) -> str:
    """Write the merged head into a directory; return its fingerprint."""
    shapes: dict[str, JsonObject] = {}
    states: dict[str, State] = {}
    for source in config.sources():
        shapes[source] = read_json(Path(source) / "config.json", "the config of a head")
        states[source] = read_tensors(Path(source))[1]
    check_alike(shapes)
    shape = shapes[config.sources()[0]]
    if not read_record(Path(config.sources()[0])):
        # A head of others, which becomes one of ours; see `load_head`.
        shape.setdefault("last_tap", "raw")
    tensors = _merged(config, states)
    write_tensors(directory, tensors, shape)
    return hash_tensors(shape, sorted(tensors.items()))


def _merge_models(config: MergeConfig, directory: Path) -> str:
    """Write the merged language model into a directory; return its fingerprint."""
    sources = config.sources()
    code = config.trust_remote_code
    models = {
        source: load_model(source, device="cpu", dtype="float32", trust_remote_code=code)
        for source in sources
    }
    check_alike({source: model.config.to_dict() for source, model in models.items()})
    model = models[sources[0]]
    ids_D = shared_vocabulary(sources, config.base, vocabulary_size(model))
    states = {source: each.state_dict() for source, each in models.items()}
    model.load_state_dict(_merged(config, states))
    model.save_pretrained(directory)
    if ids_D is not None:
        write_draft_vocabulary(directory, ids_D)
    if (tokenizer := find_tokenizer(sources[0], code)) is not None:
        tokenizer.save_pretrained(directory)
    return fingerprint(model)


def _merged(config: MergeConfig, states: Mapping[str, State]) -> dict[str, Tensor]:
    parts = [(states[source], weight) for source, weight in config.weights()]
    return merge_states(parts, None if config.base is None else states[config.base])
