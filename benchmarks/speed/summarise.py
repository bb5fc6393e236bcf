"""How long, and in how much memory, counts of a large evaluation become figures and results.json.

    python -m benchmarks.speed.summarise

The counts are made up: 3 drafts, 4 sets, 2 temperatures and 1,000 prompts a set, with every key
that `draftsmith eval` measures with its default tree.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from draftsmith.decode.method import Method
from draftsmith.eval.counts import TARGET, Count, Tally, Where, at_depths, decoded, packed
from draftsmith.eval.figures import estimate, rows_as_json
from draftsmith.eval.parts import CONTEXT, PLACE, confidence_names, part_names
from draftsmith.eval.predict import chains
from draftsmith.eval.results import Results

SETS = {"prose": "id", "maths": "ood", "code": "ood", "chat": "ood"}
CHAIN = Method.of("chain:4", "speculative")
TIMED = 8


def of_acceptance(rng: np.random.Generator, prompts: int) -> Iterator[Count]:
    """Counts of one draft on the target's texts."""

    def drawn(most: float) -> list[float]:
        # Sums of fp32 shares, as they are measured.
        values: list[float] = rng.uniform(0, most, prompts).astype(np.float32).tolist()
        return values

    positions = [64] * prompts
    for key in ("alpha", "greedy", "match", "missing"):
        yield Count(key, drawn(64))
    yield Count("positions", positions)
    for part in (*part_names(PLACE), *part_names(CONTEXT)):
        yield Count("alpha", drawn(8), part=part)
        yield Count("positions", rng.integers(0, 16, prompts).tolist(), part=part)
    for part in confidence_names():
        for key in ("drafted_mass", "sure", "taken"):
            yield Count(key, drawn(8), part=part)
    for method in chains(greedy=False):
        yield decoded(method, "expected_tokens", positions)
        yield decoded(method, "expected_calls", rng.uniform(20, 64, prompts).tolist())
    yield decoded(CHAIN, "calls_variance", rng.uniform(0, 9, prompts).tolist())
    reached = rng.uniform(0, 30, (prompts, 4)).tolist()
    yield from at_depths(CHAIN, "expected_accepted", reached)
    yield from at_depths(CHAIN, "expected_reached", reached)


def of_decoding(rng: np.random.Generator, prompts: int) -> Iterator[Count]:
    """Counts of decoding with one draft, and the timings of its first prompts."""
    calls = rng.integers(20, 40, prompts)
    for key in ("calls", "proposed", "accepted", "offered_depth", "refused"):
        yield decoded(CHAIN, key, calls.tolist())
    yield decoded(CHAIN, "emitted", [64] * prompts)
    reached = rng.integers(0, 30, (prompts, 4)).tolist()
    yield from at_depths(CHAIN, "accepted_here", reached)
    yield from at_depths(CHAIN, "reached", reached)
    for key in ("timed_tokens", "timed_calls", "decode_s", "whole_s"):
        yield decoded(CHAIN, key, rng.uniform(1, 2, TIMED).tolist())


def made_up(prompts: int) -> Tally:
    """The counts of an evaluation."""
    rng = np.random.default_rng(0)
    tally = Tally()
    first = 0
    for name, kind in SETS.items():
        groups = range(first, first + prompts)
        first += prompts
        for temperature in (0.0, 1.0):
            alone = Where(TARGET, 1, name, kind, temperature)
            for key in ("timed_tokens", "timed_calls", "decode_s", "whole_s"):
                tally.append(alone, key, groups, rng.uniform(1, 2, TIMED))
            for draft in ("base", "jsd", "kl"):
                where = Where(draft, 1, name, kind, temperature)
                tally.extend(where, groups, of_acceptance(rng, prompts))
                tally.extend(where, groups, of_decoding(rng, prompts))
    return tally


def main() -> None:
    """Print seconds, memory and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    tally = made_up(parser.parse_args().prompts)
    begun = time.perf_counter()
    worked = time.process_time()
    table = tally.table()
    rows = estimate(table, base="base", most_tokens={CHAIN.tree: CHAIN.most_tokens})
    document = {"rows": rows_as_json(rows), "counts": packed(table)}
    with TemporaryDirectory() as directory:
        Results(document, Path(directory)).write()
        size = Path(directory, "results.json").stat().st_size
    found = {
        "counts": len(table),
        "figures": len(rows),
        "seconds": round(time.perf_counter() - begun, 2),
        "of_processors": round(time.process_time() - worked, 2),
        "peak_GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "results_MB": round(size / 1e6, 1),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
