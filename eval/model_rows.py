"""What results.json says of the models that were measured, of the machine, and of the time it took."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafts.load import Draft, draft_fingerprint, kind_of
from draftsmith_core.models import (
    context_length,
    dtype_name,
    memory_bytes,
    parameter_count,
    peak_memory,
    quantization,
    vocabulary_size,
)
from draftsmith_core.runs import read_record
from eval.schema import ModelRow, Training


def model_row(name: str, model: Draft) -> ModelRow:
    """The facts of a loaded model; `name` is its directory or hub name."""
    weight = next(model.parameters())
    if isinstance(model, PreTrainedModel):
        family, vocabulary, context = str(model.config.model_type), vocabulary_size(model), context_length(model)
        dtype = dtype_name(model)
    else:
        family, vocabulary, context = model.kind, model.vocab_size, None
        dtype = str(weight.dtype).removeprefix("torch.")
    return ModelRow(
        name=name,
        kind=kind_of(model),
        fingerprint=draft_fingerprint(model),
        model_type=family,
        parameters=parameter_count(model),
        memory_bytes=memory_bytes(model),
        vocabulary=vocabulary,
        context=context,
        dtype=dtype,
        quantize=quantization(model),
        device=str(weight.device),
        training=_training(Path(name)),
    )


def _training(checkpoint: Path) -> Training | None:
    """What the checkpoint's own record says of its alignment; None for hub names and other people's directories."""
    values = read_record(checkpoint)
    try:
        tokens, steps = values["data"]["response_tokens"], values["steps"]
        batch = values["config"]["batch_size"] * values["config"]["accumulation"] * values["processes"]
        return Training(
            objective=values["objective"],
            response_tokens=tokens,
            epochs=steps * batch / values["data"]["training"]["rows"],
            steps=steps,
            best_step=values["best_step"],
        )
    except KeyError:
        return None  # none, or trained on text and not aligned, as the base draft that comes with the demo


def identity(model: ModelRow) -> list[str]:
    """What makes two models give the same numbers: weights, arithmetic, and where it is done."""
    return [model["fingerprint"], model["dtype"], model["device"]]


def machine(model: PreTrainedModel) -> dict[str, Any]:
    """The processor, threads, GPU and system that the timings hold for."""
    on_gpu = model.device.type == "cuda"
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(model.device) if on_gpu else None,
        "system": platform.system(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def clock(started: float, reused: int, measured: int, target: PreTrainedModel) -> dict[str, Any]:
    """When the run started (seconds since 1970) and ended, what it measured anew, where, and its peak memory."""
    finished = time.time()
    return {
        "started": _utc(started),
        "finished": _utc(finished),
        "seconds": round(finished - started, 3),
        "cells_reused": reused,
        "cells_measured": measured,
        "machine": machine(target),
        "peak_memory_bytes": peak_memory(target.device)[0],
    }


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
