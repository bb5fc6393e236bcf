"""onnxruntime-genai on two Hugging Face directories, greedy, with a draft; run in its environment.

    python onnx_generate.py TARGET_HF DRAFT_HF PLACE REQUEST.json

The last line of its output is one JSON object.

The models are built in the directory PLACE. The request holds `prompts` (lists of token ids),
`max_new_tokens`, `threads` and `assistant_tokens`, a list of one number; a row of the answer has
`tokens` and the engine's own `stats`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime_genai


def built(source: str, out: Path) -> dict:
    """Its ONNX model in `out`, in fp32; its genai_config."""
    command = [sys.executable, "-I", "-m", "onnxruntime_genai.models.builder"]
    words = ["-m", source, "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", str(out / "cache")]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit((done.stderr.strip().splitlines() or ["the builder failed"])[-1])
    return json.loads((out / "genai_config.json").read_text())


def main() -> None:
    """Build, compose, generate, print."""
    target, draft, place, request_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    (ahead,) = request["assistant_tokens"]
    os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    config, own = (
        built(name, Path(place) / role) for name, role in ((target, "target"), (draft, "draft"))
    )
    # Beside the target's files; a path in `draft` is relative to them.
    block = own["model"]["decoder"]
    block["filename"] = f"../draft/{block['filename']}"
    config["model"] |= {"type": "speculative", "draft": block}
    config["speculative"] = {"max_draft_tokens": ahead}
    (Path(place) / "target" / "genai_config.json").write_text(json.dumps(config))
    model = onnxruntime_genai.Model(str(Path(place) / "target"))
    rows = []
    for prompt in request["prompts"]:
        params = onnxruntime_genai.GeneratorParams(model)
        length = len(prompt) + request["max_new_tokens"]
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
        stats = generator.get_speculative_stats()
        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        rows.append(
            {
                "tokens": tokens,
                "stats": {k: v for k, v in stats.items() if isinstance(v, int | float)},
            }
        )
    engine = f"onnxruntime-genai {onnxruntime_genai.__version__}"
    sys.stdout.write("\n" + json.dumps({"engine": engine, "answers": rows}) + "\n")


if __name__ == "__main__":
    main()
