"""`draftsmith export`: a draft in the layout of another engine, read back before it is kept."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.core.errors import InputError, RunError
from draftsmith.core.hub import quiet
from draftsmith.core.io import JsonObject, atomic_dir
from draftsmith.core.models import fingerprint, text_config
from draftsmith.core.options import command_line, configured, identity
from draftsmith.core.prompts import read_prompt_hashes, write_prompt_hashes
from draftsmith.core.records import RECORD, provenance, read_record
from draftsmith.core.runs import hold, record_finished
from draftsmith.drafts.config import DoctorConfig, ExportConfig
from draftsmith.drafts.draft_vocabulary import draft_vocabulary, write_draft_vocabulary
from draftsmith.drafts.engine_rules import Model, Pair, first_broken, path_trap
from draftsmith.drafts.engine_support import judge, named, refused_by_all
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.store import write_tensors
from draftsmith.drafts.layouts import gguf_file, mtp_checkpoint
from draftsmith.drafts.layouts.layout import EMBEDDING, ExportedHead, Layout, inverted, renamed
from draftsmith.drafts.layouts.read_back import Check, check_head, check_logits, probe_ids
from draftsmith.drafts.layouts.table import LAYOUTS
from draftsmith.drafts.load import Source, depth_limit, draft_fingerprint, load_source

# The engine in which the tests ran a language model's directory.
_DIRECTORY_PROVEN_IN = "vllm 0.32.0"


@dataclass(frozen=True)
class Writer:
    """What writes a format, and the engine and version in which the tests proved it."""

    write: Callable[[Source, Path], Check]
    proven_in: str | None


@quiet()
def export(config: ExportConfig | None = None, **options: Any) -> JsonObject:
    """Write `config.out` whole or not at all. Return its format, files, bytes, and what reading it
    back showed.

    Raise InputError for what the layout cannot say, so that no engine computes something else.
    """
    config = configured(ExportConfig, config, options)
    source = load_source(
        config.draft, config.target, config.dtype, config.trust_remote_code, config.revision
    )
    writer = WRITERS.get((config.format, source.kind))
    if writer is None:
        formats = ", ".join(form for form, kind in WRITERS if kind == source.kind)
        formats = formats or "none: no engine reads such heads"
        what = "language model" if source.kind == "draft" else f"head ({source.kind})"
        raise InputError(
            f"--format {config.format}: {source.name} is a {what}; formats for it are {formats}"
        )
    pair = Pair((), source)
    form = str(config.format)
    if isinstance(source.draft, PreTrainedModel):
        pair = Pair((Model(source.name, text_config(source.draft), source.tokenizer),))
        form = "gguf-lm" if form == "gguf" else form
    if broken := first_broken(pair, {form}):
        raise InputError(f"--format {config.format}: {broken.message}")
    out = Path(config.out)
    hashes = read_prompt_hashes(Path(source.name))
    record = _origin(source)
    written: JsonObject = {
        "format": config.format,
        "kind": source.kind,
        "proven_in": writer.proven_in,
    }
    write = writer.write
    if config.type is not None:
        write = partial(gguf_file.write, matrices=config.type)
        written["type"] = config.type
    with hold(out), atomic_dir(out) as directory:
        written["check"] = asdict(write(source, directory))
        record["export"] = written
        record["source"] = {"name": source.name, "fingerprint": draft_fingerprint(source.draft)}
        if hashes is not None:
            write_prompt_hashes(directory, hashes.tolist())
        command = command_line("export", config)
        record |= provenance(command, asdict(config))
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
        stage = f"export ({source.kind} as {config.format})"
        inputs = {"target": record.get("target"), "draft": source.name, "out": config.out}
        record_finished(directory, stage, identity(config), command, inputs)
    return {"out": config.out, **written, "files": files, "remarks": _remarks(config, source)}


def _origin(source: Source) -> JsonObject:
    """What is recorded of the draft before it is exported."""
    trained = read_record(Path(source.name))
    record: JsonObject = {} if source.kind != "draft" else {"kind": "draft-lm"}
    if target := source.target_name or trained.get("target"):
        record["target"] = target
    if trained.get("target_fingerprint"):
        record["target_fingerprint"] = trained["target_fingerprint"]
    elif source.target is not None:
        record["target_fingerprint"] = fingerprint(source.target)
    return record


def _remarks(config: ExportConfig, source: Source) -> list[str]:
    remarks = []
    if isinstance(source.target, PreTrainedModel):
        target = str(source.target_name)
        model = named(target, source.target.config, source.tokenizer)
        verdicts = judge(Pair((model,), source), DoctorConfig(target=target, draft=source.name))
        if refused := refused_by_all(verdicts):
            remarks.append(refused)
        remarks += [each.reason for each in verdicts if "EAGLE-3.1 needs" in each.reason]
    if source.kind == "draft" and (ids_D := draft_vocabulary(source.draft)) is not None:
        remarks.append(
            f"no engine's layout can name this draft's vocabulary of {len(ids_D)} tokens: the "
            "whole output projection was written, and engines may also draft the other tokens, "
            "whose rows were not trained"
        )
    if config.format in ("hf", "medusa") and (trap := path_trap(config.out)):
        remarks.append(
            f"vLLM loads a draft as a head if its path contains '{trap}'; rename the directory "
            "to serve it with vLLM"
        )
    return remarks


@torch.no_grad()
def _write_model(source: Source, out: Path) -> Check:
    """A language model as transformers' own directory, which vLLM, SGLang and the builders of other
    formats read.
    """
    model = source.draft
    assert isinstance(model, PreTrainedModel)
    nn.Module.to(copy.deepcopy(model), dtype=source.dtype).save_pretrained(out)
    if (ids_D := draft_vocabulary(model)) is not None:
        write_draft_vocabulary(out, ids_D)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, use_safetensors=True
    ).eval()
    ids = probe_ids(model)
    return check_logits(out, "read back by transformers", again(ids).logits, model(ids).logits)


@torch.no_grad()
def _write_head(layout: Layout, source: Source, out: Path) -> Check:
    """A head under the names of its layout, with the shapes that the layout's readers look for."""
    head = source.draft
    assert source.target is not None and source.target_name is not None
    assert not isinstance(head, PreTrainedModel)
    architectures = source.target.config.architectures or [type(source.target).__name__]
    exported = ExportedHead(
        values=head.config.to_json(),
        kind=head.kind,
        hidden_layers=head.hidden_layers,
        depths=depth_limit(head),
        dtype=str(source.dtype).removeprefix("torch."),
        target_name=source.target_name,
        target_architectures=list(architectures),
    )
    config = layout.config(exported)
    tensors: dict[str, Tensor] = renamed(head.state_dict(), inverted(layout.names))
    scaled = layout.embedding == "scaled" and head.borrowed.scales_embedding
    if scaled or layout.embedding == "always":
        tensors.setdefault(EMBEDDING, head.borrowed.embedding_table)
    expected = layout.expected(config, EMBEDDING in tensors and layout.embedding != "never")
    if isinstance(head, BlockHead) and "lm_head.weight" in expected:
        # The target's rows for the tokens that it drafts.
        tensors["lm_head.weight"] = head.rows_DH
    for name, shape in expected.items():
        if name.endswith(".bias"):
            tensors.setdefault(name, torch.zeros(shape))
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(source.dtype)
    write_tensors(out, tensors, config)
    check_layout(out / "model.safetensors", expected)
    return check_head(out, head, source.target, layout.title)


def check_layout(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise RunError unless names and shapes in a file are exactly those that an engine reads.

    Engines skip a name that they do not know without a word.
    """
    with safe_open(file, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise RunError(
                f"{file}: '{name}' is {shapes.get(name)} and the engine reads {expected.get(name)}"
            )


# (format, kind of draft) -> what writes it.
WRITERS: dict[tuple[str, str], Writer] = {
    ("hf", "draft"): Writer(_write_model, _DIRECTORY_PROVEN_IN),
    **{
        (layout.format, layout.kind): Writer(partial(_write_head, layout), layout.proven_in)
        for layout in LAYOUTS.values()
        if layout.format
    },
    ("gguf", "draft"): Writer(gguf_file.write, gguf_file.PROVEN_IN),
    ("gguf", "eagle3"): Writer(gguf_file.write, None),
    ("mtp", "mtp"): Writer(mtp_checkpoint.write, None),
}
