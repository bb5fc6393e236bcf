"""A model as OpenVINO's IR with its tokenizer, and the logits that OpenVINO computes from it; run in its environment.

    python openvino_convert.py SOURCE OUT fp32|fp16 [INPUTS.safetensors LOGITS.safetensors]

INPUTS has `ids` [1, T]; LOGITS gets `logits` [1, T, V], computed in f32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast


def convert(source: str, out: str, weights: str) -> None:
    """Model, tokenizer and detokenizer."""
    main_export(
        source,
        output=out,
        task="text-generation-with-past",
        library_name="transformers",
        ov_config=OVConfig(dtype=weights),
        convert_tokenizer=False,
    )
    # By file: the class that a newer transformers names in tokenizer_config.json may not exist here.
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json")
    for name, part in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):  # noqa: B905
        openvino.save_model(part, Path(out) / f"openvino_{name}.xml")


def logits(directory: str, ids: np.ndarray) -> np.ndarray:
    """Logits `[1, T, V]` of the converted model for `ids` `[1, T]`, computed in fp32."""
    hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = openvino.Core().compile_model(f"{directory}/openvino_model.xml", "CPU", hints)
    tokens = ids.shape[1]
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "beam_idx": np.zeros(1, dtype=np.int32)}
    given["position_ids"] = np.arange(tokens, dtype=np.int64)[None]
    names = {name for port in compiled.inputs for name in port.names}
    request = compiled.create_infer_request()
    request.infer({name: value for name, value in given.items() if name in names})
    return request.get_tensor("logits").data.copy()


def main() -> None:
    """Convert, compute, write."""
    source, out, weights, *files = sys.argv[1:]
    convert(source, out, weights)
    if files:
        save_file({"logits": logits(out, load_file(files[0])["ids"]).astype(np.float32)}, files[1])
    sys.stdout.write("\n" + json.dumps({"engine": f"openvino {openvino.__version__}"}) + "\n")


if __name__ == "__main__":
    main()
