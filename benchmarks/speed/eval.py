"""What an estimate costs beside decoding the same cells.

    python benchmarks/speed/eval.py [--out FILE]

A cell is one draft with one tree and verifier on one set of prompts at one temperature. The
estimate is `measure_alphas`: one forward of the target over its own texts, one of every draft, and
all cells from them. Decoding is `measuring.Task.decoding` of every cell, at batch 16 and, on some
of the prompts, at batch 1. The target's texts are a cost of their own (`baseline_s`): decoding
needs none, and an evaluation has them anyway. Without arguments the pair is the demo's.
"""

# ruff: noqa: E402
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this directory first, where files have the names of packages (eval, train,
    # decode).
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.lib.shipped_pair import LARGER_DRAFT, PAIR, answer, heldout_prompts
from draftsmith.core.sampling import Sampling
from draftsmith.drafts.load import load_models
from draftsmith.eval import measuring
from draftsmith.eval.estimate import measure_alphas
from draftsmith.eval.method import Method
from draftsmith.eval.predict import predicted_methods


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Time estimates beside decoding."""

    target: str = str(PAIR / "target")
    """The target."""
    draft: list[str] = field(default_factory=lambda: [str(PAIR / "base"), str(LARGER_DRAFT)])
    """Drafts."""
    tree: list[str] = field(default_factory=lambda: ["kary:2,2", "kary:4,2,1"])
    """Trees besides the chains of 1 to 8."""
    temperature: float = 1.0
    """Temperature."""
    prompts: int = 32
    """Prompts decoded in batches of 16."""
    single: int = 4
    """Prompts decoded at batch 1."""
    max_new_tokens: int = 64
    """Tokens per prompt."""
    out: str | None = None
    """A JSON file for the outcome."""


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its seconds."""
    start = time.perf_counter()
    outcome = work()
    return outcome, time.perf_counter() - start


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Time everything once, after a warm-up."""
    pair = load_models(
        config.target,
        {Path(path).name: path for path in config.draft},
        device="cpu",
        dtype="float32",
    )
    sampling = Sampling(temperature=config.temperature)
    prompts = heldout_prompts(pair.tokenizer, config.prompts)
    trees = [Method(tree, "exact" if tree.startswith("opt") else "mcsd") for tree in config.tree]
    methods = predicted_methods(trees, sampling.greedy)
    task = measuring.Task(
        pair.target, prompts, sampling, (), config.max_new_tokens, seed=0, batch_size=16
    )
    ours, baseline_s = timed(task.baseline)
    texts = measuring.continuations(prompts, ours)

    def estimate() -> Any:
        return measure_alphas(pair.target, pair.drafts, texts, sampling, methods, batch_size=16)

    estimate()
    _, estimate_s = timed(estimate)
    decoding: dict[str, float] = {}
    for batch_size, count in ((16, len(prompts)), (1, config.single)):
        seconds = 0.0
        for draft in pair.drafts.values():
            for method in methods:
                some = measuring.BaselineMeasurement(
                    output_ids=ours["output_ids"][:count],
                    finish_reason=ours["finish_reason"][:count],
                )
                part = replace(task, prompts=prompts[:count], batch_size=batch_size)
                _, spent = timed(partial(part.decoding, draft, method, some))
                seconds += spent
        decoding[f"batch_{batch_size}_s"] = seconds * len(prompts) / count
    with_texts = estimate_s + baseline_s
    return {
        "cells": len(methods) * len(pair.drafts),
        "prompts": len(prompts),
        "estimate_s": estimate_s,
        "baseline_s": baseline_s,
        "decoding": decoding,
        "cheaper_than_batch_16": decoding["batch_16_s"] / estimate_s,
        "cheaper_than_batch_1": decoding["batch_1_s"] / estimate_s,
        "cheaper_than_batch_16_with_texts": decoding["batch_16_s"] / with_texts,
        "cheaper_than_batch_1_with_texts": decoding["batch_1_s"] / with_texts,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    answer(BenchmarkConfig, "eval", run)
