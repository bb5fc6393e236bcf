"""A language model as OpenVINO's IR, which OpenVINO GenAI reads; converted by optimum-intel in its own environment."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafts.layouts.hf_directory import probe_ids, save
from drafts.layouts.source import TOLERANCE, Proof, Source, compared, language_model
from drafts.neighbours import how_to_get, program, work
from draftsmith_core.errors import InputError

_TOLERANCE_FP16 = 2e-2


@torch.no_grad()
def write(source: Source, out: Path) -> Proof:
    """`openvino_model.xml` and `.bin`, the tokenizer and detokenizer; proven by OpenVINO's own runtime."""
    model = language_model(source, "openvino")
    python = program("openvino")
    if python is None:
        raise InputError(f"--format openvino: needs optimum-intel and openvino-genai: {how_to_get('openvino')}")
    if source.dtype == torch.bfloat16:
        raise InputError("--format openvino: is written in float32 or float16; give --dtype")
    if source.tokenizer is None:
        raise InputError(
            f"--format openvino: {source.name} has no tokenizer, and OpenVINO GenAI needs one; give --target"
        )
    ids = probe_ids(model)
    with tempfile.TemporaryDirectory() as place:
        given, answer = Path(place) / "inputs.safetensors", Path(place) / "logits.safetensors"
        save_file({"ids": ids}, given)
        save(source, model, Path(place) / "hf")
        weights = str(source.dtype).replace("torch.float", "fp")
        found = work(python, "openvino_convert.py", Path(place) / "hf", out, weights, given, answer)
        theirs = load_file(answer)["logits"]
    # With fp16 weights OpenVINO also rounds other constants, such as the frequencies of the rotary embedding.
    tolerance = TOLERANCE if source.dtype == torch.float32 else _TOLERANCE_FP16
    return compared(out, found["engine"], theirs, model(ids).logits, "tokens compared, f32", tolerance)
