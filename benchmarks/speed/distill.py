"""Rates of the engines that make a distilled set.

    python benchmarks/speed/distill.py --out FILE.json [--target DIR --chats PROMPTS]

Tokens and rows per second of `hf` (batches of 32), of `vllm` in process and of `openai` before
vLLM's server (32 requests at a time), loading apart. `prompts` prompts of `chats` a round, in turn,
temperature 1, to `target`; without these, random words to the demo's target widened to the cost of
a 99 M model. Quote ratios of one run.
"""

import json
import random
import sys
import tempfile
from dataclasses import asdict, field
from itertools import islice
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import torch  # noqa: E402

from benchmarks.lib.places import TARGET  # noqa: E402
from benchmarks.speed import distill_engines  # noqa: E402
from benchmarks.speed.decode import TARGET_SHAPE  # noqa: E402
from draftsmith.core.command_line import parse  # noqa: E402
from draftsmith.core.io import write_json_atomic  # noqa: E402
from draftsmith.core.models import load_model  # noqa: E402
from draftsmith.core.options import options  # noqa: E402
from draftsmith.core.prompts import read_prompts  # noqa: E402
from draftsmith.core.tokenization import Tokenizer, encode_text, load_tokenizer  # noqa: E402
from draftsmith.demo.widen import widen  # noqa: E402

TEXT = (
    "If the lock is not owned by the thread that calls release, an error is raised and "
    "nothing else is done. "
)


@options
class Options:
    """What to measure, and how much of it."""

    out: str
    prompts: int = 400
    new_tokens: int = 48
    rounds: int = 3
    target: str = ""
    """The target; with `chats`."""
    chats: str = ""
    """A file of prompts."""
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    """One after another."""


def widened(directory: Path) -> str:
    """The demo's target at the cost of a 99 M model."""
    target = load_model(str(TARGET), device="cpu")
    wide = widen(target, **TARGET_SHAPE)  # type: ignore[arg-type]
    wide.save_pretrained(directory)
    load_tokenizer(str(TARGET)).save_pretrained(directory)
    return str(directory)


def engines(options: Options, directory: Path) -> dict[str, object]:
    """hf, vLLM in process, and vLLM served."""
    target = options.target or widened(directory / "target")
    size = options.prompts
    ids = prompts(options, load_tokenizer(target), options.rounds * size)
    rounds = [ids[start : start + size] for start in range(0, len(ids), size)]
    return distill_engines.engines(target, rounds, options.new_tokens, options.dtypes, directory)


def prompts(options: Options, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Prompts of `chats`, or 4 to 40 random words each."""
    if options.chats:
        read = read_prompts(options.chats, tokenizer).prompts
        return [list(prompt.ids) for prompt in islice(read, count)]
    draw = random.Random(0)
    words = TEXT.split()
    found = []
    for _ in range(count):
        chosen = draw.choices(words, k=draw.randint(4, 40))
        found.append(encode_text(tokenizer, " ".join(chosen)))
    return found


def main() -> None:
    """Measure, write the JSON, print it."""
    options, _ = parse(Options, "benchmarks/speed/distill.py", sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        rates = engines(options, Path(directory))
    setting = {"options": asdict(options), "torch": torch.__version__}
    results = {"setting": setting, "engines": rates}
    write_json_atomic(Path(options.out), results)
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
