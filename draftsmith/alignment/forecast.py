"""What `align` times before it works: from when a draft pays, and how long each stage takes at
most. Of a draft that cannot pay by the alpha of its training, only the acceptance is evaluated.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.stage_configs import Stages, stages_of
from draftsmith.core.devices import resolve_device
from draftsmith.core.ranks import groups, say
from draftsmith.core.record import read_record
from draftsmith.core.sampling import Sampling
from draftsmith.core.state_store import StateMemory
from draftsmith.decode import PROPOSERS, SpeculativeDecoder, Tree, parse_tree
from draftsmith.decode.tree import chain
from draftsmith.drafts.draft_vocabulary import (
    attach_draft_vocabulary,
    draft_vocabulary,
    trim,
)
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.load import Draft, LoadedModels, depth_limit, kind_of
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.config import TrainConfig
from draftsmith.train.draft_setup import is_untrained
from draftsmith.train.objective import parse_objective
from draftsmith.train.optimizer import make_optimizer
from draftsmith.train.trainees import TRAINEES

# The chain whose step is timed, tokens of a timed run, and interleaved rounds.
_CHAIN = 2
_TOKENS = 8
_ROUNDS = 3
# Answers that are written together: those of a larger batch take no longer each.
_TOGETHER = 8
# Held-out rows are measured while training, for a sixth of its time (`choices`).
_WITH_HELDOUT = 7 / 6
# Prompts of a set that are enough to confirm it.
_FEW = 8
_SHORTER = {
    "distil": "--distill.max_prompts",
    "train": "--train.steps",
    "evaluate": "--eval.max_prompts",
}


def untrained(models: LoadedModels, stages: Stages) -> Draft:
    """Return the draft before its training: the one that was given, or a fresh head. Which tokens
    it drafts does not change what it costs, so it drafts the first.
    """
    run = next(iter(stages.training.values()))
    if models.drafts:
        draft = next(iter(models.drafts.values()))
        size = run.draft_vocab_size
        # One that has a draft vocabulary already came without the other rows.
        if isinstance(draft, PreTrainedModel) and size and draft_vocabulary(draft) is None:
            trim(draft, torch.arange(size))
        return draft
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


def pays(costs: Mapping[float, float], *, mixture: bool = False) -> str:
    """Say from how many tokens per call a draft pays here. mixture: of experts, as the target."""
    (first, ratio), *others = costs.items()
    text = f"pays: from {ratio:.2f} tokens per call at T = {first:g}"
    text += "".join(f", {ratio:.2f} at T = {temperature:g}" for temperature, ratio in others)
    text += f", on chain:{_CHAIN} here (its step was timed)"
    if min(costs.values()) > 1 + _CHAIN:
        text += ": more than it can bring, so no draft pays on it"
    if mixture:
        text += "; a trained draft may need more, as its tokens may wake more of the experts"
    return text


@dataclass(frozen=True)
class StepTimes:
    """Seconds that were timed: of an answer of full length; of reading a row by the target, and of
    training on it; of a prompt of the evaluation in all its ways, together with others and alone.
    pays_from: tokens per target call that the cheapest tree needs; None if that was not timed.
    step_s: of the optimizer.
    """

    answer_s: float
    read_s: float
    train_s: float
    counted_s: float
    timed_s: float
    pays_from: float | None = None
    step_s: float = 0.0

    def of_stages(self, config: AlignConfig) -> dict[str, float]:
        """Return how long each stage takes at most, if no drafted token is accepted."""
        stages = stages_of(config)
        evaluation = stages.evaluation
        answers = config.distill.max_prompts * config.distill.num_samples
        # The target writes the chats that it replays from their first turn on.
        turns = 2 if config.distill.general_from == "magpie" else 1
        written = answers + turns * config.distill.general_texts
        steps = sum(run.steps or 0 for run in stages.training.values())
        trained = steps * config.train.rows_per_step
        read = trained
        if resolve_device(config.device).type == "cpu":
            # There the target's states are cached, or kept in memory.
            read = min(trained, answers + config.distill.general_texts)
        heldout = config.heldout_prompts or evaluation.max_prompts
        prompts = min(evaluation.max_prompts, heldout)
        return {
            "distil": written * self.answer_s / groups(),
            "train": steps * self.step_s
            + _WITH_HELDOUT * (read * self.read_s + trained * self.train_s) / groups(),
            "evaluate": self.counted_s * prompts / groups()
            + self.timed_s * min(prompts, evaluation.speed_prompts),
        }


def time_steps(
    stages: Stages,
    models: LoadedModels,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    costs: Mapping[float, float],
) -> StepTimes:
    """Time some steps of each stage. draft: before its training; afterwards it is fp32. costs: of
    `step_costs`.
    """
    options = stages.distill
    evaluation = stages.evaluation
    alone = SpeculativeDecoder(models.target)
    together = prompts[:_TOGETHER]
    # The target decodes every set alone, then with every draft and tree.
    trees = [tree for tree in evaluation.tree if tree != "none"]
    ways = 1 + len(evaluation.draft) * len(trees) * max(costs.values(), default=_CHAIN)
    ways *= (len(evaluation.id) + len(evaluation.ood)) * len(evaluation.temperature)
    tokens = evaluation.max_new_tokens
    assert options.temperature is not None
    prefill_s, step_s = _answering_s(alone, together, options.temperature)
    answer_s = prefill_s + options.max_new_tokens * step_s
    counted_s = ways * (prefill_s + tokens * step_s)
    prefill_s, step_s = _answering_s(alone, prompts[:1], max(evaluation.temperature))
    timed_s = ways * (prefill_s + tokens * step_s)
    run = next(iter(stages.training.values()))
    usual = round(mean(map(len, prompts))) + options.max_new_tokens
    length = min(usual, run.max_length)
    read_s, train_s = _row_s(models.target, draft, run, length, options.max_new_tokens)
    step_s = _step_s(draft, run)
    # No tree drafts in less than one call; the chain took two.
    pays_from = 1 + (min(costs.values()) - 1) / _CHAIN if costs else None
    return StepTimes(answer_s, read_s, train_s, counted_s, timed_s, pays_from, step_s)


def expected(seconds: Mapping[str, float], fixed: Collection[str] = ()) -> str:
    """Say how long each stage takes, and what shortens those that are not fixed."""
    stages = []
    for stage, each in seconds.items():
        by = "" if stage in fixed else f" ({_SHORTER[stage]})"
        stages.append(f"{stage} {duration(each)}{by}")
    return f"expected at most: {', '.join(stages)}"


def _answering_s(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[float, float]:
    """Seconds of a prompt and of a token of its answer, as one of a batch, if every step accepts
    nothing.
    """
    sampling = Sampling(temperature=temperature)
    # The first call also packs weights.
    decoder.generate([prompts[0]], sampling, 1)
    batch = decoder.generate(prompts, sampling, _TOKENS, eos_ids=())
    steps = max(answer.stats.target_calls for answer in batch.generations)
    return batch.prefill_s / len(prompts), batch.decode_s / steps / len(prompts)


def _row_s(
    target: PreTrainedModel, draft: Draft, run: TrainConfig, length: int, answer_tokens: int
) -> tuple[float, float]:
    """Time a row of training: reading it by the target, and all that the draft does with it."""
    ids_BT = torch.zeros(1, length, dtype=torch.long, device=target.device)
    labels_BT = ids_BT.clone()
    labels_BT[:, :-answer_tokens] = IGNORE
    batch = Batch(ids_BT, labels_BT)
    depths: dict[str, Any] = {}
    if run.head.test_steps is not None:
        depths["test_steps"] = run.head.test_steps
    if isinstance(draft, PreTrainedModel) and (ids_D := draft_vocabulary(draft)) is not None:
        # Training takes these rows of a whole projection; this one has no others.
        draft._forward_hooks.clear()
        attach_draft_vocabulary(draft, torch.arange(len(ids_D)))
    draft.requires_grad_().float()
    trainee = TRAINEES[run.kind](draft, parse_objective(run.objective), target, **depths)
    assert trainee.target is not None
    began = read = 0.0
    for _ in range(2):  # the first time kernels are loaded
        trainee.target.states = StateMemory(sys.maxsize, target.dtype, for_training=True)
        began = _now(target)
        trainee.target.read(batch)
        read = _now(target)
        trainee(batch).loss.backward()
    return read - began, _now(target) - read


def _step_s(draft: Draft, run: TrainConfig) -> float:
    """Time a step of the optimizer, with the gradients of the timed row."""
    name = run.optim.name or ("muon" if is_untrained(run.draft) else "adamw")
    optimizer = make_optimizer(draft, replace(run.optim, name=name, lr=run.optim.lr or 1e-4))
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def _now(target: PreTrainedModel) -> float:
    """The time, once the target's device has done what it was asked."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def most_tokens(alpha: float, trees: Sequence[str]) -> float:
    """Return the tokens per target call that a draft of this alpha has at most: on an endless
    chain, or on one of the trees if every sibling were accepted as often as the first.
    """
    most = 1 / max(1e-9, 1 - alpha)
    for spec in trees:
        shape = parse_tree(spec)
        if not isinstance(shape, Tree):
            return math.inf
        nodes = Counter(shape.depths)
        most = max(most, 1 + sum(min(1.0, nodes[depth] * alpha**depth) for depth in nodes))
    return most


def short_evaluation(config: AlignConfig, times: StepTimes | None) -> AlignConfig | None:
    """Return options that measure acceptance alone, and say why; None if a draft may pay, or if
    that is not known.
    """
    if times is None or times.pays_from is None:
        return None
    for name in config.trained():
        # A draft that was trained without a teacher has none.
        alpha = read_record(config.directory / name).get("heldout_alpha", 1.0)
        most = most_tokens(alpha, config.eval.tree)
        if most >= times.pays_from:
            return None
        say(
            f"{name}: held-out alpha {alpha:.3f} gives at most {most:.3f} tokens per target call, "
            f"and the cheapest tree needs {times.pays_from:.2f} here"
        )
    short = replace(
        config.eval,
        tree=["none"],
        speed_prompts=0,
        max_prompts=min(_FEW, config.eval.max_prompts),
        pays_from=round(times.pays_from, 2),
    )
    return replace(config, eval=short)
