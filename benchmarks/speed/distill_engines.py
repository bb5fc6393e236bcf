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

from benchmarks.lib.engines import VLLM_ON_A_CPU, how_to_get, program, vllm_server
from benchmarks.lib.places import ROOT
from benchmarks.lib.timing import rotated
from benchmarks.speed.methods import Prompts
from draftsmith.core.errors import RunError
from draftsmith.core.io import JsonObject

# Rows at a time of `hf`, and requests at a time to vLLM's server.
BATCH = 32
# Rows, tokens and seconds of one round.
Round = dict[str, float]
Worker = Callable[[Prompts, int], Round]


def engines(
    target: str,
    rounds: Sequence[Prompts],
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
    python: Path, common: JsonObject, rounds: Sequence[Prompts], directory: Path
) -> dict[str, list[Round]]:
    """What every engine took for every round, after a warm-up."""
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:

        def start(engine: str, python: Path, **more: object) -> None:
            file = directory / f"{engine}.json"
            worker = _worker(python, common | {"engine": engine, **more}, file)
            workers[engine] = stack.enter_context(worker)

        start("hf", Path(sys.executable), device="cpu", batch_size=BATCH)
        start("vllm", python)
        words = ["--model", common["target"], "--dtype", common["dtype"]]
        port = stack.enter_context(vllm_server(python, words))
        endpoint = [f"http://127.0.0.1:{port}/v1"]
        start("openai", Path(sys.executable), endpoint=endpoint, concurrency=BATCH)
        by_round: dict[str, list[Round]] = {name: [] for name in workers}
        for seed, prompts in enumerate([rounds[0][:2], *rounds]):
            for name in rotated(list(workers), seed):
                by_round[name].append(workers[name](prompts, seed))
                # vLLM's worker looks for work for another second.
                time.sleep(1.5)
    return {name: made[1:] for name, made in by_round.items()}


def _rates(made: Sequence[Round], hf: Sequence[Round]) -> JsonObject:
    speeds = _per_second("tokens", made)
    ratios = [a / b for a, b in zip(speeds, _per_second("tokens", hf), strict=True)]
    return {
        "tokens_per_s": statistics.median(speeds),
        "rows_per_s": statistics.median(_per_second("rows", made)),
        "over_hf": statistics.median(ratios),
        "by_round": made,
    }


def _per_second(what: str, rounds: Sequence[Round]) -> list[float]:
    return [each[what] / each["seconds"] for each in rounds]


@contextmanager
def _worker(python: Path, config: JsonObject, file: Path) -> Iterator[Worker]:
    """An engine of `distill` in a process of its own (`distill_engine.py`), which the first round
    waits for to be loaded. Raises RunError if it dies.
    """
    path = [entry for entry in sys.path if entry.endswith("site-packages")]
    request = {"root": str(ROOT), "path": path, "config": config}
    file.write_text(json.dumps(request))
    script = Path(__file__).with_name("distill_engine.py")
    command = [str(python), "-I", str(script), str(file)]
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

        def ask(prompts: Prompts, seed: int) -> Round:
            request = json.dumps({"prompts": prompts, "seed": seed})
            pipes[0].write(f"{request}\n")
            pipes[0].flush()
            if not (answer := pipes[1].readline()):
                log.seek(0)
                errors = [line for line in log if "Error" in line] or ["no message"]
                raise RunError(f"--engine {config['engine']}: it ended: {errors[0].strip()}")
            found: Round = json.loads(answer)
            return found

        try:
            yield ask
        finally:
            pipes[0].close()
            process.wait()
