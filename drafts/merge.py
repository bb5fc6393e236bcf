"""Drafts made of other drafts by adding up their weights, as `MergeConfig` describes. Nothing is trained.

Interpolating between a draft and what it was aligned from keeps much of what the base knew out of distribution
(WiSE-FT, arXiv 2109.01903; model soups, arXiv 2203.05482; task vectors, arXiv 2212.04089).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafts.config import MergeConfig
from drafts.draft_vocabulary import FILE, read_draft_vocabulary, write_draft_vocabulary
from drafts.heads import head_kind
from drafts.load import first_difference
from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, check_dir_replaceable, read_json, writing
from draftsmith_core.models import fingerprint, hash_tensors, load_model, vocabulary_size
from draftsmith_core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith_core.provenance import RECORD, command_line, difference, provenance, read_record
from draftsmith_core.tokenization import Tokenizer, find_tokenizer

State = Mapping[str, Tensor]
# Keys of a config.json that may differ between drafts whose weights mean the same.
_NOT_SHAPE = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"})


def merge_states(states: Sequence[tuple[State, float]], base: State | None = None) -> dict[str, Tensor]:
    """base + sum of weight x (state - base), in fp32; without a base, sum of weight x state.

    states: (weights of a draft by name, its weight). All have the same names and shapes. What is not floating point
    (the vocabulary maps of an EAGLE-3 head) must be equal in all of them.
    Raises InputError, naming the tensor, where they do not match.
    """
    first = states[0][0]
    everything = [state for state, _ in states] + ([] if base is None else [base])
    for state in everything[1:]:
        if odd := sorted(first.keys() ^ state.keys()):
            raise InputError(f"--draft: one of the drafts lacks the tensor '{odd[0]}'; merge drafts of one shape")
    merged: dict[str, Tensor] = {}
    for name, tensor in first.items():
        like = [state[name] for state in everything]
        if any(each.shape != tensor.shape for each in like):
            shapes = " and ".join(sorted({str(list(each.shape)) for each in like}))
            raise InputError(f"--draft: the tensor '{name}' is {shapes}; merge drafts of one shape")
        if not tensor.is_floating_point():
            if any(not torch.equal(each, tensor) for each in like):
                raise InputError(f"--draft: the drafts differ in '{name}', which cannot be averaged")
            merged[name] = tensor.clone()
            continue
        total = torch.zeros(tensor.shape) if base is None else base[name].float() * (1 - sum(w for _, w in states))
        for state, weight in states:
            total = total.add(state[name].float(), alpha=weight)
        merged[name] = total
    return merged


def merge(config: MergeConfig, command: str | None = None) -> dict[str, Any]:
    """Write the merged draft to `config.out`; returns the summary, a dictionary.

    The checkpoint has the tokenizer and the shape of the first draft, fp32 weights, a record of what it was made of
    and with which weights, and the hashes of all the prompts that any of them was trained on.
    Raises InputError for drafts that do not fit together, and for an `out` that exists.
    """
    out, weights, sources = Path(config.out), config.weights(), config.sources()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists; choose another, or delete it")
    check_dir_replaceable(out, "--out")
    kinds = {source: head_kind(source) or "draft-lm" for source in sources}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{source} is {kind}" for source, kind in kinds.items())
        raise InputError(f"--draft: drafts of different kinds cannot be merged ({said})")
    kind = kinds[sources[0]]
    records = [read_record(Path(source)) for source in sources]
    record: dict[str, Any] = {
        "kind": kind,
        **_shared_target(dict(zip(sources, records, strict=True))),
        "merged_from": [{"draft": source, "weight": weight} for source, weight in weights],
        "merge_base": config.base,
        **provenance(command or command_line("merge", config), asdict(config)),
    }
    write = _merged_model if kind == "draft-lm" else _merged_head
    with writing(out, "nothing was kept"), atomic_dir(out) as directory:
        record["fingerprint"] = write(config, directory)
        if (hashes := _trained_prompts(sources)) is not None:
            write_prompt_hashes(directory, hashes)
        (directory / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
    return {"checkpoint": str(out), "kind": kind, "weights": dict(weights), "fingerprint": record["fingerprint"]}


def _merged_model(config: MergeConfig, directory: Path) -> str:
    """Merge language models into a directory; the fingerprint of the result."""
    first, *others = config.sources()
    tokenizer = find_tokenizer(first, config.trust_remote_code)
    model = load_model(first, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    states = {first: model.state_dict()}
    for source in others:
        other = load_model(source, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
        _check_same_shape(first, model.config.to_dict(), source, other.config.to_dict())
        _check_same_tokens(first, tokenizer, source, find_tokenizer(source, config.trust_remote_code))
        states[source] = other.state_dict()
    ids_D = _shared_draft_vocabulary(config, vocabulary_size(model))
    model.load_state_dict(_merged(config, states))
    model.save_pretrained(directory)
    if ids_D is not None:
        write_draft_vocabulary(directory, ids_D)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return fingerprint(model)


def _shared_draft_vocabulary(config: MergeConfig, size: int) -> Tensor | None:
    """The tokens that all of these drafts draft; InputError where one drafts others. None: the whole vocabulary.

    A base may draft all tokens: where it does, what is merged keeps the rows that its drafts were trained in.
    """
    first, *others = config.sources()
    ids_D = read_draft_vocabulary(first, size)
    for source in others:
        other = read_draft_vocabulary(source, size)
        if source == config.base and other is None:
            continue
        same = ids_D is other if ids_D is None or other is None else torch.equal(ids_D, other)
        if not same:
            raise InputError(
                f"{source}: drafts other tokens than {first} ({FILE}); merge drafts of one draft vocabulary"
            )
    return ids_D


def _merged_head(config: MergeConfig, directory: Path) -> str:
    """Merge heads, which are their tensors and a config, into a directory; the fingerprint of the result."""
    first = config.sources()[0]
    shape = read_json(Path(first) / "config.json", "the config of a head")
    states = {}
    for source in config.sources():
        _check_same_shape(first, shape, source, read_json(Path(source) / "config.json", "the config of a head"))
        file = Path(source) / "model.safetensors"
        try:
            states[source] = load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read ({error}); name heads that draftsmith has written") from None
    merged = _merged(config, states)
    save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    return hash_tensors(shape, sorted(merged.items()))


def _merged(config: MergeConfig, states: Mapping[str, State]) -> dict[str, Tensor]:
    base = None if config.base is None else states[config.base]
    return merge_states([(states[source], weight) for source, weight in config.weights()], base)


def _check_same_shape(first: str, shape: Mapping[str, Any], source: str, other: Mapping[str, Any]) -> None:
    a, b = ({key: value for key, value in each.items() if key not in _NOT_SHAPE} for each in (shape, other))
    if differs := difference(a, b):
        raise InputError(f"{source}: its config differs from that of {first}: {differs}; merge drafts of one shape")


def _check_same_tokens(first: str, a: Tokenizer | None, source: str, b: Tokenizer | None) -> None:
    if a is None or b is None:
        return
    differing = first_difference(a, b, max(len(a), len(b)))
    if differing is not None:
        raise InputError(f"{source}: its tokenizer differs from that of {first} at token {differing}")


def _shared_target(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The target that the drafts were made for, where a record says so; InputError where they say different ones."""
    known = {source: record for source, record in records.items() if record.get("target_fingerprint")}
    prints = {record["target_fingerprint"] for record in known.values()}
    if len(prints) > 1:
        said = ", ".join(f"{source}: {record.get('target')}" for source, record in known.items())
        raise InputError(f"--draft: these drafts were made for different targets ({said})")
    found = next(iter(known.values()), {})
    return {"target": found.get("target"), "target_fingerprint": found.get("target_fingerprint")}


def _trained_prompts(sources: Sequence[str]) -> list[int] | None:
    """Hashes of the prompts that any of the drafts was trained on; None where no draft says."""
    found = [hashes for source in sources if (hashes := read_prompt_hashes(Path(source))) is not None]
    return np.concatenate(found).tolist() if found else None
