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

import draftsmith as ds
from benchmarks.methods import Method, Pair
from benchmarks.sections import Bench
from drafts.layouts import gguf_file
from drafts.load import Source
from drafts.neighbours import complete, how_to_get, llama_server, program, vllm_answers, work
from draftsmith.demo import corpus
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.tokenization import Tokenizer
from train.config import Optim

ASSISTANT_TOKENS = (3, 4, 6)
LLAMA_TOKENS = (3, 6)
HEAD_STEPS = 60


def compare(bench: Bench, tokenizer: Tokenizer, names: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    """Greedy tokens per second (median over rounds, prefill included) of every engine that is there, and how many of
    its outputs equal this engine's. Ours are timed before and after the others, because nothing can be interleaved
    between processes: the two figures should agree.
    """
    prompts = bench.rounds(rounds)
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
        "vllm f32": vllm(bench.apart, tokenizer, request),
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


def vllm(pair: Pair, tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    """vLLM with fp32 weights, one request at a time and without CUDA graphs or compiling, as CPUs have none: without a
    draft, with the draft, and with an EAGLE-3 head that `_eagle3` trains for this target.
    """
    python = program("vllm")
    if python is None:
        return {"skipped": f"not here: {how_to_get('vllm')}"}
    prompts = [prompt for turn in request["prompts"] for prompt in turn]
    longest = max(map(len, prompts)) + request["max_new_tokens"] + 16
    with tempfile.TemporaryDirectory() as directory:
        target, draft = (str(Path(directory) / name) for name in ("target", "draft"))
        for model, name in ((pair.target, target), (pair.draft, draft)):
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
        engine = {"model": target, "dtype": "float32", "max_model_len": longest, "max_num_seqs": 1}
        ways: dict[str, Any] = {"alone": engine}
        drafts = {"draft": ("draft_model", draft), "eagle3": ("eagle3", _eagle3(target, Path(directory)))}
        for name, (method, model) in drafts.items():
            for ahead in LLAMA_TOKENS:
                how = {"method": method, "model": model, "num_speculative_tokens": ahead}
                ways[f"{name}, {ahead} tokens"] = engine | {"speculative_config": how}
        common = {"max_new_tokens": request["max_new_tokens"], "threads": request["threads"]}
        common |= {"prompts": [prompts[0], *prompts], "ways": [{"temperature": 0}]}
        try:
            answers = vllm_answers(python, {name: common | {"engine": each} for name, each in ways.items()})
        except RunError as error:
            return {"failed": str(error)}
    found: dict[str, Any] = {"version": answers["engine"]}
    for name, rows in answers["answers"].items():
        if isinstance(rows, dict):
            found[name] = {"failed": rows["refused"]}
            continue
        rows, count = rows[0][1:], len(request["prompts"][0])
        rounds = [rows[start : start + count] for start in range(0, len(rows), count)]
        speeds = [sum(len(row["tokens"][0]) for row in turn) / sum(row["seconds"] for row in turn) for turn in rounds]
        found[name] = {"tokens_per_s": statistics.median(speeds), "outputs": [row["tokens"][0] for row in rows]}
        if drafts := sum(row.get("drafts", 0) for row in rows):
            found[name]["accepted_per_draft"] = sum(sum(row["per_position"]) for row in rows) / drafts
    return found


def _eagle3(target: str, directory: Path) -> str:
    """A head for the target, from its greedy answers to 48 training passages, as speculators' layout."""
    rows = [row for name in corpus.DOMAINS for row in corpus.passages(name, corpus.split(name).train, 300)[:16]]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, head, out = (str(directory / name) for name in ("set", "head", "exported"))
    options: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True, "batch_size": 16}
    ds.distill(ds.DistillConfig(target=target, prompts=str(directory / "prompts.jsonl"), out=data, **options))
    options = {"steps": HEAD_STEPS, "eval_every": HEAD_STEPS, "batch_size": 8, "max_length": 192, "objective": "fkl"}
    options |= {"optim": Optim(lr=1e-3), "draft_vocab_size": 2048}
    ds.train(ds.TrainConfig(kind="eagle3", target=target, data=[data], heldout=[data], out=head, **options))
    ds.export(ds.ExportConfig(draft=head, target=target, format="speculators", out=out, dtype="float32"))
    return out


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
