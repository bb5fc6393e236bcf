"""Other engines on the same models, prompts and threads, for `decode.py --peers`.

`make engines` installs them (`drafts.neighbours`), in environments of their own, because they need other versions of
the same libraries. An engine that is not there is left out with the reason.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods import Method, Pair
from benchmarks.sections import Bench
from drafts.layouts import gguf_file
from drafts.load import Source
from drafts.neighbours import complete, how_to_get, llama_server, program, work
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import Tokenizer

ASSISTANT_TOKENS = (3, 4, 6)
LLAMA_TOKENS = (3, 6)


def compare(bench: Bench, tokenizer: Tokenizer, names: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    """Greedy tokens per second (median over rounds, prefill included) of every engine that is there, and how many of
    its outputs equal this engine's. Ours are timed before and after the others, because nothing can be interleaved
    between processes: the two figures should agree.
    """
    count = len(bench.prompts) // rounds
    prompts = [[ids for _, ids in bench.prompts[turn * count : (turn + 1) * count]] for turn in range(rounds)]
    request = {
        "prompts": prompts,
        "max_new_tokens": bench.max_new_tokens,
        "threads": threads,
        "assistant_tokens": ASSISTANT_TOKENS,
    }
    made = {name: bench.build(name, 0.0) for name in dict.fromkeys(["ar", "hf", *names])}
    outputs = [made["ar"].decode([prompt], 0)[0] for share in prompts for prompt in share]
    before = {name: _speed(method, prompts) for name, method in made.items()}
    others = {
        "openvino-genai f32": openvino(bench.apart, tokenizer, request),
        "llama-server": llama_cpp(bench.apart, tokenizer, request),
    }
    after = {name: _speed(method, prompts) for name, method in made.items()}
    ours = {name: {"tokens_per_s": [before[name], after[name]]} for name in made}
    return ours | {name: without_outputs(found, outputs) for name, found in others.items()}


def _speed(method: Method, rounds: Sequence[Sequence[Sequence[int]]]) -> float:
    method.decode([rounds[0][0]], 0)
    speeds = []
    for prompts in rounds:
        started = time.perf_counter()
        emitted = sum(len(method.decode([prompt], 0)[0]) for prompt in prompts)
        speeds.append(emitted / (time.perf_counter() - started))
    return statistics.median(speeds)


def openvino(pair: Pair, tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    """OpenVINO GenAI through `peer_openvino.py`, with fp32 weights and arithmetic."""
    python = program("openvino")
    if python is None:
        return {"skipped": f"not here: {how_to_get('openvino')}"}
    with tempfile.TemporaryDirectory() as directory:
        names = {"target": pair.target, "draft": pair.draft}
        for name, model in names.items():
            model.save_pretrained(Path(directory) / name)
            tokenizer.save_pretrained(Path(directory) / name)
            # It refuses a model without an end; the request says to go on behind it.
            for file in (Path(directory) / name).glob("*config.json"):
                file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
        file = Path(directory) / "request.json"
        file.write_text(json.dumps(request))
        try:
            script = Path(__file__).resolve().with_name("peer_openvino.py")
            return work(python, str(script), *(f"{directory}/{name}" for name in names), file)
        except RunError as error:
            return {"failed": str(error)}


def llama_cpp(pair: Pair, tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's server with F32 and with F16 weights, without and with the draft; else as it comes."""
    server = program("llama-server")
    if server is None:
        return {"skipped": f"not here: {how_to_get('llama-server')}"}
    found: dict[str, Any] = {}
    for name, dtype in (("F32", torch.float32), ("F16", torch.float16)):
        with tempfile.TemporaryDirectory() as directory:
            try:
                target, draft = (
                    gguf(Path(directory) / kind, tokenizer, model, dtype)
                    for kind, model in (("target", pair.target), ("draft", pair.draft))
                )
            except (InputError, RunError) as error:
                return found | {"failed": str(error)}
            words = ["-m", str(target), "-t", str(request["threads"]), "-c", "4096", "-np", "1"]
            drafting = ["-md", str(draft), "--spec-type", "draft-simple", "--spec-draft-n-max"]
            ways = {name: words} | {
                f"{name}, draft, {ahead} tokens": [*words, *drafting, str(ahead)] for ahead in LLAMA_TOKENS
            }
            found |= {way: _served(server, options, request) for way, options in ways.items()}
    return found


def gguf(directory: Path, tokenizer: Tokenizer, model: Any, dtype: torch.dtype) -> Path:
    """The model as a GGUF file in `directory`; InputError, one line, for one that cannot be written."""
    directory.mkdir()
    gguf_file.write(Source(directory.name, model, dtype, tokenizer), directory)
    return directory / gguf_file.FILE


def _served(server: Path, words: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    speeds, outputs = [], []
    try:
        with llama_server(server, words) as port:
            for prompts in [request["prompts"][0][:1], *request["prompts"]]:
                started = time.perf_counter()
                answers = [complete(port, prompt, request["max_new_tokens"])["tokens"] for prompt in prompts]
                speeds.append(sum(map(len, answers)) / (time.perf_counter() - started))
                outputs += answers
    except RunError as error:
        return {"failed": str(error)}
    return {"tokens_per_s": statistics.median(speeds[1:]), "outputs": outputs[1:]}


def without_outputs(found: dict[str, Any], ours: list[list[int]]) -> dict[str, Any]:
    """The same with the tokens replaced by how many outputs equal ours."""
    if "outputs" in found:
        same = sum(mine == theirs for mine, theirs in zip(ours, found["outputs"], strict=True))
        return {key: value for key, value in found.items() if key != "outputs"} | {"equal": f"{same} of {len(ours)}"}
    return {key: without_outputs(value, ours) if isinstance(value, dict) else value for key, value in found.items()}
