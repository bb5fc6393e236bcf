"""What `decode.py` measures, one function per section; each returns what goes into the JSON.

Legend: s seconds, ms milliseconds; `rows` tokens of one forward; a *step* is one target forward
that decides tokens.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.lib.timing import (
    Clock,
    Run,
    bandwidth,
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
        return [self.prompts[turn * size : (turn + 1) * size] for turn in range(count)]

    def build(self, name: str, temperature: float) -> Method:
        """The method of that name, on the models that are for it."""
        return build(
            name,
            self.apart if name.startswith("hf") else self.pair,
            temperature,
            self.max_new_tokens,
        )

    def clock(self) -> Clock:
        """Notes the forwards of all models here."""
        head = [] if self.pair.head is None else [self.pair.head]
        return Clock(
            target=[self.pair.target, self.apart.target],
            draft=[self.pair.draft, self.apart.draft, *head],
        )


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
            found[f"{name}_behind_{context}"] = made | {
                "share_of_memory_limit": limit_ms / made["ours"]["1"]["ms"]
            }
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
    calls = {
        f"{name} {rows}": call for name, by_rows in made.items() for rows, call in by_rows.items()
    }
    times_s = medians_s(calls, model.device, FORWARD_REPEATS)
    return {
        name: {
            str(rows): {
                "ms": 1e3 * times_s[f"{name} {rows}"],
                "over_one_row": times_s[f"{name} {rows}"] / times_s[f"{name} {row_counts[0]}"],
            }
            for rows in row_counts
        }
        for name in made
    }


def _projection(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Milliseconds of the output projection alone, which every forward ends with."""
    projection: Any = model.get_output_embeddings()
    states = torch.zeros(
        max(FORWARD_ROWS), projection.in_features, device=model.device, dtype=model.dtype
    )
    with torch.inference_mode(), kernel_products():
        calls = {str(rows): partial(projection, states[:rows]) for rows in FORWARD_ROWS}
        times_s = medians_s(calls, model.device, FORWARD_REPEATS)
    return {rows: {"ms": 1e3 * seconds} for rows, seconds in times_s.items()}


def _cost_of_zeros(model: PreTrainedModel, context: Sequence[int]) -> dict[str, float]:
    """Seconds of the (widened) target's forward over those of one with random weights of the same
    shape.
    """
    twin = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype).to(model.device).eval()
    calls = {
        f"{name} {rows}": call
        for name, each in (("wide", model), ("random", twin))
        for rows, call in hugging_face_forwards(each, context, (1, 17)).items()
    }
    times_s = medians_s(calls, model.device, FORWARD_REPEATS)
    return {f"{rows} rows": times_s[f"wide {rows}"] / times_s[f"random {rows}"] for rows in (1, 17)}


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


def _methods_at(bench: Bench, names: Sequence[str], temperature: float, rounds: int) -> JsonObject:
    target = bench.pair.target
    made = {name: bench.build(name, temperature) for name in names}
    # By way, then round, then prompt.
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in range(rounds)] for name in names}
    raw = {
        "transformers": hugging_face_forwards(bench.apart.target, bench.prompts[0], (1,))[1],
        "ours": runner_forwards(target, bench.prompts[0], (1,), True)[1],
    }
    raw_s: list[dict[str, float]] = []
    read: list[float] = []
    with bench.clock() as clock:
        for name in names:
            made[name].decode(bench.prompts[:1], 0)
        for turn, share in enumerate(bench.rounds(rounds)):
            raw_s.append(medians_s(raw, target.device, 5))
            before = bandwidth(target.device)
            for place, prompt in enumerate(share):
                for name in rotated(names, turn * len(share) + place):
                    run = timed_run(
                        clock, target.device, partial(made[name].decode, [prompt], turn)
                    )
                    runs[name][turn].append(run)
            read.append((before + bandwidth(target.device)) / 2)
    limit_s = statistics.median(min(each.values()) for each in raw_s)
    found: JsonObject = {
        "raw_forward_ms": {
            name: 1e3 * statistics.median(each[name] for each in raw_s) for name in raw
        },
        "limit_tokens_per_s_without_draft": 1 / limit_s,
        "bandwidth_GB_per_s": [each / 1e9 for each in read],
    }
    memory_ms = 1e3 * bytes_per_token(target) / statistics.median(read)
    for name in names:
        found[name] = _summary(made[name], runs[name], limit_s)
        if not name.startswith("hf"):
            found[name]["parts_of_a_step"] = _parts(
                made[name], runs[name], memory_ms, found["raw_forward_ms"]["ours"]
            )
        for baseline in ("ar", "hf"):
            found[name][f"speed_over_{baseline}"] = statistics.median(
                _speed(mine) / _speed(theirs)
                for mine, theirs in zip(runs[name], runs[baseline], strict=True)
            )
        if name in ("hf", "ar"):
            weights = bytes_per_token((bench.apart if name == "hf" else bench.pair).target)
            found[name]["weight_MB_per_token"] = weights / 1e6
            found[name]["share_of_memory_limit"] = statistics.median(
                _speed(each) * weights / limit for each, limit in zip(runs[name], read, strict=True)
            )
            step_s = found[name]["ms_per_step_after_prefill"] / 1e3
            found[name]["share_of_memory_limit_after_prefill"] = (
                weights / step_s / statistics.median(read)
            )
        if temperature == 0:
            found[name]["greedy_equal"] = _equal(runs[name], runs["ar"])
    return found


def _speed(runs: Sequence[Run]) -> float:
    return sum(_emitted(run) for run in runs) / sum(run.wall_s for run in runs)


def _emitted(run: Run) -> int:
    return sum(map(len, run.outputs))


def _steps(method: Method, run: Run) -> int:
    return run.calls["target"] - method.prefills


def _equal(mine: Sequence[Sequence[Run]], theirs: Sequence[Sequence[Run]]) -> str:
    pairs = [
        (a.outputs, b.outputs)
        for x, y in zip(mine, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def _summary(method: Method, rounds: Sequence[Sequence[Run]], limit_s: float) -> JsonObject:
    """Speed, tau and where a step's time goes: medians over rounds, prefill included, counts over
    everything.

    `overhead` is all that is not a forward of either model; `ms_per_step_after_prefill` leaves out
    what comes before the end of the target's first forward.
    """
    pooled = [run for runs in rounds for run in runs]

    def per_step(seconds: Callable[[Run], float]) -> float:
        return statistics.median(
            1e3 * sum(map(seconds, r)) / sum(_steps(method, run) for run in r) for r in rounds
        )

    def forwards_s(run: Run) -> float:
        return sum(run.forward_s.values())

    speed = statistics.median(map(_speed, rounds))
    return {
        "tokens_per_s": speed,
        "tau": sum(map(_emitted, pooled)) / sum(_steps(method, run) for run in pooled),
        "speed_over_limit_without_draft": speed * limit_s,
        "ms_per_step": per_step(lambda run: run.wall_s),
        "target_ms_per_step": per_step(lambda run: run.forward_s["target"]),
        "draft_ms_per_step": per_step(lambda run: run.forward_s.get("draft", 0.0)),
        "overhead_ms_per_step": per_step(lambda run: run.wall_s - forwards_s(run)),
        "overhead_fraction": statistics.median(
            1 - sum(map(forwards_s, runs)) / sum(run.wall_s for run in runs) for runs in rounds
        ),
        "ms_per_step_after_prefill": statistics.median(
            1e3
            * sum(run.after_prefill_s for run in runs)
            / sum(run.calls["target"] - 1 for run in runs)
            for runs in rounds
        ),
    }


def _parts(
    method: Method, rounds: Sequence[Sequence[Run]], memory_ms: float, forward_ms: float
) -> dict[str, float]:
    """Milliseconds of a step, from all runs, prefill included: `memory`, the reading of the
    target's weights; `one_token`, what its forward of one token takes beyond; `more_rows`, what its
    forwards here take beyond that one; `draft`; `prompt`, until the end of the target's first
    forward; `outside`, the rest. They add up to the step. `limit`: tau tokens in one forward of one
    token would take so long.
    """
    runs = [run for each in rounds for run in each]
    steps = sum(_steps(method, run) for run in runs)
    prompt_ms, target_ms, draft_ms, wall_ms = (
        1e3 * sum(seconds) / steps
        for seconds in (
            [run.wall_s - run.after_prefill_s for run in runs],
            [run.forward_s["target"] for run in runs],
            [run.forward_s.get("draft", 0.0) for run in runs],
            [run.wall_s for run in runs],
        )
    )
    parts = {
        "memory": memory_ms,
        "one_token": forward_ms - memory_ms,
        "draft": draft_ms,
        "prompt": prompt_ms,
    }
    parts["more_rows"] = target_ms - prompt_ms - forward_ms
    return parts | {"outside": wall_ms - sum(parts.values()), "step": wall_ms, "limit": forward_ms}
