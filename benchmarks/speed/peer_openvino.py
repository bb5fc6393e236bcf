"""OpenVINO GenAI on the models of `decode.py`, with and without the draft. Run by `peers.py` in an
environment of its own, which has openvino-genai and optimum-intel; imports nothing of this project.

    python peer_openvino.py TARGET_DIR DRAFT_DIR REQUEST.json      # prints one JSON object

A model that has been converted lies in its directory's `openvino`. The request holds `prompts`
(lists of token ids, one list per round), `temperatures`, `max_new_tokens`, `threads`, `ahead`
(tokens to draft) and `sixteen_bits`: weights and, as it comes, arithmetic in these instead of fp32.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig
from transformers import PreTrainedTokenizerFast

JsonObject = dict[str, Any]
F32 = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


def converted(source: str, sixteen_bits: bool) -> str:
    """The model as OpenVINO reads it, beside it."""
    out = Path(source) / "openvino"
    if not out.exists():
        weights = OVConfig(dtype="fp16" if sixteen_bits else "fp32")
        task = "text-generation-with-past"
        main_export(source, output=out, task=task, library_name="transformers", ov_config=weights)
        # The pipeline wants one although it is given token ids.
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json")
        parts = convert_tokenizer(tokenizer, with_detokenizer=True)
        for name, part in zip(("tokenizer", "detokenizer"), parts):  # noqa: B905 (always two)
            openvino.save_model(part, out / f"openvino_{name}.xml")
    return str(out)


def measured(
    pipeline: "openvino_genai.LLMPipeline",
    request: JsonObject,
    ahead: int | None,
    counts: list[list[int]],
) -> JsonObject:
    """Tokens per second of every round (prefill included) after a warm-up, and the tokens, by
    temperature. With a draft `counts` gets the target's forwards and the accepted tokens of each
    prompt, as the engine counts.
    """
    found: JsonObject = {"speeds": [], "outputs": []}
    for temperature in request["temperatures"]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request["max_new_tokens"], True
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
        if ahead is not None:
            config.num_assistant_tokens = ahead
        speeds = []
        outputs = []
        for turn, prompts in enumerate([request["prompts"][0][:1], *request["prompts"]]):
            config.rng_seed = turn
            seconds = 0.0
            count = 0
            for prompt in prompts:
                ids = np.array([prompt], dtype=np.int64)
                inputs = openvino_genai.TokenizedInputs(
                    openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
                )
                started = time.perf_counter()
                result = pipeline.generate(inputs, config)
                seconds += time.perf_counter() - started
                tokens = list(map(int, result.tokens[0]))
                count += len(tokens)
                if turn:
                    outputs.append(tokens)
                if turn and ahead is not None:
                    metrics = result.extended_perf_metrics
                    calls = len(metrics.main_model_metrics.raw_metrics.m_batch_sizes)
                    accepted = int(metrics.get_num_accepted_tokens())
                    counts.append([calls, accepted])
            if turn:
                speeds.append(count / seconds)
        found["speeds"].append(speeds)
        found["outputs"].append(outputs)
    return found


def main() -> None:
    """Convert, measure, print."""
    target, draft, request_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    options = ({} if request["sixteen_bits"] else F32) | {
        "INFERENCE_NUM_THREADS": request["threads"]
    }
    target, draft = (converted(name, request["sixteen_bits"]) for name in (target, draft))
    ways = {
        "alone": measured(openvino_genai.LLMPipeline(target, "CPU", **options), request, None, [])
    }
    counts: dict[int, list[list[int]]] = {}
    for ahead in request["ahead"]:
        assisted = openvino_genai.draft_model(draft, "CPU", **options)
        pipeline = openvino_genai.LLMPipeline(target, "CPU", draft_model=assisted, **options)
        try:
            ways[f"draft, {ahead} tokens"] = measured(
                pipeline, request, ahead, counts.setdefault(ahead, [])
            )
        except RuntimeError as error:
            reason, *_ = str(error).split(" failed at /")
            ways[f"draft, {ahead} tokens"] = {"failed": reason}
    found = {"version": openvino.__version__, "ways": ways, "counts": counts}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
