"""Sections `servers` and `engines` of benchmarks/speed/distill.py.

`servers`: what `distill --engine openai` costs in front of two llama-servers. The same requests,
ours and through a bare loop in turn, which keeps as many of them under way on each server, has
their bytes ready and looks at no answer: what it reaches is the servers' own throughput. All share
the machine's processors.

`engines`: the target in this process, in vLLM's and in vLLM's server.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.lib.engines import VLLM_ON_A_CPU, how_to_get, llama_server, program, vllm_server
from benchmarks.lib.timing import rotated
from benchmarks.speed.peers import gguf
from draftsmith.core.errors import RunError
from draftsmith.core.models import load_model
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import ENGINES, AnswerRequest, Done
from draftsmith.distill.engines.openai import OpenAIEngine
from draftsmith.distill.generate import distill

# Requests at a time to each server, which are its slots, and the context that each slot then has.
SLOTS, CONTEXT = 8, 512
# Rows at a time of `hf`, and requests at a time to vLLM's server.
BATCH = 32


class Timed(OpenAIEngine):
    """The engine, with the seconds that its runs took, files and all, and the bodies that it
    posted.
    """

    seconds: ClassVar[float] = 0.0
    bodies: ClassVar[list[bytes]] = []

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """As the engine's, timed."""
        dialect = next(iter(self._dialects.values()))
        assert dialect.kind == "llama.cpp"

        def noted() -> Iterator[Sequence[AnswerRequest]]:
            for group in groups:
                bodies = (dialect.body(self._asked, each.prompt_ids, each.seed) for each in group)
                Timed.bodies += [json.dumps(body).encode() for body in bodies]
                yield group

        # The first round notes the bodies and is not counted.
        began = time.perf_counter()
        super().run(noted() if not Timed.seconds else groups, done)
        Timed.seconds = time.perf_counter() - began


async def _bare(ports: Sequence[int], bodies: Sequence[bytes]) -> list[bytes]:
    """The answers to all bodies, from whichever server has room."""
    waiting, answers = iter(bodies), []

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in waiting:
            head = (
                "POST /completion HTTP/1.1\r\nHost: a\r\nContent-Type: "
                f"application/json\r\nContent-Length: {len(body)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + body)
            reply = (await reader.readuntil(b"\r\n\r\n")).lower()
            answers.append(
                await reader.readexactly(int(reply.partition(b"content-length:")[2].split()[0]))
            )
        writer.close()

    await asyncio.gather(*(ask(port) for port in ports for _ in range(SLOTS)))
    return answers


def servers(
    target: str, text: str, prompts: int, new_tokens: int, rounds: int, directory: Path
) -> dict[str, Any]:
    """Tokens per second both ways, medians of `rounds` rounds, and the client's share of the
    time.
    """
    server = program("llama-server")
    if server is None:
        return {"skipped": f"not here: {how_to_get('llama-server')}"}
    tokenizer, draw = load_tokenizer(target), random.Random(0)
    model = load_model(target, device="cpu", dtype="float32")
    file = gguf(directory / "gguf", tokenizer, model, "F32")
    source, words = directory / "prompts.jsonl", text.split()
    rows = [
        {"prompt": f"{n} {' '.join(draw.choices(words, k=draw.randint(4, 40)))}"}
        for n in range(prompts)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ENGINES["openai"] = Timed
    options = ["-m", str(file), "-t", "1", "-c", str(SLOTS * CONTEXT), "-np", str(SLOTS)]
    with ExitStack() as stack:
        ports = [stack.enter_context(llama_server(server, options)) for _ in range(2)]

        def ours() -> tuple[int, float]:
            with tempfile.TemporaryDirectory(dir=directory) as out:
                config = DistillConfig(
                    target=target,
                    prompts=str(source),
                    out=f"{out}/set",
                    engine="openai",
                    endpoint=[f"http://127.0.0.1:{port}/v1" for port in ports],
                    concurrency=SLOTS,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                    temperature=1.0,
                )
                tokens = int(distill(config)["response_tokens"])
            return tokens, Timed.seconds

        def bare() -> tuple[int, float]:
            began = time.perf_counter()
            answers = asyncio.run(_bare(ports, bodies))
            seconds = time.perf_counter() - began
            return sum(len(json.loads(answer)["tokens"]) for answer in answers), seconds

        ours()
        bodies = Timed.bodies
        assert len(bodies) == prompts
        bare()
        ways: list[tuple[str, Callable[[], tuple[int, float]]]] = [("ours", ours), ("bare", bare)]
        speeds: dict[str, list[float]] = {name: [] for name, _ in ways}
        for each in range(rounds):
            for name, way in ways[:: 1 if each % 2 else -1]:
                tokens, seconds = way()
                assert tokens == prompts * new_tokens
                speeds[name].append(tokens / seconds)
    found = {name: statistics.median(values) for name, values in speeds.items()}
    pairs = [1 - mine / theirs for mine, theirs in zip(speeds["ours"], speeds["bare"], strict=True)]
    return {
        "prompts": prompts,
        "new_tokens": new_tokens,
        "tokens_per_s": found,
        "by_round": speeds,
        "overhead": statistics.median(pairs),
    }


def engines(
    target: str,
    rounds: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    dtypes: Sequence[str],
    directory: Path,
) -> dict[str, Any]:
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
    found: dict[str, Any] = {}
    for dtype in dtypes:
        try:
            made = _answered(python, common | {"dtype": dtype}, rounds, directory)
            found[dtype] = {name: _rates(by_round, made["hf"]) for name, by_round in made.items()}
        except RunError as error:
            found[dtype] = {"failed": str(error)}
    return found


def _answered(
    python: Path, common: dict[str, Any], rounds: Sequence[Sequence[Sequence[int]]], directory: Path
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


def _rates(made: Sequence[dict[str, float]], hf: Sequence[dict[str, float]]) -> dict[str, Any]:
    speeds, own = ([each["tokens"] / each["seconds"] for each in rounds] for rounds in (made, hf))
    return {
        "tokens_per_s": statistics.median(speeds),
        "rows_per_s": statistics.median(each["rows"] / each["seconds"] for each in made),
        "over_hf": statistics.median(a / b for a, b in zip(speeds, own, strict=True)),
        "by_round": made,
    }


Worker = Callable[[Sequence[Sequence[int]], int], dict[str, float]]


@contextmanager
def _worker(python: Path, config: dict[str, Any], file: Path) -> Iterator[Worker]:
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
