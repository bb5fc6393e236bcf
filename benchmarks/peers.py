"""Other engines on the same models, prompts and threads, for `decode.py --peers`.

They live in environments of their own, because they need other versions of the same libraries. An engine that is not
there is left out with the reason.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import Method, Pair
from benchmarks.sections import Bench
from draftsmith_core.tokenization import Tokenizer

OPENVINO = "OPENVINO_PYTHON"
LLAMA_SERVER, LLAMA_GGUF = "LLAMA_SERVER", "LLAMA_GGUF"
ASSISTANT_TOKENS = (3, 4, 6)
_START_S = 120


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
        "llama-server": llama_server(request),
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
    python = os.environ.get(OPENVINO)
    if python is None:
        return {"skipped": f"set {OPENVINO} to a Python that has openvino-genai and optimum-intel"}
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
        script = Path(__file__).with_name("peer_openvino.py")
        # Not this project's path: the other environment has its own libraries.
        command = [python, "-I", str(script), *(f"{directory}/{name}" for name in names), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def llama_server(request: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's server on the target as a GGUF file, without a draft."""
    program = os.environ.get(LLAMA_SERVER) or shutil.which("llama-server")
    gguf = os.environ.get(LLAMA_GGUF)
    if program is None or gguf is None:
        return {"skipped": f"set {LLAMA_SERVER} to llama-server, and {LLAMA_GGUF} to the target as a GGUF file"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", gguf, "--port", str(port), "-t", str(request["threads"]), "-c", "4096", "-np", "1"]
    server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not _is_up(server, f"http://127.0.0.1:{port}/health"):
            return {"failed": f"llama-server did not answer within {_START_S} s"}
        speeds, outputs = [], []
        for prompts in [request["prompts"][0][:1], *request["prompts"]]:
            answers = [_complete(port, prompt, request["max_new_tokens"]) for prompt in prompts]
            speeds.append(sum(len(tokens) for tokens, _ in answers) / sum(seconds for _, seconds in answers))
            outputs += [tokens for tokens, _ in answers]
    finally:
        server.terminate()
        server.wait()
    return {"tokens_per_s": statistics.median(speeds[1:]), "outputs": outputs[1:], "file": Path(gguf).name}


def _is_up(server: subprocess.Popen[bytes], url: str) -> bool:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _complete(port: int, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], float]:
    """New tokens of one prompt, and the seconds that they took, prefill included."""
    wanted = {"prompt": list(prompt), "n_predict": max_new_tokens, "temperature": 0, "ignore_eos": True}
    wanted |= {"return_tokens": True, "cache_prompt": False}
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(call) as answer:
        tokens = json.load(answer)["tokens"]
    return tokens, time.perf_counter() - started


def without_outputs(found: dict[str, Any], ours: list[list[int]]) -> dict[str, Any]:
    """The same with the tokens replaced by how many outputs equal ours."""
    if "outputs" in found:
        same = sum(mine == theirs for mine, theirs in zip(ours, found["outputs"], strict=True))
        return {key: value for key, value in found.items() if key != "outputs"} | {"equal": f"{same} of {len(ours)}"}
    return {key: without_outputs(value, ours) if isinstance(value, dict) else value for key, value in found.items()}
