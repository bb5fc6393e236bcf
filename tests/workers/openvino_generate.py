"""OpenVINO GenAI on exported models, greedy, with and without a draft; run in its environment.

    python openvino_generate.py TARGET_IR DRAFT_IR REQUEST.json      # the last line is one JSON object

The request holds `prompts` (lists of token ids), `max_new_tokens`, `threads` and `assistant_tokens`, a list of numbers
of tokens to draft, 0 for the target alone. The answer has for each of them a list of rows: `tokens`, and with a draft
`calls`, the number of the target's forwards, and `accepted` as the engine counts.
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

# Without these OpenVINO rounds to 8 and 16 bits, and its output with a draft is not its own without one.
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def answered(pipeline: "openvino_genai.LLMPipeline", request: dict, ahead: int) -> list:
    """One row per prompt."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = request["max_new_tokens"], False, True
    if ahead:
        config.num_assistant_tokens = ahead
    rows = []
    for prompt in request["prompts"]:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        inputs = openvino_genai.TokenizedInputs(ids, openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64)))
        result = pipeline.generate(inputs, config)
        row = {"tokens": list(map(int, result.tokens[0]))}
        if ahead:
            metrics = result.extended_perf_metrics
            row["calls"] = len(metrics.main_model_metrics.raw_metrics.m_batch_sizes)
            row["accepted"] = int(metrics.get_num_accepted_tokens())
        rows.append(row)
    return rows


def main() -> None:
    """Load, generate, print."""
    target, draft, request_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    options = F32 | {"INFERENCE_NUM_THREADS": request["threads"]}
    found = {"engine": f"openvino-genai {openvino_genai.__version__}", "answers": {}}
    for ahead in request["assistant_tokens"]:
        more = {"draft_model": openvino_genai.draft_model(draft, "CPU", **options)} if ahead else {}
        pipeline = openvino_genai.LLMPipeline(target, "CPU", **options, **more)
        found["answers"][ahead] = answered(pipeline, request, ahead)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
