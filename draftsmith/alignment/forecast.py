"""How long a run of `align` will take, from one measured step of each stage."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decode import SpeculativeDecoder
from drafts.load import LoadedModels
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import eval_config
from draftsmith_core.sampling import Sampling
from train.config import TrainConfig

_TOKENS = 8  # tokens of an answer that are timed


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one measured step of each stage.

    prompt_s, token_s: a prompt and a token of an answer, in a batch. alone_s: a token of an answer
    decoded alone. row_s: a row that a draft language model is trained on; None for a head.
    """

    prompt_s: float
    token_s: float
    alone_s: float
    row_s: float | None


def time_steps(
    config: AlignConfig, models: LoadedModels, prompts: Sequence[Sequence[int]]
) -> StepTimes:
    """Time a batch of answers, one answer alone, and a row of training."""
    decoder = SpeculativeDecoder(models.target)
    # The first call also packs weights.
    decoder.generate([prompts[0]], Sampling(), 1)
    rows = prompts[: config.distill["batch_size"]]
    batch = decoder.generate(rows, Sampling(), _TOKENS)
    written = sum(len(answer.output_ids) for answer in batch.generations)
    alone = decoder.generate([prompts[0]], Sampling(), _TOKENS)
    draft, row_s = next(iter(models.drafts.values()), None), None
    if isinstance(draft, PreTrainedModel):
        length = len(prompts[0]) + config.distill["max_new_tokens"]
        row = [*prompts[0], *[prompts[0][-1]] * length][: config.train["max_length"]]
        row_s = _train_s(models.target, draft, row[:length])
    return StepTimes(
        prompt_s=batch.prefill_s / len(rows),
        token_s=batch.decode_s / max(1, written - len(rows)),
        alone_s=alone.decode_s / max(1, len(alone.generations[0].output_ids) - 1),
        row_s=row_s,
    )


def _train_s(target: PreTrainedModel, draft: PreTrainedModel, row: Sequence[int]) -> float:
    """Time a forward of the target, and a forward and backward of the draft."""
    ids_BT = torch.tensor([row], device=target.device)
    draft.requires_grad_()
    began = time.perf_counter()
    with torch.no_grad():
        target(ids_BT)
    draft(ids_BT).logits.float().logsumexp(-1).sum().backward()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def expected(config: AlignConfig, runs: Sequence[TrainConfig], times: StepTimes) -> str:
    """Return a line with the time of each stage at the measured speed, for answers of full length.

    Nothing is measured of training a head; its progress line tells.
    """
    options, evaluation = config.distill, eval_config(config)
    answers = options["max_prompts"] * options["num_samples"] + options["general_texts"]
    distil_s = answers * (times.prompt_s + options["max_new_tokens"] * times.token_s)
    sets = max(1, len(config.id)) + len(config.ood)
    ways = 1 + len(evaluation.draft) * len(evaluation.tree)
    outputs = sets * len(evaluation.temperature) * ways
    batched_s = evaluation.max_prompts * times.token_s
    alone_s = evaluation.speed_prompts * times.alone_s
    evaluate_s = outputs * evaluation.max_new_tokens * (batched_s + alone_s)
    train = ""
    if times.row_s is not None:
        rows = sum(run.steps or 0 for run in runs) * config.train["rows_per_step"]
        train = f"train {_duration(rows * times.row_s)}, "
    return (
        f"expected: distil {_duration(distil_s)}, {train}evaluate {_duration(evaluate_s)} "
        "(one step each was timed)"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
