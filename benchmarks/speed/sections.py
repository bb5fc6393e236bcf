"""What `decode.py` measures, one function per section; each returns what goes into the JSON.

Legend: s seconds, ms milliseconds; `rows` tokens of one forward; a *step* is one target forward
that decides tokens.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.lib.timing import (
    Clock,
    Run,
    bandwidth,
    by_name_and_rows,
    bytes_per_token,
    cache_bytes,
    hugging_face_forwards,
    medians_s,
    rotated,
    runner_forwards,
    timed_run,
)
from benchmarks.speed.methods import Method, Pair, build
from draftsmith.core.io import JsonObject
from draftsmith.core.models import context_length
from draftsmith.decode.packed_weights import kernel_products

FORWARD_ROWS = (1, 2, 5, 9, 17, 29, 61)
FORWARD_CONTEXTS = (128, 4096)
FORWARD_REPEATS = 15


@dataclass(frozen=True)
class Bench:
    """Models, prompts, and a long text.

    `apart` is a copy of `pair` for transformers: this engine packs the weights of what it decodes
    with, which makes every other forward of the same model slower.
    """

    pair: Pair
    apart: Pair
    prompts: list[list[int]]
    text: list[int]
    max_new_tokens: int

    def rounds(self, count: int) -> list[list[list[int]]]:
        """The prompts of every round, as many for each."""
        size = len(self.prompts) // count
        starts = [turn * size for turn in range(count)]
        return [self.prompts[start : start + size] for start in starts]

    def build(self, name: str, temperature: float) -> Method:
        """The method of that name, on the models that are for it."""
        models = self.apart if name.startswith("hf") else self.pair
        return build(name, models, temperature, self.max_new_tokens)

    def clock(self) -> Clock:
        """Notes the forwards of all models here."""
        pair, apart = self.pair, self.apart
        drafts: list[nn.Module] = [pair.draft, apart.draft]
        if pair.head is not None:
            drafts.append(pair.head)
        return Clock(target=[pair.target, apart.target], draft=drafts)


def forwards(bench: Bench, contexts: Sequence[int]) -> JsonObject:
    """Milliseconds of one forward by number of rows, behind each of these contexts, and the ratio
    to one row.

    `share_of_memory_limit`: of ours for one row, what it reads (weights and cache) over the
    bandwidth.
    """
    found: JsonObject = {}
    for name, model, apart, row_counts in (
        ("target", bench.pair.target, bench.apart.target, FORWARD_ROWS),
        ("draft", bench.pair.draft, bench.apart.draft, FORWARD_ROWS[:3]),
    ):
        limit = context_length(model)
        for context in contexts:
            if limit is not None and context + max(FORWARD_ROWS) > limit:
                continue
            made = _by_rows(model, apart, bench.text[:context], row_counts)
            read = bytes_per_token(model) + cache_bytes(model, context)
            limit_ms = 1e3 * read / bandwidth(model.device)
            share = limit_ms / made["ours"]["1"]["ms"]
            found[f"{name}_behind_{context}"] = made | {"share_of_memory_limit": share}
    found["target_projection"] = {"ours": _projection(bench.pair.target)}
    if hasattr(bench.apart.target.config, "widened_from"):
        found["cost_of_zeros"] = _cost_of_zeros(bench.apart.target, bench.text[: contexts[0]])
    return found


def _by_rows(
    model: PreTrainedModel,
    apart: PreTrainedModel,
    context: Sequence[int],
    row_counts: Sequence[int],
) -> JsonObject:
    made = {
        "transformers": hugging_face_forwards(apart, context, row_counts),
        "ours": runner_forwards(model, context, row_counts, True),
        # Our masks and cache with the model's own forward.
        "ours_plain": runner_forwards(apart, context, row_counts, False),
    }
    times_s = medians_s(by_name_and_rows(made), model.device, FORWARD_REPEATS)
    found: JsonObject = {name: {} for name in made}
    for (name, rows), seconds in times_s.items():
        over_one = seconds / times_s[name, row_counts[0]]
        found[name][str(rows)] = {"ms": 1e3 * seconds, "over_one_row": over_one}
    return found


def _projection(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Milliseconds of the output projection alone, which every forward ends with."""
    projection = model.get_output_embeddings()
    width = projection.weight.shape[1]
    states = torch.zeros(max(FORWARD_ROWS), width, device=model.device, dtype=model.dtype)
    with torch.inference_mode(), kernel_products():
        calls = {str(rows): partial(projection, states[:rows]) for rows in FORWARD_ROWS}
        times_s = medians_s(calls, model.device, FORWARD_REPEATS)
    return {rows: {"ms": 1e3 * seconds} for rows, seconds in times_s.items()}


def _cost_of_zeros(model: PreTrainedModel, context: Sequence[int]) -> dict[str, float]:
    """Seconds of the (widened) target's forward over those of one with random weights of the same
    shape.
    """
    twin = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    twin.to(model.device).eval()
    counts = (1, 17)
    made = {
        "wide": hugging_face_forwards(model, context, counts),
        "random": hugging_face_forwards(twin, context, counts),
    }
    times_s = medians_s(by_name_and_rows(made), model.device, FORWARD_REPEATS)
    return {f"{rows} rows": times_s["wide", rows] / times_s["random", rows] for rows in counts}


def methods(
    bench: Bench, names: Sequence[str], temperatures: Sequence[float], rounds: int
) -> JsonObject:
    """Every method on the same prompts, other ones in every round, by temperature; `_summary` says
    what is kept.
    """
    names = list(dict.fromkeys(["hf", "ar", *names]))
    return {
        f"T={temperature:g}": _methods_at(bench, names, temperature, rounds)
        for temperature in temperatures
    }


Runs = Sequence[Sequence[Run]]  # by round, then prompt


def _methods_at(bench: Bench, names: Sequence[str], temperature: float, rounds: int) -> JsonObject:
    made = {name: bench.build(name, temperature) for name in names}
    runs, raw_s, read = _timed(bench, made, rounds)
    speeds = {name: list(map(_speed, runs[name])) for name in names}
    bytes_per_s = statistics.median(read)
    limit_s = statistics.median(map(min, zip(raw_s["transformers"], raw_s["ours"], strict=True)))
    raw_ms = {name: 1e3 * statistics.median(seconds) for name, seconds in raw_s.items()}
    found: JsonObject = {
        "raw_forward_ms": raw_ms,
        "limit_tokens_per_s_without_draft": 1 / limit_s,
        "bandwidth_GB_per_s": [each / 1e9 for each in read],
    }
    memory_ms = 1e3 * bytes_per_token(bench.pair.target) / bytes_per_s
    for name in names:
        way = _summary(made[name], runs[name], limit_s)
        if not name.startswith("hf"):
            way["parts_of_a_step"] = _parts(made[name], runs[name], memory_ms, raw_ms["ours"])
        for baseline in ("ar", "hf"):
            ratios = [a / b for a, b in zip(speeds[name], speeds[baseline], strict=True)]
            way[f"speed_over_{baseline}"] = statistics.median(ratios)
        if name in ("hf", "ar"):
            weights = bytes_per_token((bench.apart if name == "hf" else bench.pair).target)
            way["weight_MB_per_token"] = weights / 1e6
            shares = [a * weights / b for a, b in zip(speeds[name], read, strict=True)]
            way["share_of_memory_limit"] = statistics.median(shares)
            step_s = way["ms_per_step_after_prefill"] / 1e3
            way["share_of_memory_limit_after_prefill"] = weights / step_s / bytes_per_s
        if temperature == 0:
            way["greedy_equal"] = _equal(runs[name], runs["ar"])
        found[name] = way
    return found


def _timed(
    bench: Bench, made: Mapping[str, Method], rounds: int
) -> tuple[dict[str, list[list[Run]]], dict[str, list[float]], list[float]]:
    """The runs of every method; by round the seconds of raw forwards and the bandwidth."""
    device = bench.pair.target.device
    names = list(made)
    runs: dict[str, list[list[Run]]] = {name: [] for name in names}
    context = bench.prompts[0]
    raw = {
        "transformers": hugging_face_forwards(bench.apart.target, context, (1,))[1],
        "ours": runner_forwards(bench.pair.target, context, (1,))[1],
    }
    raw_s: dict[str, list[float]] = {name: [] for name in raw}
    read: list[float] = []
    with bench.clock() as clock:
        for method in made.values():
            method.decode([context], 0)
        for turn, share in enumerate(bench.rounds(rounds)):
            for name, seconds in medians_s(raw, device, 5).items():
                raw_s[name].append(seconds)
            for name in names:
                runs[name].append([])
            before = bandwidth(device)
            for place, prompt in enumerate(share):
                for name in rotated(names, turn * len(share) + place):
                    call = partial(made[name].decode, [prompt], turn)
                    runs[name][turn].append(timed_run(clock, device, call))
            read.append((before + bandwidth(device)) / 2)
    return runs, raw_s, read


def _emitted(run: Run) -> int:
    return sum(map(len, run.outputs))


def _speed(runs: Sequence[Run]) -> float:
    return _ratio([runs], _emitted, _wall_s)


def _steps(method: Method, run: Run) -> int:
    return run.calls["target"] - method.prefills


_wall_s = attrgetter("wall_s")


def _target_s(run: Run) -> float:
    return run.forward_s["target"]


def _draft_s(run: Run) -> float:
    return run.forward_s.get("draft", 0.0)


def _ratio(rounds: Runs, above: Callable[[Run], float], below: Callable[[Run], float]) -> float:
    """Sum over sum of all runs of a round; the median over rounds."""
    ratios = [sum(map(above, runs)) / sum(map(below, runs)) for runs in rounds]
    return statistics.median(ratios)


def _equal(mine: Runs, theirs: Runs) -> str:
    pairs = zip(chain.from_iterable(mine), chain.from_iterable(theirs), strict=True)
    equal = [a.outputs == b.outputs for a, b in pairs]
    return f"{sum(equal)} of {len(equal)}"


def _summary(method: Method, rounds: Runs, limit_s: float) -> JsonObject:
    """Speed, tau and where a step's time goes: medians over rounds, prefill included, counts over
    everything.

    `overhead` is all that is not a forward of either model; `ms_per_step_after_prefill` leaves out
    what comes before the end of the target's first forward.
    """
    steps = partial(_steps, method)
    pooled = list(chain.from_iterable(rounds))

    def ms_per_step(seconds: Callable[[Run], float]) -> float:
        return 1e3 * _ratio(rounds, seconds, steps)

    def outside_s(run: Run) -> float:
        return run.wall_s - sum(run.forward_s.values())

    speed = _ratio(rounds, _emitted, _wall_s)
    after_prefill_s = _ratio(
        rounds, attrgetter("after_prefill_s"), lambda run: run.calls["target"] - 1
    )
    return {
        "tokens_per_s": speed,
        "tau": _ratio([pooled], _emitted, steps),
        "speed_over_limit_without_draft": speed * limit_s,
        "ms_per_step": ms_per_step(_wall_s),
        "target_ms_per_step": ms_per_step(_target_s),
        "draft_ms_per_step": ms_per_step(_draft_s),
        "overhead_ms_per_step": ms_per_step(outside_s),
        "overhead_fraction": _ratio(rounds, outside_s, _wall_s),
        "ms_per_step_after_prefill": 1e3 * after_prefill_s,
    }


def _parts(method: Method, rounds: Runs, memory_ms: float, forward_ms: float) -> dict[str, float]:
    """Milliseconds of a step, from all runs, prefill included: `memory`, the reading of the
    target's weights; `one_token`, what its forward of one token takes beyond; `more_rows`, what its
    forwards here take beyond that one; `draft`; `prompt`, until the end of the target's first
    forward; `outside`, the rest. They add up to the step. `limit`: tau tokens in one forward of one
    token would take so long.
    """
    pooled = list(chain.from_iterable(rounds))

    def ms_per_step(seconds: Callable[[Run], float]) -> float:
        return 1e3 * _ratio([pooled], seconds, partial(_steps, method))

    wall_ms = ms_per_step(_wall_s)
    prompt_ms = ms_per_step(lambda run: run.wall_s - run.after_prefill_s)
    parts = {
        "memory": memory_ms,
        "one_token": forward_ms - memory_ms,
        "draft": ms_per_step(_draft_s),
        "prompt": prompt_ms,
        "more_rows": ms_per_step(_target_s) - prompt_ms - forward_ms,
    }
    outside_ms = wall_ms - sum(parts.values())
    return parts | {"outside": outside_ms, "step": wall_ms, "limit": forward_ms}
