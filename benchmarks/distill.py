"""What making a distilled set costs: reading prompts, asking servers, and generating in this process.

    python benchmarks/distill.py --out FILE.json [--sections stream client hf --rows 200000 --answers 4000]

Each section runs in a process of its own, on the demo's target.

stream: a JSONL of `rows` short prompts through an engine that answers at once. Seconds until the first answer (the
    model's loading apart), rows per processor-second, the highest resident memory, and how long a second run takes that
    finds all but the last part made.
client: `answers` answers of one short server in another process; processor-seconds of the client per 1,000 answers,
    probes and files included. How many servers' worth of answers a core of the client can take follows from it.
hf: tokens per processor-second for `prompts` prompts of 10 to 300 tokens, temperature 1, EOS on, batches of 32: batches
    of like lengths (as `distill` makes them), batches in the order of the prompts, and transformers' `generate` on
    those with left padding. Three rounds in turn; medians. Answers of the first two are checked to be the same.

On a shared machine only the seconds of the processor say something; quote ratios of one run.
"""

import asyncio
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# This file has the name of the package that it measures; its own directory must not be searched for it.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from distill.config import DistillConfig  # noqa: E402
from distill.engines import ENGINES, Answer, AnswerRequest, Done  # noqa: E402
from distill.engines.hf import HFEngine  # noqa: E402
from distill.generate import distill  # noqa: E402
from draftsmith_core.io import write_json_atomic  # noqa: E402
from draftsmith_core.models import eos_ids, load_model  # noqa: E402
from draftsmith_core.options import parse  # noqa: E402
from draftsmith_core.sampling import row_seed  # noqa: E402
from draftsmith_core.tokenization import Tokenizer, load_tokenizer  # noqa: E402

TARGET = str(Path(__file__).parents[1] / "draftsmith" / "demo" / "pair" / "target")
TEXT = "If the lock is not owned by the thread that calls release, an error is raised and nothing else is done. "
ROUNDS, BATCH = 3, 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how much of it."""

    out: str
    sections: list[str] = field(default_factory=lambda: ["stream", "client", "hf"])
    rows: int = 200_000
    answers: int = 4000
    prompts: int = 200
    new_tokens: int = 48
    only: str = ""
    """Used by itself: measure this section and print it."""


class AtOnce:
    """An engine that answers with one token, at once."""

    keeps_answers = False
    max_prompt_tokens = None
    first_answer = 0.0

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        like = HFEngine(config, tokenizer)
        self.sampling, self.identity = like.sampling, like.identity
        AtOnce.loaded = time.monotonic()

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Answer everything."""
        for group in groups:
            AtOnce.first_answer = AtOnce.first_answer or time.monotonic()
            for request in group:
                done(request, Answer((7,), "length"))

    def score(self, request: AnswerRequest, response: Answer, k: int) -> Any:
        """Nothing."""
        raise NotImplementedError


def stream(options: Options, directory: Path) -> dict[str, Any]:
    """Prompts through the engine above, and again."""
    source, out = directory / "prompts.jsonl", directory / "set"
    with source.open("w") as file:
        for row in range(options.rows):
            file.write(json.dumps({"id": f"row-{row}", "prompt": f"{row} {TEXT}"}) + "\n")
    ENGINES["hf"] = AtOnce
    config = DistillConfig(target=TARGET, prompts=str(source), out=str(out), part_rows=4096, device="cpu")
    before = _megabytes()
    began = time.process_time()
    distill(config)
    spent, peak = time.process_time() - began, _megabytes()
    first_s = AtOnce.first_answer - AtOnce.loaded
    sorted(out.glob("part-*"))[-1].unlink()
    again = time.process_time()
    distill(config)
    return {
        "rows": options.rows,
        "first_answer_after_loading_s": first_s,
        "rows_per_cpu_s": options.rows / spent,
        "peak_memory_mb": peak,
        "memory_before_mb": before,
        "second_run_cpu_s": time.process_time() - again,
    }


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _serve(port: "multiprocessing.Queue[int]") -> None:
    """A server of nothing but answers: eight tokens for whatever is asked, another eight for another seed."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    reply: Any = {"data": [{"id": "target", "owned_by": "vllm"}]}
                else:
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    seed = json.loads(await reader.readexactly(length))["seed"]
                    choice = {"token_ids": [40 + seed % 50] * 8, "finish_reason": "length", "text": "x"}
                    reply = {"choices": [choice], "usage": {"total_tokens": 32}}
                body = json.dumps(reply).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def client(options: Options, directory: Path) -> dict[str, Any]:
    """Answers of the server above."""
    queue: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(queue,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{queue.get()}/v1"
    source = directory / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{row} {TEXT}"}) + "\n" for row in range(options.answers)))
    config = DistillConfig(
        target=TARGET,
        prompts=str(source),
        out=str(directory / "set"),
        engine="openai",
        endpoint=[url],
        max_new_tokens=8,
    )
    began, cpu = time.monotonic(), time.process_time()
    summary = distill(config)
    cpu, wall = time.process_time() - cpu, time.monotonic() - began
    server.kill()
    assert summary["rows"] == options.answers
    return {
        "answers": options.answers,
        "client_cpu_s_per_1000": 1000 * cpu / options.answers,
        "answers_per_s": options.answers / wall,
    }


def hf(options: Options, directory: Path) -> dict[str, Any]:
    """The three ways to generate in this process."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(TARGET)
    config = DistillConfig(
        target=TARGET, prompts="-", out="-", batch_size=BATCH, max_new_tokens=options.new_tokens, device="cpu"
    )
    engine = HFEngine(config, tokenizer)
    words = torch.tensor(tokenizer(TEXT * 40)["input_ids"])
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 301, (options.prompts,), generator=draws).tolist()
    starts = torch.randint(0, len(words) - 301, (options.prompts,), generator=draws).tolist()
    requests = [
        AnswerRequest((row, 0, 0), tuple(words[start : start + length].tolist()), row_seed(0, str(row)))
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    model = load_model(TARGET, device="cpu")
    ends = list(eos_ids(model))
    batches = [requests[start : start + BATCH] for start in range(0, len(requests), BATCH)]

    def ours(groups: list[list[AnswerRequest]]) -> dict[Any, tuple[int, ...]]:
        found: dict[Any, tuple[int, ...]] = {}

        def done(request: AnswerRequest, answer: Any) -> None:
            found[request.key] = answer.response_ids

        engine.run(iter(groups), done)
        return found

    def padded() -> dict[Any, tuple[int, ...]]:
        found: dict[Any, tuple[int, ...]] = {}
        torch.manual_seed(0)
        settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=options.new_tokens, eos_token_id=ends, pad_token_id=0
        )
        for batch in batches:
            longest = max(len(each.prompt_ids) for each in batch)
            ids = torch.tensor([[0] * (longest - len(each.prompt_ids)) + list(each.prompt_ids) for each in batch])
            mask = torch.tensor([[0] * (longest - len(each.prompt_ids)) + [1] * len(each.prompt_ids) for each in batch])
            made = model.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
            for each, row in zip(batch, made, strict=True):
                end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
                found[each.key] = tuple(row[:end])
        return found

    ways = {"like_lengths": lambda: ours([requests]), "file_order": lambda: ours(batches), "generate": padded}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.process_time()
            answers[name] = way()
            speeds[name].append(sum(map(len, answers[name].values())) / (time.process_time() - began))
    same = sum(answers["like_lengths"][key] == ids for key, ids in answers["file_order"].items())
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "prompts": options.prompts,
        "tokens_per_cpu_s": medians,
        "over_file_order": medians["like_lengths"] / medians["file_order"],
        "over_generate": medians["like_lengths"] / medians["generate"],
        "same_answers": f"{same} of {len(requests)}",
    }


SECTIONS = {"stream": stream, "client": client, "hf": hf}


def main() -> None:
    """Measure, write the JSON, print it."""
    options, _ = parse(Options, "benchmarks/distill.py", sys.argv[1:])
    if options.only:
        with tempfile.TemporaryDirectory() as directory:
            sys.stdout.write(json.dumps(SECTIONS[options.only](options, Path(directory))) + "\n")
        return
    results: dict[str, Any] = {"setting": {"options": asdict(options), "torch": torch.__version__}}
    for name in options.sections:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    write_json_atomic(Path(options.out), results)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
