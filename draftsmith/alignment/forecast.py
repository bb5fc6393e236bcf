"""How long a run of `align` takes at most, from timed steps of each stage."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.alignment.budget import StepCost
from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import eval_config
from draftsmith.core.ranks import launched
from draftsmith.core.sampling import Sampling
from draftsmith.decode import PROPOSERS, SpeculativeDecoder
from draftsmith.drafts.heads.eagle import FeatureHead
from draftsmith.drafts.load import Draft, LoadedModels, kind_of
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.method import shape_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.trainees import TRAINEES

_TOKENS = 6  # tokens of each answer that is timed


@dataclass(frozen=True)
class _RowCost:
    """Seconds of a row of a batch: to read its prompt, and of a step."""

    prefill_s: float
    step_s: float

    def seconds(self, steps: int) -> float:
        return self.prefill_s + steps * self.step_s


def expected(
    config: AlignConfig,
    runs: Sequence[TrainConfig],
    models: LoadedModels,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    costs: Sequence[StepCost],
) -> str:
    """Return a line with the time of each stage, for answers of full length of which no token was
    drafted.

    draft: before its training. costs: of one row. The training of Medusa, Hydra and block drafters
    is not timed; its progress line tells.
    """
    processes = launched()
    distil_s = _distil_s(config, models, prompts) / processes
    parts = [f"distil {_duration(distil_s)}"]
    if isinstance(draft, PreTrainedModel | FeatureHead):
        parts.append(f"train {_duration(_train_s(config, runs, models, draft) / processes)}")
    evaluation = eval_config(config)
    evaluate_s = _counting_s(config, evaluation, models, draft, prompts) / processes
    evaluate_s += _timing_s(evaluation, costs)
    parts.append(f"evaluate {_duration(evaluate_s)}")
    return f"expected at most: {', '.join(parts)} (some steps of each were timed)"


def _distil_s(config: AlignConfig, models: LoadedModels, prompts: Sequence[Sequence[int]]) -> float:
    options = config.distill
    samples = options["num_samples"]
    rows = [prompt for prompt in prompts for _ in range(samples)][: options["batch_size"]]
    cost = _row_cost(SpeculativeDecoder(models.target), rows, options["temperature"])
    # The target writes the chats that it replays from their first turn on.
    turns = 2 if options.get("general_from") == "magpie" else 1
    answers = options["max_prompts"] * samples + turns * options["general_texts"]
    return answers * cost.seconds(options["max_new_tokens"])


def _train_s(
    config: AlignConfig, runs: Sequence[TrainConfig], models: LoadedModels, draft: Draft
) -> float:
    options = config.distill
    answers = options["max_prompts"] * options["num_samples"] + options["general_texts"]
    rows = sum(run.steps or 0 for run in runs) * config.train["rows_per_step"]
    read_s, draft_s = _row_s(models.target, draft, config.train["max_length"])
    last = runs[-1]
    depths = last.head.test_steps or getattr(TRAINEES[last.kind], "usual_steps", 1)
    # Cached, the states that a head reads are computed once.
    read = answers if isinstance(draft, FeatureHead) and last.head.features else rows
    return read * read_s + rows * depths * draft_s


def _counting_s(
    config: AlignConfig,
    evaluation: EvalConfig,
    models: LoadedModels,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
) -> float:
    """Seconds of decoding every set in batches: with the target alone, and with every draft and
    tree. Each draft takes what this one takes.
    """
    hottest = max(evaluation.temperature)
    batch = prompts[: evaluation.batch_size]
    alone = _row_cost(SpeculativeDecoder(models.target), batch, hottest)
    drafts = len(evaluation.draft)
    # Acceptance takes a forward of the whole text for the target and each draft.
    row_s = alone.seconds(evaluation.max_new_tokens) + (1 + drafts) * alone.prefill_s
    for decoder in _drafting(evaluation, models, draft):
        row_s += drafts * _row_cost(decoder, batch, hottest).seconds(evaluation.max_new_tokens)
    rows = len(evaluation.ood) * evaluation.max_prompts
    rows += len(evaluation.id) * min(evaluation.max_prompts, config.heldout_prompts or 1 << 30)
    return rows * len(evaluation.temperature) * row_s


def _drafting(
    evaluation: EvalConfig, models: LoadedModels, draft: Draft
) -> Iterator[SpeculativeDecoder]:
    """A decoder for each tree. A tree of a plan is not known yet; what does not fit is refused by
    the evaluation.
    """
    for tree in evaluation.tree:
        if tree == "none" or tree.startswith("auto"):
            continue
        proposer = PROPOSERS[kind_of(draft)].make(draft)
        with suppress(ValueError):
            yield SpeculativeDecoder(models.target, proposer, shape_of(tree))


def _timing_s(evaluation: EvalConfig, costs: Sequence[StepCost]) -> float:
    """Seconds of timing the target alone, and every draft and tree, one row at a time."""
    sets = len(evaluation.id) + len(evaluation.ood)
    steps = sets * evaluation.speed_prompts * evaluation.max_new_tokens
    ways = len(evaluation.draft) * len(evaluation.tree)
    return sum(steps * cost.target_s * (1 + ways * cost.ratio) for cost in costs)


def _row_cost(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], temperature: float
) -> _RowCost:
    sampling = Sampling(temperature=temperature)
    # The first call also packs weights.
    decoder.generate([prompts[0]], sampling, 1)
    batch = decoder.generate(prompts, sampling, _TOKENS, eos_ids=())
    steps = max(answer.stats.target_calls for answer in batch.generations)
    rows = len(batch.generations)
    return _RowCost(batch.prefill_s / rows, batch.decode_s / (steps * rows))


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
