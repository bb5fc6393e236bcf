"""What `align` says before it begins: why it starts a head, and how long the whole will take on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from decode import SpeculativeDecoder
from draftsmith.alignment.config import AlignConfig
from draftsmith_core.sampling import Sampling
from eval.config import EvalConfig
from train.config import TrainConfig

if TYPE_CHECKING:  # it imports this module
    from draftsmith.alignment.choices import Facts

# Rows and tokens that are timed. A step of training also passes over logits and weights: as often as one run showed
# (SmolLM2-135M, EAGLE-3, two busy cores).
_ROWS, _TOKENS, _OVERHEAD = 16, 8, 3.0
_BACKWARD = 3  # a forward and its backward, in forwards
FRESH_DEPTHS = 4  # a fresh EAGLE-3 head is trained as deep as trees usually go


@dataclass(frozen=True)
class Clock:
    """Seconds of the target: per prompt token that it reads, per token that it writes in a batch and alone."""

    read_s: float
    write_s: float
    alone_s: float


@torch.no_grad()
def clock(target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Clock:
    """Time the target for some seconds."""
    decoder, found = SpeculativeDecoder(target), {}
    # The first call also packs weights.
    decoder.generate([prompts[0]], Sampling(), 1)
    for rows in (1, min(_ROWS, len(prompts))):
        batch = decoder.generate(prompts[:rows], Sampling(), _TOKENS)
        written = sum(len(generation.output_ids) for generation in batch.generations)
        tokens = sum(len(prompt) for prompt in prompts[:rows])
        found[rows] = batch.prefill_s / tokens, batch.decode_s / max(1, written - rows)
    read_s, write_s = min(found.values(), key=lambda pair: pair[1])
    return Clock(read_s, write_s, found[1][1])


def expected_s(
    config: AlignConfig, runs: Mapping[str, TrainConfig], evaluation: EvalConfig, facts: "Facts", sets: int
) -> dict[str, float]:
    """Seconds of each stage, for answers of full length, on the machine as busy as it was timed.

    runs: of training. sets: number of prompt sets of the evaluation.
    """
    distilled, timed = config.distill, facts.clock
    answers = distilled["max_prompts"] * distilled["num_samples"]
    read = facts.mean_prompt * timed.read_s
    write = distilled["max_new_tokens"] * timed.write_s
    spent = {"distil": answers * (read + write) + distilled["general_texts"] * write, "train": 0.0}
    for run in runs.values():
        sequences = (run.steps or 0) * config.train["rows_per_step"]
        length = facts.mean_prompt + distilled["max_new_tokens"]
        depths = FRESH_DEPTHS if run.kind == "eagle3" else 1
        # The target reads every answer once where its states are kept, else in every pass.
        known = min(sequences, answers) if run.head.features or (run.kind == "lm" and not facts.on_gpu) else sequences
        drafted = _BACKWARD * depths * facts.draft_parameters / facts.target_parameters
        part = 1.0 if run.draft_vocab_size is None else run.draft_vocab_size / facts.vocabulary
        compared = depths * facts.projection_share * (1 + (_BACKWARD * part if run.kind != "lm" else 0))
        step_s = length * drafted + distilled["max_new_tokens"] * compared
        spent["train"] += timed.read_s * (known * length + _OVERHEAD * sequences * step_s)
    ways = 1 + len(evaluation.draft) * len(evaluation.tree)
    tokens = sets * len(evaluation.temperature) * evaluation.max_new_tokens
    clocked = evaluation.speed_prompts * timed.alone_s
    spent["evaluate"] = tokens * ways * (evaluation.max_prompts * timed.write_s + clocked)
    return spent


def in_words(spent: Mapping[str, float]) -> str:
    """One line: the whole as a range, because a machine's load changes, and the share of each stage."""
    whole = sum(spent.values())
    stages = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in spent.items())
    return (
        f"expected: {_duration(whole / 2)} to {_duration(whole * 2)} if this machine stays as busy as it is ({stages})"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
