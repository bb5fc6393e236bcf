"""OpenVINO GenAI on the models of `decode.py`: greedy, f32, with and without the draft. Run by `peers.py` in an
environment of its own, which has openvino-genai and optimum-intel; imports nothing of this project.

    python peer_openvino.py TARGET_DIR DRAFT_DIR REQUEST.json      # prints one JSON object

The request holds `prompts` (lists of token ids, one list per round), `max_new_tokens`, `threads` and
`assistant_tokens`.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from transformers import PreTrainedTokenizerFast

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def converted(source: str) -> str:
    """The model as OpenVINO reads it, beside it, with fp32 weights."""
    out = Path(source) / "openvino"
    if not out.exists():
        main_export(source, output=out, task="text-generation-with-past", library_name="transformers")
        # The pipeline wants one although it is given token ids.
        parts = convert_tokenizer(
            PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json"), with_detokenizer=True
        )
        for name, part in zip(("tokenizer", "detokenizer"), parts):  # noqa: B905 (always two)
            openvino.save_model(part, out / f"openvino_{name}.xml")
    return str(out)


def measured(pipeline: "openvino_genai.LLMPipeline", request: dict, assistant_tokens: int | None) -> dict:
    """Median tokens per second over rounds (prefill included) after a warm-up, and the tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = request["max_new_tokens"], False, True
    if assistant_tokens is not None:
        config.num_assistant_tokens = assistant_tokens
    speeds, outputs = [], []
    for turn, prompts in enumerate([request["prompts"][0][:1], *request["prompts"]]):
        seconds, count = 0.0, 0
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            inputs = openvino_genai.TokenizedInputs(ids, openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64)))
            started = time.perf_counter()
            tokens = pipeline.generate(inputs, config).tokens[0]
            seconds += time.perf_counter() - started
            count += len(tokens)
            if turn:
                outputs.append(list(map(int, tokens)))
        if turn:
            speeds.append(count / seconds)
    return {"tokens_per_s": statistics.median(speeds), "outputs": outputs}


def main() -> None:
    """Convert, measure, print."""
    target, draft, request_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    options = F32 | {"INFERENCE_NUM_THREADS": request["threads"]}
    found = {"version": openvino.__version__}
    target, draft = converted(target), converted(draft)
    found["ar"] = measured(openvino_genai.LLMPipeline(target, "CPU", **options), request, None)
    for ahead in request["assistant_tokens"]:
        assisted = openvino_genai.draft_model(draft, "CPU", **options)
        pipeline = openvino_genai.LLMPipeline(target, "CPU", draft_model=assisted, **options)
        found[f"draft, {ahead} tokens"] = measured(pipeline, request, ahead)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
