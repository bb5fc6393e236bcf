"""Sections `servers` and `engines` of benchmarks/distill.py.

`servers`: what `distill --engine openai` costs in front of two llama-servers. The same requests, ours and through a
bare loop in turn, which keeps as many of them under way on each server, has their bytes ready and looks at no answer:
what it reaches is the servers' own throughput. All share the machine's processors.

`engines`: the target in this process, in vLLM's and in vLLM's server.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers import gguf
from distill.config import DistillConfig
from distill.engines import ENGINES, AnswerRequest, Done
from distill.engines.openai import OpenAIEngine
from distill.generate import distill
from drafts.neighbours import how_to_get, llama_server, program, vllm_server, work
from draftsmith_core.models import load_model
from draftsmith_core.tokenization import load_tokenizer

# Requests at a time to each server, which are its slots, and the context that each slot then has.
SLOTS, CONTEXT = 8, 512
# Rows at a time of section `engines`.
BATCH = 32


class Timed(OpenAIEngine):
    """The engine, with the seconds that its runs took, files and all, and the bodies that it posted."""

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
                f"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + body)
            reply = (await reader.readuntil(b"\r\n\r\n")).lower()
            answers.append(await reader.readexactly(int(reply.partition(b"content-length:")[2].split()[0])))
        writer.close()

    await asyncio.gather(*(ask(port) for port in ports for _ in range(SLOTS)))
    return answers


def servers(target: str, text: str, prompts: int, new_tokens: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Tokens per second both ways, medians of `rounds` rounds, and the client's share of the time."""
    server = program("llama-server")
    if server is None:
        return {"skipped": f"not here: {how_to_get('llama-server')}"}
    tokenizer, draw = load_tokenizer(target), random.Random(0)
    model = load_model(target, device="cpu", dtype="float32")
    file = gguf(directory / "gguf", tokenizer, model, model.dtype)
    source, words = directory / "prompts.jsonl", text.split()
    rows = [{"prompt": f"{n} {' '.join(draw.choices(words, k=draw.randint(4, 40)))}"} for n in range(prompts)]
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


def engines(target: str, text: str, prompts: int, new_tokens: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Tokens per second of `hf`, of `vllm` in process and of `openai` before `vllm serve`, on the same prompts."""
    python = program("vllm")
    if python is None:
        return {"skipped": f"not here: {how_to_get('vllm')}"}
    draw, words = random.Random(0), text.split()
    texts = [[" ".join(draw.choices(words, k=draw.randint(4, 40))) for _ in range(prompts)] for _ in range(rounds)]
    common = {"target": target, "prompts": "-", "out": "-", "max_new_tokens": new_tokens, "temperature": 1.0}
    common |= {"ignore_eos": True, "dtype": "float32", "batch_size": BATCH}
    path = [entry for entry in sys.path if entry.endswith("site-packages")]

    def measured(python: Path, **config: Any) -> dict[str, Any]:
        request = {"root": str(Path(__file__).parents[1]), "path": path, "config": common | config, "prompts": texts}
        (directory / "request.json").write_text(json.dumps(request))
        return work(python, Path(__file__).with_name("distill_engine.py"), directory / "request.json")

    found = {"hf": measured(Path(sys.executable), engine="hf", device="cpu"), "vllm": measured(python, engine="vllm")}
    options = ["--model", target, "--dtype", "float32", "--max-num-seqs", str(BATCH), "--max-model-len", str(CONTEXT)]
    with vllm_server(python, options) as port:
        served = {"endpoint": [f"http://127.0.0.1:{port}/v1"], "concurrency": BATCH}
        found["openai"] = measured(Path(sys.executable), engine="openai", **served)
    return found
