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
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

# This file has the name of the package that it measures; its own directory must not be searched for
# it.
ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent),
]

import torch  # noqa: E402

from benchmarks.speed import distill_engines  # noqa: E402
from benchmarks.speed.decode import TARGET_SHAPE  # noqa: E402
from draftsmith.core.command_line import parse  # noqa: E402
from draftsmith.core.io import write_json_atomic  # noqa: E402
from draftsmith.core.models import load_model  # noqa: E402
from draftsmith.core.prompts import read_prompts  # noqa: E402
from draftsmith.core.tokenization import Tokenizer, encode_text, load_tokenizer  # noqa: E402
from draftsmith.demo.widen import widen  # noqa: E402

TARGET = str(ROOT / "draftsmith" / "demo" / "pair" / "target")
TEXT = (
    "If the lock is not owned by the thread that calls release, an error is raised and "
    "nothing else is done. "
)


@dataclass(frozen=True, kw_only=True)
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
    wide = widen(load_model(TARGET, device="cpu"), **TARGET_SHAPE)  # type: ignore[arg-type]
    wide.save_pretrained(directory)
    load_tokenizer(TARGET).save_pretrained(directory)
    return str(directory)


def engines(options: Options, directory: Path) -> dict[str, object]:
    """hf, vLLM in process, and vLLM served."""
    target = options.target or widened(directory / "target")
    ids = prompts(options, load_tokenizer(target), options.rounds * options.prompts)
    rounds = [ids[start : start + options.prompts] for start in range(0, len(ids), options.prompts)]
    return distill_engines.engines(target, rounds, options.new_tokens, options.dtypes, directory)


def prompts(options: Options, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Prompts of `chats`, or 4 to 40 random words each."""
    if options.chats:
        read = read_prompts(options.chats, tokenizer).prompts
        return [list(prompt.ids) for prompt in islice(read, count)]
    draw = random.Random(0)
    words = TEXT.split()
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 40))) for _ in range(count)]
    return [encode_text(tokenizer, text) for text in texts]


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
