"""How long a run of `align` will take, from one measured step of each stage."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode import SpeculativeDecoder
from drafts.heads.eagle import FeatureHead
from drafts.load import Draft, LoadedModels
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import eval_config
from draftsmith_core.sampling import Sampling
from train.config import TrainConfig
from train.trainees import TRAINEES

_TOKENS = 8  # tokens of each answer that is timed


def expected(
    config: AlignConfig,
    runs: Sequence[TrainConfig],
    models: LoadedModels,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
) -> str:
    """Return a line with the time of each stage, for answers of full length.

    draft: before its training. Medusa, Hydra and block drafters are not timed; their progress line
    tells.
    """
    options = config.distill
    token_s = _token_s(models.target, prompts[: options["batch_size"]])
    answers = options["max_prompts"] * options["num_samples"] + options["general_texts"]
    distil_s = answers * options["max_new_tokens"] * token_s
    parts = [f"distil {_duration(distil_s)}"]
    rows = sum(run.steps or 0 for run in runs) * config.train["rows_per_step"]
    if isinstance(draft, PreTrainedModel | FeatureHead):
        read_s, draft_s = _row_s(models.target, draft, config.train["max_length"])
        head = isinstance(draft, FeatureHead)
        last = runs[-1]
        depths = last.head.test_steps or getattr(TRAINEES[last.kind], "usual_steps", 1)
        # Cached, the states that a head reads are computed once.
        read = answers if head and last.head.features else rows
        parts.append(f"train {_duration(read * read_s + rows * depths * draft_s)}")
    evaluation = eval_config(config)
    ways = 1 + len(evaluation.draft) * len(evaluation.tree)
    sets = len(evaluation.id) + len(evaluation.ood)
    outputs = sets * evaluation.max_prompts * len(evaluation.temperature) * ways
    evaluate_s = outputs * evaluation.max_new_tokens * token_s
    parts.append(f"evaluate {_duration(evaluate_s)}")
    return f"expected: {', '.join(parts)} (one step of each was timed)"


def _token_s(target: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> float:
    """Time the target: seconds per token of a batch of answers."""
    decoder = SpeculativeDecoder(target)
    # The first call also packs weights.
    decoder.generate([prompts[0]], Sampling(), 1)
    batch = decoder.generate(prompts, Sampling(), _TOKENS)
    written = sum(len(answer.output_ids) - 1 for answer in batch.generations)
    return batch.decode_s / max(1, written)


def _row_s(target: PreTrainedModel, draft: nn.Module, length: int) -> tuple[float, float]:
    """Time a row of training: a forward of the target, and a forward and backward of the draft, of
    a head at one depth.
    """
    ids_BT = torch.zeros(1, length, dtype=torch.long, device=target.device)
    inputs = [ids_BT]
    if isinstance(draft, FeatureHead):
        config: Any = draft.config
        shape = (1, length, config.hidden_size)
        inputs.append(torch.zeros(shape, dtype=target.dtype, device=target.device))
    draft.requires_grad_()
    began = read = 0.0
    for _ in range(2):  # the first time kernels are loaded
        began = _now(target)
        with torch.no_grad():
            target(ids_BT)
        read = _now(target)
        # A language model's output begins with its logits too.
        draft(*inputs)[0].sum().backward()
    return read - began, _now(target) - read


def _now(target: PreTrainedModel) -> float:
    """The time, once the target's device has done what it was asked."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
