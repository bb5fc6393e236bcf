r"""Does `--tree auto` ever lose? One pair beside the target alone and fixed trees, text by text.

    python benchmarks/speed/never_loses.py --name head --target DIR --draft DIR --dtype bfloat16 \
        --out cells.json [--seconds 270] [--proposer prompt_lookup] [--padded true]

Every round decodes a text in all ways in turn, with a seed of its own. Round 0 warms up, and at
temperature 0 `auto` learns from it. A cell (pair, temperature, text) that is in FILE is not timed
again: call it until nothing is left.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import json
import time
from dataclasses import field, replace
from statistics import median

from transformers import LlamaForCausalLM

from benchmarks.speed.decode import TARGET_SHAPE
from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, write_text_atomic
from draftsmith.core.options import options
from draftsmith.core.sampling import Sampling
from draftsmith.decode import DecodeStats, SpeculativeDecoder
from draftsmith.demo.widen import widen
from draftsmith.drafts.load import load_models
from draftsmith.pair import Pair

TREES = "chain:1 chain:2 chain:4 chain:8 kary:2 kary:4 kary:3,2 kary:4,2,2".split()
SHIFT = """def shift(points, dx, dy):
    moved = []
    for x, y in points:
        moved.append((x + dx, y + dy))
    return moved
"""
# What is asked, and what a target without a chat template goes on with.
TEXTS = {
    "chat": (
        "I have a free weekend and a small garden. What should I plant, and in which order?",
        "Dear Anna,\n\nthank you for asking how the garden is doing. This year we began with",
    ),
    "maths": (
        "A tank holds 240 litres. One tap fills 8 litres a minute, a leak loses 3. It is a "
        "quarter full. After how many minutes is it full? Go step by step.",
        "The sum of the first n odd numbers is n squared. To see this, take n = 1, where the",
    ),
    "code": (
        "Write a Python class for a queue with a largest size, with docstrings and tests.",
        SHIFT + "\n\ndef scale(points, factor):\n",
    ),
    "prose": (
        "Tell a story of a lighthouse keeper who finds a letter on the beach.",
        "The keeper came down the stairs at dawn. On the beach lay a bottle, and in it a letter",
    ),
    "copy": (
        f"Write this again, and again below it with other names:\n\n{SHIFT}",
        SHIFT + "\n" + SHIFT + "\n",
    ),
}


@options
class Options:
    """Time a pair in all ways."""

    name: str
    target: str
    out: str
    draft: str | None = None
    proposer: str | None = None
    padded: bool = False
    """Pad the target to the cost of 99 M parameters."""
    dtype: str = "bfloat16"
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    trees: list[str] = field(default_factory=TREES.copy)
    rounds: int = 9
    tokens: int = 48
    seconds: float = 270.0
    """Begin no cell that would end later, if it takes as long as the longest so far."""


def load(asked: Options) -> Pair:
    """The pair, with the target padded where that is asked."""
    loaded = load_models(asked.target, [asked.draft] if asked.draft else [], dtype=asked.dtype)
    if asked.padded:
        assert isinstance(loaded.target, LlamaForCausalLM)
        loaded = replace(loaded, target=widen(loaded.target, **TARGET_SHAPE))
    return Pair(loaded)


def ways(pair: Pair, asked: Options) -> dict[str, SpeculativeDecoder]:
    """A decoder by column: the target alone, `auto`, and every tree that the pair takes."""
    decoders = {"none": pair.decoding(proposer="none").decoder}
    for tree in ["auto", *asked.trees]:
        try:
            decoders[tree] = pair.decoding(proposer=asked.proposer, tree=tree).decoder
        except InputError as error:
            sys.stderr.write(f"{tree}: {error}\n")
    return decoders


def time_cell(
    decoders: dict[str, SpeculativeDecoder], ids: list[int], sampling: Sampling, asked: Options
) -> JsonObject:
    """Tokens per second and per call by column, and the steps that `auto` chose."""
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    stats = {name: DecodeStats() for name in decoders}
    names = list(decoders)
    for turn in range(asked.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            batch = decoders[name].generate([ids], sampling, asked.tokens, eos_ids=(), seed=turn)
            (output,) = batch.generations
            if turn:  # the first warms up
                rates[name].append(len(output.output_ids) / batch.decode_s)
                stats[name] += output.stats
    return {
        "tokens_per_s": rates,
        "tokens_per_call": {name: counts.tau for name, counts in stats.items()},
        "chosen": stats["auto"].chosen,
    }


def over(cell: JsonObject, name: str, base: str) -> float:
    """The median over the rounds of one column over another."""
    rates = cell["tokens_per_s"]
    return median(ours / theirs for ours, theirs in zip(rates[name], rates[base], strict=True))


def line_of(key: str, cell: JsonObject) -> str:
    """A cell in words."""
    fixed = [name for name in cell["tokens_per_s"] if name != "auto"]
    best = max(fixed, key=lambda name: over(cell, name, "none"))
    gain = over(cell, "auto", "none")
    chosen = sorted(cell["chosen"].items(), key=lambda item: -item[1])[:3]
    return (
        f"{key:32s} auto {gain:.2f}, {gain / over(cell, best, 'none'):.2f} of the best: {best} "
        f"{over(cell, best, 'none'):.2f}; {chosen}"
    )


def main() -> None:
    """Time the cells that are missing while there is time; print all."""
    asked, _ = parse(Options, "never_loses", sys.argv[1:])
    began = time.monotonic()
    file = Path(asked.out)
    cells: JsonObject = json.loads(file.read_text()) if file.exists() else {}
    pair = load(asked)
    decoders = ways(pair, asked)
    left = 0
    longest = 0.0
    for temperature in asked.temperatures:
        for text in asked.texts:
            key = f"{asked.name} T={temperature:g} {text}"
            now = time.monotonic()
            if key not in cells and now - began + longest < asked.seconds:
                chat, plain = TEXTS[text]
                has_chat = pair.tokenizer.chat_template is not None
                ids = pair.encode(chat if has_chat else plain)
                cells[key] = time_cell(decoders, ids, Sampling(temperature=temperature), asked)
                write_text_atomic(file, json.dumps(cells) + "\n")
                longest = max(longest, time.monotonic() - now)
            left += key not in cells
    for key, cell in cells.items():
        if key.startswith(f"{asked.name} "):
            sys.stdout.write(line_of(key, cell) + "\n")
    sys.stdout.write(f"{left} cells left\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
