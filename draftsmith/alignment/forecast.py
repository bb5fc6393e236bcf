"""What `align` times before it works: from when a draft pays, and how long each stage takes at
most.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import Stages
from draftsmith.core.ranks import launched
from draftsmith.core.sampling import Sampling
from draftsmith.decode import PROPOSERS, SpeculativeDecoder
from draftsmith.decode.tree import chain
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.feature_head import FeatureHead
from draftsmith.drafts.load import Draft, LoadedModels, depth_limit, kind_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.trainees import TRAINEES

# The chain whose step is timed, tokens of a timed run, and interleaved rounds.
_CHAIN = 2
_TOKENS = 8
_ROUNDS = 5


def untrained(models: LoadedModels, stages: Stages) -> Draft:
    """Return the draft before its training: the one that was given, or a fresh head."""
    if models.drafts:
        return next(iter(models.drafts.values()))
    run = next(iter(stages.training.values()))
    if run.kind == "eagle3" and run.draft_vocab_size is not None:
        return Eagle3Head.fresh(models.target, draft_vocab=range(run.draft_vocab_size)).eval()
    return HEADS[run.kind].fresh(models.target).eval()


def step_costs(
    models: LoadedModels,
    draft: Draft,
    prompt: Sequence[int],
    temperatures: Sequence[float],
) -> dict[float, float]:
    """Return, by temperature, the seconds of a step on chain:2 over those of the target's own, of
    one row: the tokens per call from which a draft pays. Empty if the draft is not that deep.

    What a draft accepts does not change what a step costs, so an untrained one is timed.
    """
    if (depth_limit(draft) or _CHAIN) < _CHAIN:
        return {}
    proposer = PROPOSERS[kind_of(draft)].make(draft)
    decoders = [
        SpeculativeDecoder(models.target),
        SpeculativeDecoder(models.target, proposer, chain(_CHAIN)),
    ]
    costs = {}
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature)
        alone: list[float] = []
        drafted: list[float] = []
        for _ in range(1 + _ROUNDS):
            for decoder, seconds in zip(decoders, (alone, drafted), strict=True):
                batch = decoder.generate([prompt], sampling, _TOKENS, eos_ids=())
                seconds.append(batch.decode_s / batch.generations[0].stats.target_calls)
        # The first round packs weights.
        pairs = zip(alone[1:], drafted[1:], strict=True)
        costs[temperature] = median(with_draft / without for without, with_draft in pairs)
    return costs


def pays(costs: Mapping[float, float]) -> str:
    """Say from how many tokens per call a draft pays here."""
    (first, ratio), *others = costs.items()
    text = f"pays: from {ratio:.2f} tokens per call at T = {first:g}"
    text += "".join(f", {ratio:.2f} at T = {temperature:g}" for temperature, ratio in others)
    text += f", on chain:{_CHAIN} here (its step was timed)"
    if min(costs.values()) > 1 + _CHAIN:
        text += ": more than it can bring, so no draft pays on it"
    return text


def expected(
    config: AlignConfig,
    stages: Stages,
    models: LoadedModels,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    costs: Mapping[float, float],
) -> str:
    """Return a line with the time of each stage, for answers of full length of which no token was
    drafted.

    draft: before its training. The training of Medusa, Hydra and block drafters is not timed; its
    progress line tells. costs: of `step_costs`.
    """
    options = config.distill
    evaluation = stages.evaluation
    alone = SpeculativeDecoder(models.target)
    # A row of a larger batch, as of distilling, takes no longer.
    together = prompts[: evaluation.batch_size]
    answers = options.max_prompts * options.num_samples
    # The target writes the chats that it replays from their first turn on.
    turns = 2 if options.general_from == "magpie" else 1
    written = answers + turns * options.general_texts
    answer_s = _answer_s(alone, together, options.temperature, options.max_new_tokens)
    expected_s = {"distil": written * answer_s / launched()}
    if isinstance(draft, PreTrainedModel | FeatureHead):
        runs = list(stages.training.values())
        trained = sum(run.steps or 0 for run in runs) * config.train.rows_per_step
        # Cached, the states that a head reads are computed once.
        cached = isinstance(draft, FeatureHead) and runs[0].head.features
        read = answers + options.general_texts if cached else trained
        read_s, draft_s = _row_s(models.target, draft, runs[0])
        expected_s["train"] = (read * read_s + trained * draft_s) / launched()
    # The target decodes every set alone, then with every draft and tree.
    trees = [tree for tree in evaluation.tree if tree != "none"]
    decoded = 1 + len(evaluation.draft) * len(trees) * max(costs.values(), default=_CHAIN)
    decoded *= (len(evaluation.id) + len(evaluation.ood)) * len(evaluation.temperature)
    hottest = max(evaluation.temperature)
    tokens = evaluation.max_new_tokens
    counted_s = _answer_s(alone, together, hottest, tokens) * evaluation.max_prompts / launched()
    timed_s = _answer_s(alone, prompts[:1], hottest, tokens) * evaluation.speed_prompts
    expected_s["evaluate"] = decoded * (counted_s + timed_s)
    line = ", ".join(f"{stage} {_duration(seconds)}" for stage, seconds in expected_s.items())
    return f"expected at most: {line} (some steps of each were timed)"


def _answer_s(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], temperature: float, tokens: int
) -> float:
    """Seconds of an answer, as one of a batch, if every step accepts nothing."""
    sampling = Sampling(temperature=temperature)
    # The first call also packs weights.
    decoder.generate([prompts[0]], sampling, 1)
    batch = decoder.generate(prompts, sampling, _TOKENS, eos_ids=())
    steps = max(answer.stats.target_calls for answer in batch.generations)
    return (batch.prefill_s + tokens * batch.decode_s / steps) / len(prompts)


def _row_s(target: PreTrainedModel, draft: nn.Module, run: TrainConfig) -> tuple[float, float]:
    """Time a row of training: a forward of the target, and a forward and backward of the draft at
    every depth.
    """
    usual: int = getattr(TRAINEES[run.kind], "usual_steps", 1)
    depths = run.head.test_steps or usual
    ids_BT = torch.zeros(1, run.max_length, dtype=torch.long, device=target.device)
    inputs = [ids_BT]
    if isinstance(draft, FeatureHead):
        config: Any = draft.config
        shape = (1, run.max_length, config.hidden_size)
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
    return read - began, depths * (_now(target) - read)


def _now(target: PreTrainedModel) -> float:
    """The time, once the target's device has done what it was asked."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
