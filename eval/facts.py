"""The facts of the models, the machine and the run."""

import os
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.core.devices import peak_memory
from draftsmith.core.io import JsonObject
from draftsmith.core.large_target import is_divided, is_spread
from draftsmith.core.models import (
    dtype_name,
    memory_bytes,
    parameter_count,
    quantization,
    read_per_token,
    vocabulary_size,
)
from draftsmith.core.records import read_record
from draftsmith.decode.propose.sources import AnyDraft, CopyingDraft, JoinedDraft
from draftsmith.drafts.draft_sources import JOINED
from draftsmith.drafts.load import Draft, draft_fingerprint, kind_of
from draftsmith.eval.schema import ModelRow, Training

CLOCK_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def _model_row(name: str, model: Draft) -> ModelRow:
    """The facts of a loaded model; `name` is its directory or hub name."""
    weight = next(model.parameters())
    if isinstance(model, PreTrainedModel):
        family = str(model.config.model_type)
        vocabulary = vocabulary_size(model)
        dtype = dtype_name(model)
    else:
        family = model.kind
        vocabulary = model.vocab_size
        dtype = str(weight.dtype).removeprefix("torch.")
    return ModelRow(
        name=name,
        kind=kind_of(model),
        fingerprint=draft_fingerprint(model),
        model_type=family,
        parameters=parameter_count(model),
        read_per_token=read_per_token(model),
        memory_bytes=memory_bytes(model),
        vocabulary=vocabulary,
        dtype=dtype,
        quantize=quantization(model),
        device=str(weight.device),
        training=_training(Path(name)),
    )


def model_rows(
    name: str, target: PreTrainedModel, sources: Mapping[str, str], drafts: Mapping[str, AnyDraft]
) -> dict[str, ModelRow]:
    """The facts of the target of this name and of every draft."""
    rows = {"target": _model_row(name, target)}
    for each, draft in drafts.items():
        rows[each] = _draft_row(sources[each], draft, rows["target"])
    return rows


def _draft_row(source: str, draft: AnyDraft, target: ModelRow) -> ModelRow:
    """The facts of a draft: of a joined one, those of its model, as `JOINED` with its kind."""
    if isinstance(draft, CopyingDraft):
        return _copying_row(source, draft, target)
    if not isinstance(draft, JoinedDraft):
        return _model_row(source, draft)
    row = _model_row(source.removeprefix(JOINED), draft.model)
    row["kind"] = JOINED + row["kind"]
    row["fingerprint"] = JOINED + row["fingerprint"]
    # Its model is a draft by itself, and curves are about that.
    row["training"] = None
    return row


def _copying_row(source: str, draft: CopyingDraft, target: ModelRow) -> ModelRow:
    """The facts of a method without weights; the text that it drafts from, if any, is its name."""
    kind, _, file = source.partition(":")
    fingerprint = kind
    if draft.index is not None:
        fingerprint = draft.index.digest[:16]
    return ModelRow(
        name=file or kind,
        kind=kind,
        fingerprint=fingerprint,
        model_type=draft.kind,
        parameters=0,
        memory_bytes=0,
        vocabulary=target["vocabulary"],
        dtype=target["dtype"],
        quantize="none",
        device=target["device"],
        training=None,
    )


def _training(checkpoint: Path) -> Training | None:
    """Read the record of a checkpoint's alignment; None if `train` did not align it."""
    record = read_record(checkpoint)
    if "objective" not in record:
        return None
    return Training(
        objective=record["objective"],
        response_tokens=record["data"]["response_tokens"],
        steps=record["steps"],
    )


def identity(model: ModelRow) -> list[str]:
    """What decides a model's numbers: weights, dtype and device."""
    # Every process has a GPU of its own number.
    device = model["device"].partition(":")[0]
    return [model["fingerprint"], model["dtype"], device]


def machine(model: PreTrainedModel) -> JsonObject:
    """The processor, threads, GPU and system that the timings hold for."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    on_gpu = model.device.type == "cuda"
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(model.device) if on_gpu else None,
        "system": platform.system(),
        **({"target_parallel": model._tp_size} if is_divided(model) else {}),
        **({"target_spread": True} if is_spread(model) else {}),
    }


def clock(started: float, reused: int, measured: int, target: PreTrainedModel) -> JsonObject:
    """Start (given in seconds since 1970) and end of the run, cells reused and measured, machine
    and peak memory.
    """
    finished = time.time()
    return {
        "started": time.strftime(CLOCK_FORMAT, time.gmtime(started)),
        "finished": time.strftime(CLOCK_FORMAT, time.gmtime(finished)),
        "seconds": round(finished - started, 3),
        "cells_reused": reused,
        "cells_measured": measured,
        "machine": machine(target),
        "peak_memory_bytes": peak_memory(target.device)[0],
    }
