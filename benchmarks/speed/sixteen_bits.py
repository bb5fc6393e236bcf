"""What weights in 16 and 4 bits bring: same models, prompts and process, matrices packed in 16 bits
and in fp32 or nf4.

Legend: `fp32` is what this engine does with a checkpoint that 16 bits do not hold: the same kernel
on fp32 weights.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from unittest import mock

import torch
from transformers import PreTrainedModel

from benchmarks.lib.engines import last_json
from benchmarks.lib.places import ROOT
from benchmarks.lib.timing import (
    bandwidth,
    by_name_and_rows,
    bytes_per_token,
    medians_s,
    rotated,
    runner_forwards,
)
from benchmarks.speed.methods import Pair, build, endless
from benchmarks.speed.sections import Bench
from draftsmith.core.io import JsonObject
from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder, take_over
from draftsmith.decode.packed_weights import packs_of
from draftsmith.decode.runner import Runner
from draftsmith.decode.supported_models import ability

ROWS = (1, 2, 5, 9, 17, 29)
REPEATS = 25


def packing(kept: str) -> AbstractContextManager[object]:
    """While this lasts, matrices that are kept in fp32 are packed so whatever their values."""
    if kept != "fp32":
        return nullcontext()
    return mock.patch("draftsmith.decode.native.narrowest", lambda weight_OI: weight_OI)


def sixteen_bits(bench: Bench, names: Sequence[str], rounds: int) -> JsonObject:
    """Forwards by number of rows, tokens per second, and resident memory, each in 16 bits over
    fp32.
    """
    pairs = {"sixteen": bench.pair, "fp32": copy.deepcopy(bench.apart)}
    for kept, pair in pairs.items():
        for model in (pair.target, pair.draft):
            with packing(kept):
                take_over(model)
                Runner(model, ability(model).windows, None, packs_of(model))  # packs
    found: JsonObject = {"forwards": _forwards(pairs, bench)}
    speeds, outputs, read = _speeds(pairs, bench, names, rounds)
    found["methods"] = {name: _compared(name, speeds, outputs) for name in names}
    found["bandwidth_GB_per_s"] = [each / 1e9 for each in read]
    for kept, pair in pairs.items():
        weights = bytes_per_token(pair.target)
        found[f"{kept}_MB_per_token"] = weights / 1e6
        shares = [weights * ratio for ratio in _ratios(speeds["ar", kept], read)]
        found[f"{kept}_ar_share_of_memory_limit"] = statistics.median(shares)
    with tempfile.TemporaryDirectory() as directory:
        # As checkpoints are: an fp32 file would stay mapped into memory after the weights were
        # packed from it.
        narrow = {matrix.dtype for matrix in _matrices(bench.pair.target)}
        dtype = torch.float16 if torch.float16 in narrow else torch.bfloat16
        rounded = copy.deepcopy(bench.apart.target)
        torch.nn.Module.to(rounded, dtype=dtype)
        rounded.save_pretrained(directory)
        memory = {kept: _resident(directory, kept) for kept in pairs}
    found["resident_MB"] = memory
    added = {kept: each["decoding"] - each["before"] for kept, each in memory.items()}
    found["resident_over_fp32"] = {
        "process": memory["sixteen"]["decoding"] / memory["fp32"]["decoding"],
        "model": added["sixteen"] / added["fp32"],
    }
    return found


def four_bits(bench: Bench, rounds: int) -> JsonObject:
    """The same target rounded to nf4 by bitsandbytes beside 16 bits; another model, so that its
    outputs differ.
    """
    if find_spec("bitsandbytes") is None:
        return {"skipped": "bitsandbytes is not installed"}
    with tempfile.TemporaryDirectory() as directory:
        whole = copy.deepcopy(bench.apart.target)
        whole.save_pretrained(directory)
        rounded = endless(load_model(directory, device="cpu", dtype="float32", quantize="nf4"))
    pairs = {"nf4": Pair(rounded, bench.pair.draft), "sixteen": bench.pair}
    found: JsonObject = {"forwards": _forwards(pairs, bench)}
    speeds, _, read = _speeds(pairs, bench, ["ar"], rounds)
    found["ar"] = {kept: statistics.median(speeds["ar", kept]) for kept in pairs}
    ratios = _ratios(speeds["ar", "nf4"], speeds["ar", "sixteen"])
    found["ar"]["nf4_over_sixteen"] = statistics.median(ratios)
    found["bandwidth_GB_per_s"] = [each / 1e9 for each in read]
    for kept, pair in pairs.items():
        take_over(pair.target)
        packs = packs_of(pair.target)
        Runner(pair.target, ability(pair.target).windows, None, packs)  # packs
        found[f"{kept}_MB_per_token"] = bytes_per_token(pair.target) / 1e6
    return found


def _forwards(pairs: dict[str, Pair], bench: Bench) -> JsonObject:
    context = bench.text[:128]
    made = {kept: runner_forwards(pair.target, context, ROWS) for kept, pair in pairs.items()}
    times_s = medians_s(by_name_and_rows(made), bench.pair.target.device, REPEATS)
    found: JsonObject = {}
    for rows in ROWS:
        ms = {f"{kept}_ms": 1e3 * times_s[kept, rows] for kept in made}
        over = {f"{kept}_over_one_row": times_s[kept, rows] / times_s[kept, 1] for kept in made}
        found[str(rows)] = ms | over
    return found


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """By round."""
    return [a / b for a, b in zip(above, below, strict=True)]


Speeds = dict[tuple[str, str], list[float]]
Outputs = dict[tuple[str, str], list[list[int]]]


def _compared(name: str, speeds: Speeds, outputs: Outputs) -> JsonObject:
    """Greedy tokens per second of a method; the gain is the median over rounds of the ratio within
    a round.
    """
    sixteen = speeds[name, "sixteen"]
    fp32 = speeds[name, "fp32"]
    return {
        "sixteen": statistics.median(sixteen),
        "fp32": statistics.median(fp32),
        "gain": statistics.median(_ratios(sixteen, fp32)),
        "outputs_equal": outputs[name, "sixteen"] == outputs[name, "fp32"],
    }


def _speeds(
    pairs: dict[str, Pair], bench: Bench, names: Sequence[str], rounds: int
) -> tuple[Speeds, Outputs, list[float]]:
    """By method and pair: tokens per second of every round, in turn within it, and the outputs; and
    the bandwidth of every round.
    """
    made = {
        (name, kept): build(name, pairs[kept], 0.0, bench.max_new_tokens)
        for name, kept in product(names, pairs)
    }
    device = bench.pair.target.device
    speeds: Speeds = {key: [] for key in made}
    outputs: Outputs = {key: [] for key in made}
    read: list[float] = []
    for turn, share in enumerate([bench.prompts[:1], *bench.rounds(rounds)], start=-1):
        seconds = dict.fromkeys(made, 0.0)
        before = bandwidth(device)
        for place, prompt in enumerate(share):
            for key in rotated(list(made), turn * len(share) + place):
                took_s, out = _timed(partial(made[key].decode, [prompt], turn))
                seconds[key] += took_s
                if turn >= 0:
                    outputs[key] += out
        if turn >= 0:
            read.append((before + bandwidth(device)) / 2)
            for key in made:
                speeds[key].append(len(share) * bench.max_new_tokens / seconds[key])
    return speeds, outputs, read


def _timed(call: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    out = call()
    return time.perf_counter() - started, out


def _matrices(model: PreTrainedModel) -> list[torch.Tensor]:
    return [
        place.matrix.values
        for module in model.modules()
        if (place := getattr(module, "place", None)) is not None
    ]


def _resident(target: str, kept: str) -> dict[str, float]:
    """Resident memory of a process of its own, in MB: before it loads the model, and while it
    decodes.
    """
    command = [
        sys.executable,
        "-c",
        f"from benchmarks.speed.sixteen_bits import report; report({target!r}, {kept!r})",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        check=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return last_json(done.stdout)


def report(target: str, kept: str) -> None:
    """Print the JSON of `_resident`; to be run in a process of its own."""
    torch.zeros(8, 8) @ torch.zeros(8, 8)
    before = _resident_mb()
    model = load_model(target, device="cpu", dtype="float32")
    take_over(model)
    with packing(kept):
        SpeculativeDecoder(model).generate([[1] * 16], Sampling(temperature=0.0), 8, eos_ids=())
    found = {"before": before, "decoding": _resident_mb()}
    sys.stdout.write(json.dumps(found) + "\n")


def _resident_mb() -> float:
    statistics_of_memory = Path("/proc/self/statm").read_text()
    pages = int(statistics_of_memory.split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
