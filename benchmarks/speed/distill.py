r"""What making a distilled set costs: reading prompts, asking servers, and generating in this
process.

    python benchmarks/speed/distill.py --out FILE.json \
        [--sections stream client hf hf_wide --rows 200000]
    python benchmarks/speed/distill.py --out FILE.json --sections stream --rows 10000000 \
        --rows_answered 1000000

Each section runs in a process of its own, on the demo's target but for engines and hf_wide.

stream: a JSONL of `rows` short prompts through an engine that answers at once. Seconds until the
    first answer (the model's loading apart), rows per processor-second, the resident memory at each
    tenth of the way and at its highest, and how long a second run takes that finds all but the last
    part made. `rows_answered` ends the run after so many of them, like Ctrl-C, and then only what
    holds until there is said.
client: `answers` answers of one short server in another process; processor-seconds of the client
    per 1,000 answers, probes and files included. How many servers' worth of answers a core of the
    client can take follows from it.
servers: `prompts` answers of two llama-servers with a thread each, and of a bare loop
    (benchmarks/speed/distill_servers.py). `overhead`: 1 - ours / bare in tokens per second, median
    of `rounds` pairs; by the clock, for a quiet machine only.
engines: tokens and rows per second of `hf` (batches of 32), of `vllm` in process and of `openai`
    before vLLM's server (32 requests at a time), loading apart. `prompts` prompts of `chats` a
    round, in turn, temperature 1, to `target`; without these, random words to the demo's target
    widened to the cost of a 99 M model.
hf: tokens per processor-second for `prompts` prompts of 10 to 300 tokens, temperature 1, EOS on,
    batches of 32: batches that are refilled (as `distill` makes them), batches of like lengths that
    run to their end, the same in the order of the prompts, and transformers' `generate` on those
    with left padding. Medians of `rounds` rounds in turn. Answers of the first three are checked to
    be the same. `busy`: which share of the rows of a refilled batch is at work while a prompt
    waits.
hf_wide: the same on the demo's target widened to the cost of a 99 M model
    (`draftsmith.demo.widen`), with `wide_prompts` prompts of 4 to 24 tokens.

On a shared machine only the seconds of the processor say something; quote ratios of one run.
"""

import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

# This file has the name of the package that it measures; its own directory must not be searched for
# it.
ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent),
]

import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from benchmarks.speed.decode import TARGET_SHAPE  # noqa: E402
from draftsmith.core.command_line import parse  # noqa: E402
from draftsmith.core.io import write_json_atomic  # noqa: E402
from draftsmith.core.models import eos_ids, load_model  # noqa: E402
from draftsmith.core.prompts import read_prompts  # noqa: E402
from draftsmith.core.sampling import Sampling, generator, row_seed  # noqa: E402
from draftsmith.core.tokenization import Tokenizer, encode_text, load_tokenizer  # noqa: E402
from draftsmith.decode import SpeculativeDecoder  # noqa: E402
from draftsmith.decode.batch_run import BatchRun  # noqa: E402
from draftsmith.demo.widen import widen  # noqa: E402
from draftsmith.distill.config import DistillConfig  # noqa: E402
from draftsmith.distill.engines import ENGINES, Answer, AnswerRequest, Done, Key  # noqa: E402
from draftsmith.distill.engines.hf import HFEngine  # noqa: E402
from draftsmith.distill.generate import distill  # noqa: E402

TARGET = str(ROOT / "draftsmith" / "demo" / "pair" / "target")
TEXT = (
    "If the lock is not owned by the thread that calls release, an error is raised and "
    "nothing else is done. "
)
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how much of it."""

    out: str
    sections: list[str] = field(default_factory=lambda: ["stream", "client", "hf", "hf_wide"])
    rows: int = 200_000
    rows_answered: int = 0
    """stream: stop after so many rows; 0 goes on to the end."""
    answers: int = 4000
    prompts: int = 400
    wide_prompts: int = 96
    new_tokens: int = 48
    rounds: int = 3
    target: str = ""
    """engines: the target; with `chats`."""
    chats: str = ""
    """engines: a file of prompts."""
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    """engines: one after another."""
    only: str = ""
    """Used by itself: measure this section and print it."""


class AtOnce:
    """An engine that answers with one token, at once."""

    max_prompt_tokens = wave = None
    first_answer = 0.0
    answered = 0
    stop_at = 0
    # (rows answered, MB held) about ten times on the way.
    held: ClassVar[list[tuple[int, float]]] = []

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
            before, AtOnce.answered = AtOnce.answered, AtOnce.answered + len(group)
            if before * 10 // AtOnce.stop_at < AtOnce.answered * 10 // AtOnce.stop_at:
                AtOnce.held.append((AtOnce.answered, _held_megabytes()))
            if AtOnce.answered >= AtOnce.stop_at:
                raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing."""


def stream(options: Options, directory: Path) -> dict[str, Any]:
    """Prompts through the engine above, and again."""
    source, out = directory / "prompts.jsonl", directory / "set"
    with source.open("w") as file:
        for row in range(options.rows):
            file.write(json.dumps({"id": f"row-{row}", "prompt": f"{row} {TEXT}"}) + "\n")
    ENGINES["hf"] = AtOnce
    config = DistillConfig(
        target=TARGET, prompts=str(source), out=str(out), part_rows=4096, device="cpu"
    )
    AtOnce.stop_at = options.rows_answered or options.rows + 1
    before = _megabytes()
    began = time.process_time()
    try:
        distill(config)
    except KeyboardInterrupt:
        assert options.rows_answered
    found = {
        "rows": options.rows,
        "rows_answered": AtOnce.answered,
        "first_answer_after_loading_s": AtOnce.first_answer - AtOnce.loaded,
        "rows_per_cpu_s": AtOnce.answered / (time.process_time() - began),
        "peak_memory_mb": _megabytes(),
        "memory_before_mb": before,
        "memory_on_the_way_mb": AtOnce.held,
    }
    if options.rows_answered:
        return found
    sorted(out.glob("part-*"))[-1].unlink()
    AtOnce.answered = 0
    again = time.process_time()
    distill(config)
    return found | {"second_run_cpu_s": time.process_time() - again}


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _held_megabytes() -> float:
    """What the process holds now, not what it held at most."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _serve(port: "multiprocessing.Queue[int]") -> None:
    """A server of nothing but answers: eight tokens for whatever is asked, another eight for
    another seed.
    """

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    reply: Any = {"data": [{"id": "target", "owned_by": "vllm"}]}
                else:
                    length = int(head.lower().partition(b"content-length:")[2].split()[0])
                    seed = json.loads(await reader.readexactly(length))["seed"]
                    choice = {
                        "token_ids": [40 + seed % 50] * 8,
                        "finish_reason": "length",
                        "text": "x",
                    }
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
    source.write_text(
        "".join(json.dumps({"prompt": f"{row} {TEXT}"}) + "\n" for row in range(options.answers))
    )
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
    """The four ways to generate in this process."""
    return _ways(TARGET, options.prompts, (10, 300), options)


def hf_wide(options: Options, directory: Path) -> dict[str, Any]:
    """The same on a model whose products are what costs."""
    return _ways(
        _wide(TARGET, directory / "target", TARGET_SHAPE), options.wide_prompts, (4, 24), options
    )


def _ways(target: str, prompts: int, bounds: tuple[int, int], options: Options) -> dict[str, Any]:
    torch.set_num_threads(1)
    new_tokens = options.new_tokens
    tokenizer = load_tokenizer(target)
    config = DistillConfig(
        target=target,
        prompts="-",
        out="-",
        batch_size=BATCH,
        max_new_tokens=new_tokens,
        temperature=1.0,
        device="cpu",
    )
    engine = HFEngine(config, tokenizer)
    words = torch.tensor(tokenizer(TEXT * 40)["input_ids"])
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(bounds[0], bounds[1] + 1, (prompts,), generator=draws).tolist()
    starts = torch.randint(0, len(words) - bounds[1] - 1, (prompts,), generator=draws).tolist()
    requests = [
        AnswerRequest(
            Key(row, 0, 0), tuple(words[start : start + length].tolist()), row_seed(0, str(row))
        )
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    model = load_model(target, device="cpu")
    decoder, ends = SpeculativeDecoder(load_model(target, device="cpu")), list(eos_ids(model))

    def cut(order: list[AnswerRequest]) -> list[list[AnswerRequest]]:
        return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]

    def refilled() -> dict[Any, tuple[int, ...]]:
        found: dict[Any, tuple[int, ...]] = {}

        def done(request: AnswerRequest, answer: Any) -> None:
            found[request.key] = answer.response_ids

        engine.run(iter([requests]), done)
        return found

    def to_the_end(batches: list[list[AnswerRequest]]) -> dict[Any, tuple[int, ...]]:
        found: dict[Any, tuple[int, ...]] = {}
        for batch in batches:
            ids = [each.prompt_ids for each in batch]
            made = decoder.generate(
                ids, Sampling(), new_tokens, [generator(each.seed) for each in batch], ends
            )
            found |= {
                r.key: tuple(g.output_ids) for r, g in zip(batch, made.generations, strict=True)
            }
        return found

    def padded() -> dict[Any, tuple[int, ...]]:
        found: dict[Any, tuple[int, ...]] = {}
        torch.manual_seed(0)
        settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=new_tokens, eos_token_id=ends, pad_token_id=0
        )
        for batch in cut(requests):
            longest = max(len(each.prompt_ids) for each in batch)
            ids = torch.tensor(
                [[0] * (longest - len(each.prompt_ids)) + list(each.prompt_ids) for each in batch]
            )
            mask = torch.tensor(
                [
                    [0] * (longest - len(each.prompt_ids)) + [1] * len(each.prompt_ids)
                    for each in batch
                ]
            )
            made = model.generate(ids, attention_mask=mask, generation_config=settings)[
                :, longest:
            ].tolist()
            for each, row in zip(batch, made, strict=True):
                end = next(
                    (place + 1 for place, token in enumerate(row) if token in ends), len(row)
                )
                found[each.key] = tuple(row[:end])
        return found

    ways = {
        "refilled": refilled,
        "like_lengths": lambda: to_the_end(
            cut(sorted(requests, key=lambda each: len(each.prompt_ids)))
        ),
        "file_order": lambda: to_the_end(cut(requests)),
        "generate": padded,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            began = time.process_time()
            answers[name] = way()
            speeds[name].append(
                sum(map(len, answers[name].values())) / (time.process_time() - began)
            )
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "prompts": prompts,
        "tokens_per_cpu_s": medians,
        **{
            f"over_{name}": medians["refilled"] / medians[name]
            for name in ways
            if name != "refilled"
        },
        "busy": _busy(refilled, prompts),
        "same_answers": [
            f"{sum(answers['refilled'][key] == ids for key, ids in answers[name].items())} of "
            f"{prompts}"
            for name in ("like_lengths", "file_order")
        ],
    }


def _busy(way: Callable[[], Any], prompts: int) -> float | None:
    """Share of the rows of a batch that are at work, over all steps before the last prompt has
    joined; None where all are in the first batch.
    """
    live: list[tuple[int, int]] = []
    begun, step, join = [0], BatchRun.step, BatchRun.__init__

    def counted(run: BatchRun) -> Any:
        live.append((begun[0], len(run.batch)))
        return step(run)

    def counting(
        run: BatchRun, parts: Any, runner: Any, options: Any, asked: Sequence[Any], *rest: Any
    ) -> None:
        begun[0] += len(asked)
        join(run, parts, runner, options, asked, *rest)

    BatchRun.step, BatchRun.__init__ = counted, counting  # type: ignore[method-assign]
    try:
        way()
    finally:
        BatchRun.step, BatchRun.__init__ = step, join  # type: ignore[method-assign]
    rows = [count for before, count in live if before < prompts]
    return sum(rows) / (BATCH * len(rows)) if rows else None


def _wide(model: str, out: Path, shape: dict[str, int]) -> str:
    widen(load_model(model, device="cpu"), **shape).save_pretrained(out)  # type: ignore[arg-type]
    load_tokenizer(model).save_pretrained(out)
    return str(out)


def servers(options: Options, directory: Path) -> dict[str, Any]:
    """Two llama-servers, and what the client takes from them."""
    from benchmarks.speed.distill_servers import servers as measured

    return measured(TARGET, TEXT, options.prompts, options.new_tokens, options.rounds, directory)


def engines(options: Options, directory: Path) -> dict[str, Any]:
    """hf, vLLM in process, and vLLM served."""
    from benchmarks.speed.distill_servers import engines as measured

    target, count = (
        options.target or _wide(TARGET, directory / "target", TARGET_SHAPE),
        options.prompts,
    )
    tokenizer, draw = load_tokenizer(target), random.Random(0)
    if options.chats:
        read = islice(read_prompts(options.chats, tokenizer).prompts, options.rounds * count)
        ids = [list(prompt.ids) for prompt in read]
    else:
        texts = (
            " ".join(draw.choices(TEXT.split(), k=draw.randint(4, 40)))
            for _ in range(options.rounds * count)
        )
        ids = [encode_text(tokenizer, text) for text in texts]
    rounds = [ids[start : start + count] for start in range(0, len(ids), count)]
    return measured(target, rounds, options.new_tokens, options.dtypes, directory)


SECTIONS = {
    "servers": servers,
    "engines": engines,
    "stream": stream,
    "client": client,
    "hf": hf,
    "hf_wide": hf_wide,
}


def main() -> None:
    """Measure, write the JSON, print it."""
    options, _ = parse(Options, "benchmarks/speed/distill.py", sys.argv[1:])
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
