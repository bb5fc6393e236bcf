"""A pair in vLLM or SGLang, on a machine with a GPU: the server is started as `draftsmith doctor` says, greedy prompts
are sent, and its outputs and accepted tokens are compared with ours for the same chain.

    python -m benchmarks.serve_check --engine vllm --target T --draft D --prompts P.jsonl [--draft_tokens 4]

Prints one JSON object. Half precision decides ties otherwise, so outputs may part at one; acceptance is compared over
all prompts. Exit code 1 when tokens per target call differ by more than `--tolerance`.
"""

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import draftsmith as ds
from drafts.neighbours import ask, free_port, is_up
from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError, RunError

_START_S = 900


def main() -> None:
    """Export, serve, compare, print."""
    found = check(_options(sys.argv[1:]))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.exit(0 if found["agrees"] else 1)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    for name in ("target", "draft", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--draft_tokens", type=int, default=4)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--max_prompts", type=int, default=50)
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative, of tokens per target call")
    parser.add_argument("--program", help="what to start in place of the first word of doctor's command")
    return parser.parse_args(words)


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides' tokens, target calls and their ratio, and how many outputs are equal."""
    pair = ds.load_pair(options.target, draft=options.draft)
    prompts = [pair.encode(prompt) for prompt in _prompts(Path(options.prompts))[: options.max_prompts]]
    chain: dict[str, Any] = {"tree": f"chain:{options.draft_tokens}", "temperature": 0, "ignore_eos": True}
    ours = [pair.generate(prompt, max_new_tokens=options.max_new_tokens, **chain) for prompt in prompts]
    with tempfile.TemporaryDirectory() as place:
        command = served_by(options, Path(place))
        theirs = _served(command, options, prompts)
    mine = {"tokens": sum(len(out.output_ids) for out in ours), "calls": sum(out.stats.target_calls for out in ours)}
    tau, own = theirs["tokens"] / max(theirs["calls"], 1), mine["tokens"] / mine["calls"]
    equal = sum(out.output_ids == tokens for out, tokens in zip(ours, theirs.pop("outputs"), strict=True))
    return {
        "engine": options.engine,
        "command": shlex.join(command),
        "ours": mine | {"tokens_per_call": own},
        "theirs": theirs | {"tokens_per_call": tau},
        "equal_outputs": f"{equal} of {len(prompts)}",
        "agrees": abs(tau - own) <= options.tolerance * own,
    }


def _prompts(file: Path) -> list[str]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not all(isinstance(row.get("prompt"), str) for row in rows):
        raise InputError(f"{file}: every row needs the key 'prompt'")
    return [row["prompt"] for row in rows]


def served_by(options: argparse.Namespace, place: Path) -> list[str]:
    """The words that start the server; what it reads is exported into `place` first."""
    found = ds.doctor(ds.DoctorConfig(target=options.target, draft=options.draft))
    verdict = next(each for each in found["verdicts"] if each["engine"] == options.engine)
    if not verdict["serves"]:
        raise InputError(f"--engine {options.engine}: {verdict['reason']}")
    kind = found["kind"]
    exports, command = SERVING[options.engine][kind].commands(kind, options.target, options.draft, options.draft_tokens)
    for line in exports:
        words = dict(zip(shlex.split(line)[2::2], shlex.split(line)[3::2], strict=True))
        out = str(place / words["--out"])
        known = {field.name for field in dataclasses.fields(ds.ExportConfig)}
        values = {key[2:]: value for key, value in words.items() if key[2:] in known}
        ds.export(ds.ExportConfig(**values | {"out": out}))
        command = command.replace(words["--out"], out)
    words_ = shlex.split(command)
    return [options.program, *words_[1:]] if options.program else words_


def _served(command: list[str], options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            end = time.monotonic() + _START_S
            while not is_up(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = [line for line in log.read().splitlines() if line.strip()] or ["no message"]
                    raise RunError(f"{command[0]}: did not serve: {said[-1]}")
                time.sleep(1)
            return {"vllm": _vllm, "sglang": _sglang}[options.engine](port, options, prompts)
        finally:
            server.terminate()
            server.wait()


def _vllm(port: int, options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Target calls are drafts, and one for each prompt, whose forward gives the first token without a draft."""
    body = {"model": options.target, "max_tokens": options.max_new_tokens, "temperature": 0, "ignore_eos": True}
    answers = [ask(port, "v1/completions", body | {"prompt": p, "return_token_ids": True}) for p in prompts]
    outputs = [answer["choices"][0]["token_ids"] for answer in answers]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    counts = {}
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        lines = re.findall(rf"^vllm:spec_decode_num_{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        counts[name] = int(sum(map(float, lines)))
    return {"tokens": sum(map(len, outputs)), "calls": counts["drafts"] + len(prompts), "outputs": outputs} | counts


def _sglang(port: int, options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Target calls are verifications, and one for each prompt."""
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens, "ignore_eos": True}
    answers = [ask(port, "generate", {"input_ids": p, "sampling_params": sampling}) for p in prompts]
    outputs = [answer["output_ids"] for answer in answers]
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return {"tokens": sum(map(len, outputs)), "calls": verified + len(prompts), "outputs": outputs}


if __name__ == "__main__":
    main()
