"""The target in this process, in vLLM's and in vLLM's server, for benchmarks/speed/distill.py."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.engines import VLLM_ON_A_CPU, how_to_get, program, vllm_server
from benchmarks.lib.timing import rotated
from draftsmith.core.errors import RunError
from draftsmith.core.io import JsonObject

# Rows at a time of `hf`, and requests at a time to vLLM's server.
BATCH = 32


def engines(
    target: str,
    rounds: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    dtypes: Sequence[str],
    directory: Path,
) -> JsonObject:
    """Tokens and rows per second, by dtype, of `hf`, of `vllm` in process and of `openai` before
    vLLM's server: medians over rounds of prompts, which the engines answer in turn.
    """
    python = program("vllm")
    if python is None:
        return {"skipped": f"not here: {how_to_get('vllm')}"}
    common = {
        "target": target,
        "prompts": "-",
        "out": "-",
        "max_new_tokens": new_tokens,
        "temperature": 1.0,
    }
    found: JsonObject = {}
    for dtype in dtypes:
        try:
            made = _answered(python, common | {"dtype": dtype}, rounds, directory)
            found[dtype] = {name: _rates(by_round, made["hf"]) for name, by_round in made.items()}
        except RunError as error:
            found[dtype] = {"failed": str(error)}
    return found


def _answered(
    python: Path, common: JsonObject, rounds: Sequence[Sequence[Sequence[int]]], directory: Path
) -> dict[str, list[dict[str, float]]]:
    """What every engine took for every round, after a warm-up."""
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:

        def start(engine: str, python: Path, **more: Any) -> None:
            config = common | {"engine": engine} | more
            workers[engine] = stack.enter_context(
                _worker(python, config, directory / f"{engine}.json")
            )

        start("hf", Path(sys.executable), device="cpu", batch_size=BATCH)
        start("vllm", python)
        port = stack.enter_context(
            vllm_server(python, ["--model", common["target"], "--dtype", common["dtype"]])
        )
        start(
            "openai",
            Path(sys.executable),
            endpoint=[f"http://127.0.0.1:{port}/v1"],
            concurrency=BATCH,
        )
        by_round: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
        for seed, prompts in enumerate([rounds[0][:2], *rounds]):
            for name in rotated(list(workers), seed):
                by_round[name].append(workers[name](prompts, seed))
                # vLLM's worker looks for work for another second.
                time.sleep(1.5)
    return {name: made[1:] for name, made in by_round.items()}


def _rates(made: Sequence[dict[str, float]], hf: Sequence[dict[str, float]]) -> JsonObject:
    speeds, own = ([each["tokens"] / each["seconds"] for each in rounds] for rounds in (made, hf))
    return {
        "tokens_per_s": statistics.median(speeds),
        "rows_per_s": statistics.median(each["rows"] / each["seconds"] for each in made),
        "over_hf": statistics.median(a / b for a, b in zip(speeds, own, strict=True)),
        "by_round": made,
    }


Worker = Callable[[Sequence[Sequence[int]], int], dict[str, float]]


@contextmanager
def _worker(python: Path, config: JsonObject, file: Path) -> Iterator[Worker]:
    """An engine of `distill` in a process of its own (`distill_engine.py`), which the first round
    waits for to be loaded. Raises RunError if it dies.
    """
    path = [entry for entry in sys.path if entry.endswith("site-packages")]
    file.write_text(
        json.dumps({"root": str(Path(__file__).parents[2]), "path": path, "config": config})
    )
    command = [str(python), "-I", str(Path(__file__).with_name("distill_engine.py")), str(file)]
    with file.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            command,
            env=VLLM_ON_A_CPU | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        pipes = process.stdin, process.stdout

        def ask(prompts: Sequence[Sequence[int]], seed: int) -> dict[str, float]:
            pipes[0].write(json.dumps({"prompts": prompts, "seed": seed}) + "\n")
            pipes[0].flush()
            if not (answer := pipes[1].readline()):
                log.seek(0)
                errors = [line for line in log if "Error" in line] or ["no message"]
                raise RunError(f"--engine {config['engine']}: it ended: {errors[0].strip()}")
            found: dict[str, float] = json.loads(answer)
            return found

        try:
            yield ask
        finally:
            pipes[0].close()
            process.wait()
