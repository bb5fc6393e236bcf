"""The type of the target's weights on a CPU: `align` times fp32 and bf16, and takes the faster."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.core.device_map import in_parts
from draftsmith.core.models import load_model
from draftsmith.core.progress import waiting
from draftsmith.core.ranks import say
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading
from draftsmith.decode import SpeculativeDecoder

# What is timed: answers together, their tokens, those of each prompt, and interleaved rounds.
_TOGETHER = 4
_TOKENS = 16
_PROMPT_TOKENS = 32
_ROUNDS = 3
# A smaller gain is not worth the rounding.
_CLEARLY = 1.1


def with_type(
    config: AlignConfig, target: PreTrainedModel, prompts: Sequence[Sequence[int]]
) -> AlignConfig:
    """Return the options with the faster type of weights, and say what it costs. A type that is
    given stays, and so does the usual one on a GPU, of 4 bits, and of a target in parts.
    """
    fixed = getattr(target, "is_quantized", False) or in_parts(target)
    if config.dtype != "auto" or target.device.type != "cpu" or fixed:
        return config
    with waiting("align: times the target in float32 and in bfloat16"):
        half = load_model(config.target, **loading(replace(config, dtype="bfloat16")))
        tables: list[Any] = [target.get_input_embeddings(), half.get_input_embeddings()]
        dtype, why = "float32", "dtype: float32, because bfloat16 would round the target's weights"
        if torch.equal(tables[0].weight, tables[1].weight.float()):
            dtype, why = faster_type(target, half, prompts)
    say(why)
    return replace(config, dtype=dtype)


@torch.no_grad()
def faster_type(
    whole: PreTrainedModel,
    half: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, str]:
    """Return the type in which the target is faster, and what that costs, in words.

    whole, half: the target in fp32 and bf16, which answer greedily and read the prompts in turn.
    """
    asked = [list(prompt[-_PROMPT_TOKENS:]) for prompt in prompts[:_TOGETHER]]
    ratios = []
    # The first round packs weights.
    for _ in range(1 + _ROUNDS):
        times = [clock()]
        answers = []
        for target in (whole, half):
            greedy = Sampling(temperature=0.0)
            batch = SpeculativeDecoder(target).generate(asked, greedy, _TOKENS, eos_ids=())
            answers.append([answer.output_ids for answer in batch.generations])
            for prompt in asked:
                target(torch.tensor([prompt]), use_cache=False, logits_to_keep=1)
            times.append(clock())
        ratios.append((times[1] - times[0]) / (times[2] - times[1]))
    # Every round must say so: one on a busy machine says little.
    if min(ratios[1:]) < _CLEARLY:
        return "float32", "dtype: float32; bfloat16 is not clearly faster here"
    ratio = median(ratios[1:])
    equal = sum(map(list.__eq__, *answers))
    return "bfloat16", (
        f"dtype: bfloat16; float32 takes {ratio:.2f} times as long here. {equal} of {len(asked)} "
        f"greedy answers of {_TOKENS} tokens are equal in both; --dtype fp32 keeps float32"
    )
