"""`draftsmith export`: a draft in the layout of another engine, with a record of what proves it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig

from drafts.draft_vocabulary import attach_draft_vocabulary, draft_vocabulary, read_draft_vocabulary
from drafts.heads import head_kind, load_head
from drafts.layouts import eagle_heads, gguf_file, hf_directory, medusa_heads
from drafts.layouts import speculators_heads as speculators
from drafts.layouts.config import ExportConfig
from drafts.layouts.source import Proof, Source, Writer
from drafts.load import check_draft_vocabulary, draft_fingerprint
from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_dir, writing
from draftsmith_core.models import DTYPES, fingerprint, load_model, vocabulary_size
from draftsmith_core.provenance import RECORD, command_line, provenance, read_record
from draftsmith_core.run_directory import hold
from draftsmith_core.tokenization import find_tokenizer, load_tokenizer

FORMATS: dict[str, Writer] = {
    "hf": hf_directory.write,
    "eagle": eagle_heads.write,
    "sglang": eagle_heads.write_for_sglang,
    "speculators": speculators.write,
    "medusa": medusa_heads.write,
    "gguf": gguf_file.write,
}
M = TypeVar("M", bound=nn.Module)
# vLLM takes a draft for a head of such a kind when its path has one of these in it, whatever the files say.
PATH_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")


def export(config: ExportConfig) -> dict[str, Any]:
    """Write `config.out` whole or not at all; the summary: format, files, bytes and how it was proven.

    Raises InputError, one line, for what the layout cannot say, so that no engine computes something else silently.
    """
    source = load_source(config)
    out = Path(config.out)
    with hold(out), writing(out), atomic_dir(out) as directory:
        proof = FORMATS[config.format](source, directory)
        (directory / RECORD).write_text(json.dumps(_record(config, source, proof), indent=2) + "\n")
        files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    summary = {"out": config.out, "format": config.format, "kind": source.kind, "proof": asdict(proof), "files": files}
    return summary | {"remarks": remarks(config, source)}


def load_source(config: ExportConfig) -> Source:
    """The draft with its target, if it has one; InputError, one line, for what does not fit."""
    kind = head_kind(config.draft)
    target_name = config.target or read_record(Path(config.draft)).get("target")
    if kind is None:
        model = load_model(
            config.draft, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code, quantize="none"
        )
        if (ids_D := read_draft_vocabulary(config.draft, vocabulary_size(model))) is not None:
            attach_draft_vocabulary(model, ids_D)
        tokenizer = find_tokenizer(config.draft, config.trust_remote_code)
        if tokenizer is None and config.target is not None:
            tokenizer = find_tokenizer(config.target, config.trust_remote_code)
        if config.target is not None and tokenizer is not None:
            target = load_model(config.target, device="cpu", trust_remote_code=config.trust_remote_code)
            own = load_tokenizer(config.target, config.trust_remote_code)
            check_draft_vocabulary(config.draft, model, target, own, config.trust_remote_code)
        dtype = _dtype(config, AutoConfig.from_pretrained(config.draft, trust_remote_code=config.trust_remote_code))
        return Source(config.draft, _rounded(model, dtype), dtype, tokenizer, None, config.target)
    if target_name is None:
        raise InputError(f"--target: is missing; {config.draft} is a head ({kind}), which belongs to one target")
    target = load_model(target_name, device="cpu", dtype="float32", trust_remote_code=config.trust_remote_code)
    head = load_head(config.draft, target)
    stored = AutoConfig.from_pretrained(target_name, trust_remote_code=config.trust_remote_code)
    dtype = _dtype(config, stored.get_text_config(decoder=True))
    tokenizer = find_tokenizer(target_name, config.trust_remote_code)
    return Source(config.draft, _rounded(head, dtype), dtype, tokenizer, target, target_name)


def _dtype(config: ExportConfig, stored: Any) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    found = getattr(stored, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _rounded(module: M, dtype: torch.dtype) -> M:
    """The module in fp32 with the values that `dtype` will hold on disk, so that proofs compare what is written."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(dtype))
    return module


def _record(config: ExportConfig, source: Source, proof: Proof) -> dict[str, Any]:
    record: dict[str, Any] = {} if source.kind != "draft" else {"kind": "draft-lm"}
    record["export"] = {"format": config.format, "kind": source.kind, "proof": asdict(proof)}
    record["source"] = {"name": source.name, "fingerprint": draft_fingerprint(source.draft)}
    if source.target_name is not None:
        record["target"] = source.target_name
    if source.target is not None:
        record["target_fingerprint"] = fingerprint(source.target)
    return record | provenance(command_line("export", config), asdict(config))


def remarks(config: ExportConfig, source: Source) -> list[str]:
    """What the user of an export should know and no engine says, one line each."""
    ids_D = draft_vocabulary(source.draft) if source.kind == "draft" else None
    said = []
    if ids_D is not None:
        said = [
            f"this draft has a draft vocabulary of {len(ids_D)} tokens, and no engine's layout can say so: the whole "
            f"output projection was written, and engines draft the other tokens too, whose rows were not trained"
        ]
    path = str(Path(config.out).resolve()).lower()
    found = [word for word in PATH_TRAPS if word in path]
    if config.format == "hf" and found:
        said.append(f"vLLM takes a draft whose path has '{found[0]}' in it for such a head; rename it for vLLM")
    return said
