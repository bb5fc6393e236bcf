"""What judging a step on the host saves over judging it on tensors (`draftsmith.decode.step`).

    python benchmarks/speed/judges.py [--target DIR --draft DIR] [--rounds 30]

Both judges decode the same prompts in turn, in an order that changes from round to round, and must
give the same tokens. Prints, by rows of a batch, tree and temperature, the median of the rounds'
ratios (tensors over host) and their quartiles, in processor seconds of one thread, which a busy
machine disturbs least. The host's judge stays as long as it saves 3 % of a real pair's time.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first.
    sys.path[0] = str(Path(__file__).parents[2])

import statistics
import time
from dataclasses import field
from unittest import mock

from draftsmith import load_pair
from draftsmith.core.command_line import parse
from draftsmith.core.options import options
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder
from draftsmith.decode.batch_run import BatchRun
from draftsmith.decode.propose.sources import proposer_of

# isort: split
import torch

ROOT = Path(__file__).parents[2]
PROMPTS = ("Return the", "Once upon a time there was a", "def main(", "The list of numbers")
# Without a draft the target draws on the host above temperature 0, too.
CASES = ((None, 0.0), (None, 1.0), ("chain:4", 0.0), ("kary:3,2", 0.0))


@options
class Asked:
    """What is timed."""

    target: str = str(ROOT / "draftsmith" / "demo" / "pair" / "target")
    draft: str = str(ROOT / "draftsmith" / "demo" / "pair" / "base")
    rounds: int = 30
    max_new_tokens: int = 64
    rows: list[int] = field(default_factory=[1, 4].copy)


def decoded(
    decoder: SpeculativeDecoder, prompts: list[list[int]], asked: Asked, temperature: float
) -> tuple[float, list[list[int]]]:
    """Processor seconds, and the outputs."""
    began = time.thread_time()
    batch = decoder.generate(
        prompts, Sampling(temperature=temperature), asked.max_new_tokens, seed=1, eos_ids=()
    )
    return time.thread_time() - began, [row.output_ids for row in batch.generations]


def ratios(
    decoder: SpeculativeDecoder, prompts: list[list[int]], asked: Asked, temperature: float
) -> list[float]:
    """Seconds of judging on tensors over those of judging on the host, by round."""
    found = []
    for number in range(asked.rounds + 1):
        seconds = {}
        outputs = []
        for on_host in (True, False) if number % 2 else (False, True):
            follows = BatchRun._follows if on_host else (lambda *_: False)
            with mock.patch.object(BatchRun, "_follows", follows):
                seconds[on_host], tokens = decoded(decoder, prompts, asked, temperature)
            outputs.append(tokens)
        if outputs[0] != outputs[1]:
            raise AssertionError("the judges give other tokens")
        found.append(seconds[False] / seconds[True])
    return found[1:]  # the first round warms up


def main() -> None:
    """Print a line for each case."""
    asked, _ = parse(Asked, "benchmarks/speed/judges.py", sys.argv[1:])
    torch.set_num_threads(1)
    pair = load_pair(asked.target, draft=asked.draft, device="cpu")
    prompts = [pair.tokenizer.encode(text) for text in PROMPTS]
    (draft,) = pair.drafts.values()
    for rows in asked.rows:
        for tree, temperature in CASES:
            proposer = None if tree is None else proposer_of(draft)
            decoder = SpeculativeDecoder(pair.target, proposer, tree)
            low, median, high = statistics.quantiles(
                ratios(decoder, prompts[:rows], asked, temperature), n=4
            )
            case = f"{rows} rows, {tree or 'no draft'}, T={temperature:g}"
            sys.stdout.write(f"{case}: {median:.3f} [{low:.3f}, {high:.3f}]\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
