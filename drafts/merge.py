"""Merge drafts by adding up their weights, as `MergeConfig` describes. Nothing is trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafts.config import MergeConfig
from drafts.draft_vocabulary import FILE, read_draft_vocabulary, write_draft_vocabulary
from drafts.heads import head_kind
from drafts.heads.store import read_tensors, write_tensors
from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, check_out, read_json, writing
from draftsmith_core.models import fingerprint, hash_tensors, load_model, vocabulary_size
from draftsmith_core.options import configured
from draftsmith_core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith_core.runs import RECORD, command_line, provenance, read_record
from draftsmith_core.tokenization import find_tokenizer

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
            raise InputError(
                f"--draft: the drafts differ in the shape of the tensor '{name}'; merge ones of "
                "one shape"
            )
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
) -> dict[str, Any]:
    """Write the merged draft to `config.out`, unless the same merge is there; returns the summary,
    a dictionary.

    The checkpoint has the tokenizer and the shape of the first draft, fp32 weights, a record of its
    parts and their weights, and the hashes of all prompts that any part was trained on.
    """
    config = configured(MergeConfig, config, options)
    out, weights, sources = Path(config.out), dict(config.weights()), config.sources()
    check_out(out)
    kind = head_kind(sources[0]) or "draft-lm"
    records = [read_record(Path(source)) for source in sources]
    targets = {
        record["target_fingerprint"]: record["target"]
        for record in records
        if record.get("target_fingerprint")
    }
    target_fingerprint, target = targets.popitem() if len(targets) == 1 else (None, None)
    record: dict[str, Any] = {
        "kind": kind,
        "target": target,
        "target_fingerprint": target_fingerprint,
        "merged_from": [{"draft": source, "weight": weight} for source, weight in weights.items()],
        "merge_base": config.base,
    }
    merged = read_record(out)
    if any(merged.get(key) != value for key, value in record.items()):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"--out {out}: exists; choose another, or delete it")
        record |= provenance(command or command_line("merge", config), asdict(config))
        with writing(out), atomic_dir(out) as directory:
            record["fingerprint"] = _write(config, kind, directory)
            hashes = [
                each for source in sources if (each := read_prompt_hashes(Path(source))) is not None
            ]
            if hashes:
                write_prompt_hashes(directory, np.concatenate(hashes).tolist())
            (directory / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
        merged = record
    return {
        "checkpoint": str(out),
        "kind": kind,
        "weights": weights,
        "fingerprint": merged["fingerprint"],
    }


def _write(config: MergeConfig, kind: str, directory: Path) -> str:
    """Write the merged weights into a directory; their fingerprint."""
    sources, base = config.sources(), config.base

    def merged(states: Mapping[str, State]) -> dict[str, Tensor]:
        parts = [(states[source], weight) for source, weight in config.weights()]
        return merge_states(parts, None if base is None else states[base])

    if kind != "draft-lm":
        shape = read_json(Path(sources[0]) / "config.json", "the config of a head")
        tensors = merged({source: read_tensors(Path(source))[1] for source in sources})
        write_tensors(directory, tensors, shape)
        return hash_tensors(shape, sorted(tensors.items()))
    options: Any = {
        "device": "cpu",
        "dtype": "float32",
        "trust_remote_code": config.trust_remote_code,
    }
    models = {source: load_model(source, **options) for source in sources}
    model = models[sources[0]]
    vocabularies = {
        source: read_draft_vocabulary(source, vocabulary_size(model)) for source in sources
    }
    ids_D = vocabularies[sources[0]]
    for source, other in vocabularies.items():
        # A base may draft all tokens: the merged draft keeps the rows that its drafts were trained
        # in.
        if source == base and other is None:
            continue
        if not (ids_D is other if ids_D is None or other is None else torch.equal(ids_D, other)):
            raise InputError(
                f"{source}: drafts other tokens than {sources[0]} ({FILE}); merge ones of the same"
            )
    model.load_state_dict(merged({source: each.state_dict() for source, each in models.items()}))
    model.save_pretrained(directory)
    if ids_D is not None:
        write_draft_vocabulary(directory, ids_D)
    if (tokenizer := find_tokenizer(sources[0], config.trust_remote_code)) is not None:
        tokenizer.save_pretrained(directory)
    return fingerprint(model)
