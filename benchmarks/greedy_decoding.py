"""Greedy decoding side by side: this engine, transformers' generate and its assisted generation, and the raw forward.

    python benchmarks/greedy_decoding.py --target T --draft D --prompts FILE --tree chain:4 kary:3,2 --out FILE.json

Same process, same prompts, batch 1, one warm-up each, interleaved in rotating order; medians over prompts of seconds
per token. The physical limit is the target's forward on one token behind the same prefix: no autoregressive decoder is
faster than that per call, and a speculative one not faster than that times its calls. Quote the ratios.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.config import parse
from draftsmith.models import load_model
from draftsmith.records import read_prompts
from draftsmith.sampling import Sampling, generator
from draftsmith.text import load_tokenizer

Way = Callable[[list[int]], int]
REPEATS_OF_RAW_FORWARD = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time."""

    target: str
    draft: str
    prompts: str
    out: str
    tree: list[str]
    max_prompts: int = 8
    max_new_tokens: int = 64
    device: str = "auto"
    dtype: str = "auto"


def ours(decoder: SpeculativeDecoder, max_new_tokens: int) -> Way:
    """This project's decoder; returns the number of target calls."""

    def run(prompt: list[int]) -> int:
        batch = decoder.generate([prompt], Sampling(temperature=0), max_new_tokens, [generator(0)])
        return batch.generations[0].stats.target_calls

    return run


def hugging_face(target: PreTrainedModel, max_new_tokens: int, draft: PreTrainedModel | None, ahead: int) -> Way:
    """transformers' generate: greedy, or assisted with a constant number of tokens and no confidence stop."""
    settings = GenerationConfig(do_sample=False, min_new_tokens=max_new_tokens, max_new_tokens=max_new_tokens)
    extra: dict[str, Any] = {}
    if draft is not None:
        draft.generation_config.num_assistant_tokens = ahead
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        extra["assistant_model"] = draft

    def run(prompt: list[int]) -> int:
        ids_1T = torch.tensor([prompt], device=target.device)
        target.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings, **extra)
        return max_new_tokens

    return run


@torch.inference_mode()
def raw_forward_s(target: PreTrainedModel, prompt: list[int]) -> float:
    """Median seconds of one target forward of one token behind the prompt."""
    ids_1T = torch.tensor([prompt], device=target.device)
    times = []
    for _ in range(REPEATS_OF_RAW_FORWARD):
        cache = DynamicCache(config=target.config)
        target(input_ids=ids_1T[:, :-1], past_key_values=cache, use_cache=True)
        started = time.perf_counter()
        target(input_ids=ids_1T[:, -1:], past_key_values=cache, use_cache=True).logits.argmax().item()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Time every way and write the JSON."""
    options, _ = parse(Options, "greedy_decoding", sys.argv[1:])
    place = {"device": options.device, "dtype": options.dtype}
    target, draft = load_model(options.target, **place), load_model(options.draft, **place)
    tokenizer = load_tokenizer(options.target)
    prompts = read_prompts(options.prompts, tokenizer, limit=options.max_prompts).prompts
    count = options.max_new_tokens
    ways: dict[str, Way] = {
        "transformers generate": hugging_face(target, count, None, 0),
        "transformers assisted, 4 tokens": hugging_face(target, count, draft, 4),
        "draftsmith autoregressive": ours(SpeculativeDecoder(target), count),
    }
    for tree in options.tree:
        decoder = SpeculativeDecoder(target, DraftModelProposer(draft), tree, "exact")
        ways[f"draftsmith {tree}"] = ours(decoder, count)
    for way in ways.values():
        way(list(prompts[0].ids))
    times: dict[str, list[float]] = {name: [] for name in ways}
    calls: dict[str, list[int]] = {name: [] for name in ways}
    names = list(ways)
    for index, prompt in enumerate(prompts):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            started = time.perf_counter()
            calls[name].append(ways[name](list(prompt.ids)))
            times[name].append((time.perf_counter() - started) / count)
    limit_s = statistics.median(raw_forward_s(target, list(prompt.ids)) for prompt in prompts)
    baseline_s = statistics.median(times["transformers generate"])
    rows = [
        {
            "way": name,
            "s_per_token": statistics.median(times[name]),
            "speed_over_transformers_generate": baseline_s / statistics.median(times[name]),
            "raw_forward_share": limit_s * statistics.mean(calls[name]) / count / statistics.median(times[name]),
        }
        for name in names
    ]
    result = {"raw_forward_s": limit_s, "threads": torch.get_num_threads(), "prompts": len(prompts), "rows": rows}
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
