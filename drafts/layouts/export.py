"""`draftsmith export`: a draft in the layout of another engine, with a record of what proves it."""

import copy
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafts.config import ExportConfig
from drafts.doctor import Model, Pair, first_broken, path_trap
from drafts.draft_vocabulary import draft_vocabulary, write_draft_vocabulary
from drafts.heads.block import BlockHead
from drafts.heads.store import write_tensors
from drafts.layouts import gguf_file
from drafts.layouts.table import LAYOUTS, Layout, inverted, renamed
from drafts.load import Source, depth_limit, draft_fingerprint, load_source
from drafts.neighbours import Proof, compared, probe_ids, program, vllm_answers, work
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import atomic_dir, writing
from draftsmith_core.models import fingerprint, text_config
from draftsmith_core.options import configured
from draftsmith_core.runs import RECORD, command_line, hold, provenance

_PROVEN_TOKENS = 24


def export(config: ExportConfig | None = None, **options: Any) -> dict[str, Any]:
    """Write `config.out` whole or not at all; the summary: format, files, bytes and how it was
    proven.

    Raises InputError for what the layout cannot say, so that no engine computes something else
    silently.
    """
    config = configured(ExportConfig, config, options)
    source = load_source(
        config.draft, config.target, config.dtype, config.trust_remote_code, config.revision
    )
    write = WRITERS.get((config.format, source.kind))
    if write is None:
        formats = (
            ", ".join(form for form, kind in WRITERS if kind == source.kind)
            or "none: no engine reads such heads"
        )
        what = "language model" if source.kind == "draft" else f"head ({source.kind})"
        raise InputError(
            f"--format {config.format}: {source.name} is a {what}; formats for it are {formats}"
        )
    pair, form = Pair((), source), str(config.format)
    if isinstance(source.draft, PreTrainedModel):
        pair = Pair((Model(source.name, text_config(source.draft), source.tokenizer),))
        form = "gguf-lm" if form == "gguf" else form
    if broken := first_broken(pair, {form}):
        raise InputError(f"--format {config.format}: {broken}")
    out, proven = Path(config.out), dict[str, Any](format=config.format, kind=source.kind)
    record: dict[str, Any] = {} if source.kind != "draft" else {"kind": "draft-lm"}
    with hold(out), writing(out), atomic_dir(out) as directory:
        proven["proof"] = asdict(write(source, directory))
        record |= {
            "export": proven,
            "source": {"name": source.name, "fingerprint": draft_fingerprint(source.draft)},
        }
        if source.target_name is not None:
            record["target"] = source.target_name
        if source.target is not None:
            record["target_fingerprint"] = fingerprint(source.target)
        record |= provenance(command_line("export", config), asdict(config))
        (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    return {"out": config.out, **proven, "files": files, "remarks": _remarks(config, source)}


def _remarks(config: ExportConfig, source: Source) -> list[str]:
    remarks = []
    if source.kind == "draft" and (ids_D := draft_vocabulary(source.draft)) is not None:
        remarks.append(
            f"no engine's layout can name this draft's vocabulary of {len(ids_D)} tokens: the "
            "whole output projection "
            f"was written, and engines may also draft the other tokens, whose rows were not trained"
        )
    if config.format in ("hf", "medusa") and (trap := path_trap(config.out)):
        remarks.append(
            f"vLLM loads a draft as a head if its path contains '{trap}'; rename the directory "
            "to serve it with vLLM"
        )
    return remarks


@torch.no_grad()
def _write_model(source: Source, out: Path) -> Proof:
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
    engine = f"transformers {importlib.metadata.version('transformers')}"
    return compared(out, engine, again(ids).logits, model(ids).logits, "tokens compared")


def _write_head(layout: Layout, source: Source, out: Path) -> Proof:
    """A head under the names of its layout, checked against the shapes that the layout's readers
    look for.
    """
    head: Any = source.draft
    config = layout.config(head.config.to_json(), source)
    tensors: dict[str, Tensor] = renamed(head.state_dict(), inverted(layout.names))
    if layout.embedding == "always" or (
        layout.embedding == "scaled" and head.borrowed.scales_embedding
    ):
        tensors.setdefault("embed_tokens.weight", head.borrowed.embedding_table)
    expected = layout.expected(
        config, "embed_tokens.weight" in tensors and layout.embedding != "never"
    )
    if "lm_head.weight" in expected.keys() - tensors.keys():
        tensors["lm_head.weight"] = (
            head.rows_DH
        )  # of a block drafter: the target's, for the tokens that it drafts
    for name, shape in expected.items():
        if name.endswith(".bias"):
            tensors.setdefault(name, torch.zeros(shape))
    rounded = {
        name: t.to(source.dtype) if t.is_floating_point() else t for name, t in tensors.items()
    }
    write_tensors(out, rounded, config)
    count = check_layout(out / "model.safetensors", expected)
    refused, python = "", program("vllm")
    # The engine that will serve it comes before the library that only trains it.
    serving = SERVING["vllm"].get(layout.kind)
    if python is not None and serving and layout.format in (serving.draft_format, "eagle"):
        try:
            return _proven_by_vllm(source, out, python)
        except InputError as error:
            refused = f"; {error}"
    if layout.format == "speculators" and (python := program("speculators")) is not None:
        return _proven_by_speculators(source, out, python)
    how = f"published layout: names and shapes of {count} tensors are those of {layout.title}"
    return Proof(None, how + refused)


def check_layout(file: Path, expected: dict[str, tuple[int, ...]]) -> int:
    """The number of tensors in a file whose names and shapes are exactly those that an engine
    reads.

    Raises RunError otherwise: engines silently skip a name that they do not know, so it must not be
    written.
    """
    with safe_open(file, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise RunError(
                f"{file}: '{name}' is {shapes.get(name)} and the engine reads {expected.get(name)}"
            )
    return len(shapes)


@torch.no_grad()
def _proven_by_speculators(source: Source, out: Path, python: Path) -> Proof:
    assert source.target is not None
    head: Any = source.draft
    slots = head.config.block_size if isinstance(head, BlockHead) else 0
    ids = probe_ids(source.target, _PROVEN_TOKENS + slots)
    hidden = source.target(ids, output_hidden_states=True).hidden_states
    states = [hidden[layer] for layer in head.hidden_layers]
    if slots:
        # A block at each of the first tokens; `previous` are the text's tokens from there on.
        previous = ids[0].unfold(0, head.depths, 1)[:_PROVEN_TOKENS]
        raw = head.raw_logits(head.drafted(ids, states, torch.arange(_PROVEN_TOKENS)[None])[0])
        ours = head.logits(raw, previous)[..., head.target_ids_D].flatten(0, 1)[None]
    else:
        ids, states = ids[:, 1:], [state[:, :-1] for state in states]
        ours, _ = head(ids, head.fuse(states))
    with tempfile.TemporaryDirectory() as place:
        inputs, answer = Path(place) / "inputs.safetensors", Path(place) / "logits.safetensors"
        save_file(
            {"ids": ids.contiguous(), "states": torch.cat(states, dim=-1).contiguous()}, inputs
        )
        report = work(
            python, Path(__file__).with_name("speculators_logits.py"), out, inputs, answer
        )
        theirs = load_file(answer)["logits"]
    if report["aux"] != list(head.hidden_layers):
        raise RunError(
            f"{out}: speculators reads states {report['aux']}, not {list(head.hidden_layers)}"
        )
    return compared(out, report["engine"], theirs, ours, "positions compared")


@torch.no_grad()
def _proven_by_vllm(source: Source, out: Path, python: Path) -> Proof:
    """The logits of every draft that vLLM makes in a greedy answer, and how many of its tokens it
    accepts.

    Raises InputError if vLLM does not serve the pair here.
    """
    assert source.target is not None
    target = source.target
    head: Any = source.draft
    prompt = probe_ids(target, 8)
    # An EAGLE head drafts one token here, because later ones depend on what was drafted before
    # them.
    ahead = depth_limit(head) or 1
    draft = {
        "method": SERVING["vllm"][source.kind].method,
        "model": str(out),
        "num_speculative_tokens": ahead,
    }
    options = {
        "model": source.target_name,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    run: dict[str, Any] = {
        "engine": options | {"speculative_config": draft},
        "prompts": prompt.tolist(),
    }
    run |= {"ways": [{"temperature": 0}], "max_new_tokens": _PROVEN_TOKENS}
    with tempfile.TemporaryDirectory() as place:
        run["logits"] = str(Path(place) / "logits.safetensors")
        found = vllm_answers(python, {"pair": run})
        engine, answer = found["engine"], found["answers"]["pair"]
        if isinstance(answer, dict):
            raise InputError(f"{engine} does not serve it here: {answer['refused']}")
        theirs = load_file(run["logits"])["logits"]
    row = answer[0][0]
    ids = torch.cat([prompt, torch.tensor([row["tokens"][0]])], dim=1)
    result = target(ids, output_hidden_states=True)
    if not torch.equal(
        result.logits[0, prompt.shape[1] - 1 : -1].argmax(-1), ids[0, prompt.shape[1] :]
    ):
        raise RunError(
            f"{out}: {engine} continues a prompt differently from the target; nothing was written"
        )
    states = [result.hidden_states[layer] for layer in head.hidden_layers]
    if isinstance(head, BlockHead):
        anchors_1T = torch.arange(1, ids.shape[1])[None]
        logits_TKV = head.logits(head.raw_logits(head.drafted(ids, states, anchors_1T)[0]))
    elif source.kind == "medusa":
        logits_TKV = head(states[0])[0]
    else:
        logits = head(ids[:, 1:], head.fuse(states)[:, :-1])[0]
        logits_TKV = (head.to_target(logits) if source.kind == "eagle3" else logits)[0, :, None]
    # The first token comes from the prompt's forward; each draft then follows the last token that
    # is known.
    drafted, accepted, known = [], 0, prompt.shape[1] + 1
    while known < ids.shape[1]:
        drafted.append(logits_TKV[known - 2])
        tokens = ids[0, known : known + ahead]
        kept = int((drafted[-1].argmax(-1)[: len(tokens)] == tokens).int().cumprod(0).sum())
        accepted, known = accepted + min(kept, 1), known + kept + 1
    if (row["drafts"], row["per_position"][0]) != (len(drafted), accepted):
        told = (
            f"{row['per_position'][0]} of {row['drafts']} drafts and the head gives "
            f"{accepted} of {len(drafted)}"
        )
        raise RunError(f"{out}: {engine} accepts {told}; nothing was written")
    # Tokens outside a draft vocabulary have minus infinity on both sides.
    given, own = (
        each.nan_to_num(neginf=-1e9)
        for each in (theirs[None, : len(drafted)], torch.stack(drafted)[None])
    )
    how = (
        f"drafts compared; it accepted the first token of {accepted} of them, as the head does here"
    )
    return compared(out, engine, given, own, how)


# (format, kind of draft) -> what writes it.
WRITERS: dict[tuple[str, str], Callable[[Source, Path], Proof]] = {
    ("hf", "draft"): _write_model,
    **{
        (layout.format, layout.kind): partial(_write_head, layout)
        for layout in LAYOUTS.values()
        if layout.format
    },
    ("gguf", "draft"): gguf_file.write,
    ("gguf", "eagle3"): gguf_file.write,
}
