"""The training loop: batches in, loss per valid token, an optimizer step, held-out figures, checkpoints.

Legend: D depths of a draft (1 for a language model), V vocabulary.
"""

import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.defaults import CHAIN
from decode.stats import independent_tau
from draftsmith_core.errors import RunError
from draftsmith_core.io import write_text_atomic, writing
from draftsmith_core.models import peak_memory
from draftsmith_core.processes import StopSignal
from draftsmith_core.progress import progress
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer
from train import checkpoint, parallel
from train.batch import Batch, LossSums
from train.checkpoint import Position
from train.config import Optim, TrainConfig
from train.data import Examples, collate, units
from train.objective import Objective
from train.onpolicy import Answerer
from train.parallel import World, WrappedTrainee


@dataclass(frozen=True)
class TrainingJob:
    """All that a run needs. trainee: not wrapped yet. answerer: generates with the draft if training is on-policy.

    frozen: the models that are only read, by role (target, reference, anchor). identity: settings that must match for a
    run to resume this one. tokenizer: saved with the draft.
    """

    config: TrainConfig
    world: World
    objective: Objective
    trainee: nn.Module
    training: Examples
    heldout: Examples
    steps: int
    identity: dict[str, Any]
    tokenizer: Tokenizer | None = None
    answerer: Answerer | None = None
    frozen: dict[str, PreTrainedModel] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Directory of what only training needs: checkpoints, the best weights, metrics."""
        return Path(self.config.out) / "run"

    @property
    def layout(self) -> str:
        """How this run divides the rows of a step."""
        config, world = self.config, self.world
        return f"{config.batch_size} x {config.accumulation} x {world.size} processes ({world.sharing})"


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then cosine to the final fraction."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    through = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    fraction = optim.final_lr_fraction
    return optim.lr * (fraction + (1 - fraction) * 0.5 * (1 + math.cos(math.pi * through)))


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only, or plain SGD."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))


def make_batches(job: TrainingJob, step: int) -> tuple[list[Batch], list[int]]:
    """Return this process's batches of a step, and the lengths of the answers that the draft generated for them.

    The units of a step are consecutive in the shuffled stream and dealt to (forward, process) in turn, so that a step
    has the same units however they are divided (law 6).
    """
    config, world = job.config, job.world
    shape = (config.accumulation, world.size, config.batch_size)
    places = np.arange(step * math.prod(shape), (step + 1) * math.prod(shape))
    options = config.seed, config.replay_fraction, config.mixing_temperature
    rows = units(job.training, places[0], places[-1] + 1, *options)
    process = world.accelerator.process_index
    batches, lengths = [], []
    mine = (indices.reshape(shape)[:, process].tolist() for indices in (rows, places))
    for rows_B, places_B in zip(*mine, strict=True):
        answers = {} if job.answerer is None else job.answerer.draw(job.training, rows_B, places_B)
        lengths += [len(answer) for _, answer in answers.values()]
        seeds_B = torch.tensor([row_seed(config.seed, f"row {place}") for place in places_B])
        batches.append(replace(collate(job.training, rows_B, answers), seeds_B=seeds_B).to(world.device))
    return batches, lengths


def _vector(sums: LossSums) -> Tensor:
    """Pack the sums into one fp64 vector: loss, tokens, missing mass and its tokens, then alpha and tokens per depth.

    fp64, because the sums run over a whole held-out set.
    """
    zero = torch.zeros_like(sums.tokens)
    missing = (zero, zero) if sums.missing is None else (sums.missing, sums.tokens)
    parts = (sums.loss, sums.tokens, *missing, sums.depth_alpha_D, sums.depth_tokens_D)
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def _curves(vector: list[float], prefix: str) -> dict[str, float]:
    """Alpha of each measured depth, the tau it gives, and the target's mass on tokens that the draft lacks."""
    missing, missing_tokens, *by_depth = vector[2:]
    depths = len(by_depth) // 2
    pairs = zip(by_depth[:depths], by_depth[depths:], strict=True)
    alphas = [alpha / tokens for alpha, tokens in pairs if tokens]
    figures: dict[str, float] = {}
    if alphas:
        # Predict tau of the default chain, as `independent` in the predictions of `eval`.
        chain = alphas[:CHAIN] if len(alphas) > 1 else alphas * CHAIN
        figures |= {f"{prefix}alpha": alphas[0], f"{prefix}tau": independent_tau(chain)}
    if len(alphas) > 1:
        figures |= {f"{prefix}alpha_{depth}": alpha for depth, alpha in enumerate(alphas, start=1)}
    if missing_tokens:
        figures[f"{prefix}missing_mass"] = missing / missing_tokens
    return figures


def training_step(job: TrainingJob, wrapped: WrappedTrainee, step: int, stop: StopSignal) -> dict[str, float]:
    """Do one optimizer step; return its loss per valid token, gradient norm, rate, tokens, and alpha if there is one.

    Afterwards `stop.agreed` is set in every process if `stop.asked` was set in any.
    """
    config, accelerator = job.config, job.world.accelerator
    batches, drawn = make_batches(job, step)
    rate = learning_rate(config.optim, step, job.steps)
    for group in wrapped.optimizer.param_groups:
        group["lr"] = rate
    counts = torch.stack([job.trainee.count(batch) for batch in batches]).sum()  # type: ignore[operator]
    local = torch.stack([counts, *(torch.tensor(n, device=counts.device) for n in (len(drawn), sum(drawn)))])
    valid, answers, answer_tokens = accelerator.reduce(local, reduction="sum").tolist()
    total: Tensor | None = None
    for index, batch in enumerate(batches):
        with parallel.accumulating(wrapped, last=index == len(batches) - 1):
            sums = wrapped.module(batch)
            # The wrappers average gradients over processes. Multiply by their number to get the sum, and divide by the
            # number of valid tokens of all processes: the loss is per token, not per process or batch (law 6).
            parallel.backward(wrapped, sums.loss * (job.world.size / max(valid, 1)))
        total = _vector(sums) if total is None else total + _vector(sums)
    assert total is not None
    asked = torch.tensor([float(stop.asked > 0)], dtype=torch.float64, device=total.device)
    *vector, stops = accelerator.reduce(torch.cat([total, asked]), reduction="sum").tolist()
    stop.agreed = stops > 0
    loss = vector[0] / max(valid, 1)
    norm = parallel.step(wrapped, config.optim.clip_norm) if math.isfinite(loss) else math.nan
    if not math.isfinite(norm):
        raise RunError(
            f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; lower optim.lr (now {config.optim.lr})"
        )
    figures = {"loss": loss, "lr": rate, "grad_norm": norm, "tokens": valid, **_curves(vector, "")}
    return figures | ({"drawn_tokens": answer_tokens / answers} if answers else {})


@torch.no_grad()
def evaluate(job: TrainingJob, wrapped: WrappedTrainee) -> dict[str, float]:
    """Held-out loss per valid token over all processes; with a teacher, alpha and tau too."""
    job.trainee.eval()
    # Longest first: rows of similar length share a batch, and if memory runs out, it does so in the first.
    longest = np.argsort(-job.heldout.valid_tokens, kind="stable").tolist()
    size, world = job.config.batch_size, job.world.size
    batches = [longest[i : i + size] for i in range(0, len(longest), size)]
    total: Tensor | None = None
    # Sharded weights require the same number of forwards in every process: one with fewer batches repeats the last
    # batch, which does not count.
    for index in range(job.world.accelerator.process_index, math.ceil(len(batches) / world) * world, world):
        rows = batches[min(index, len(batches) - 1)]
        vector = _vector(wrapped.module(collate(job.heldout, rows).to(job.world.device)))
        vector = vector if index < len(batches) else torch.zeros_like(vector)
        total = vector if total is None else total + vector
    job.trainee.train()
    assert total is not None
    vector = job.world.accelerator.reduce(total, reduction="sum").tolist()
    if not math.isfinite(vector[0]) or vector[1] == 0:
        raise RunError(f"the held-out loss is {vector[0]} over {vector[1]:g} tokens; check the models and `heldout`")
    return {"heldout_loss": vector[0] / vector[1], **_curves(vector, "heldout_")}


def fit(job: TrainingJob, stop: StopSignal) -> tuple[Position, dict[str, Tensor]]:
    """Train to the end, from the newest checkpoint if there is one. Return the last position and the best weights.

    The weights are by name, in the main process only.

    SIGTERM raises Terminated and Ctrl-C KeyboardInterrupt, with a checkpoint saved. Raise RunError if a number is not
    finite or memory runs out.
    """
    config, position = job.config, Position()
    try:
        wrapped, position, best = _start(job)
        job.trainee.train()
        stop.held = True
        if position.step == 0:
            position, best = _evaluate_and_keep(job, wrapped, position, best)
        with progress(f"train {job.objective.spec}", job.steps, position.step) as advance:
            while position.step < job.steps and not position.stopped:
                started = time.perf_counter()
                figures = training_step(job, wrapped, position.step, stop)
                position = replace(position, step=position.step + 1)
                speed = figures["tokens"] / (time.perf_counter() - started)
                clock = {"tokens_per_s": speed, "memory_gib": peak_memory(job.world.device)[0] / 2**30}
                _log(job, position.step, figures, clock)
                if position.step % config.eval_every == 0 or position.step == job.steps:
                    position, best = _evaluate_and_keep(job, wrapped, position, best)
                    # An evaluation may be long: agree on a signal that came during it before the next step.
                    asked = torch.tensor(float(stop.asked > 0), device=job.world.device)
                    stop.agreed |= float(job.world.accelerator.reduce(asked, reduction="sum")) > 0
                if position.step % config.save_every == 0 or position.stopped or stop.agreed:
                    checkpoint.save(job.run_dir, wrapped, position, best, job.layout, config)
                if stop.agreed:
                    raise stop.leaving()
                by = "alpha" if "heldout_alpha" in position.best_figures else "loss"
                figure = f"best held-out {by} {abs(position.best or 0.0):.3f}"
                advance(1, f"loss {figures['loss']:.3f} {figure} at step {position.best_step}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not should_reduce_batch_size(error):
            raise
        peak, kind = peak_memory(job.world.device)
        raise RunError(
            f"out of memory on {job.world.device.type} after step {position.step}, with batch_size {config.batch_size} "
            f"and max_length {config.max_length} (peak of the {'device' if kind == 'cuda' else 'process'}: "
            f"{peak / 2**30:.2f} GiB); lower batch_size and raise accumulation as much, or lower max_length; the run "
            f"continues from its newest checkpoint"
        ) from None
    finally:
        target: Any = getattr(job.trainee, "target", None)
        if target is not None and target.cache is not None:
            target.cache.flush()
    stop.held = False
    return position, best


def _start(job: TrainingJob) -> tuple[WrappedTrainee, Position, dict[str, Tensor]]:
    """Wrap the trainee and load the newest checkpoint, if there is one; also return the best weights so far.

    Cut metrics.jsonl after the checkpoint's step: the steps after it run again.
    """
    config, draft = job.config, job.trainee.draft
    assert isinstance(draft, nn.Module)
    newest = checkpoint.newest(job.run_dir)
    if newest is not None:
        parallel.load_weights(draft, load_file(newest / "model.safetensors"))
    wrapped = parallel.wrap(job.world, job.trainee, lambda model: make_optimizer(model, config.optim), config)
    position = Position() if newest is None else checkpoint.restore_rest(newest, wrapped, job.layout, config.seed)
    if not job.world.accelerator.is_main_process:
        return wrapped, position, {}
    metrics = job.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if position.step > 0 and metrics.exists() else []
    # A kill may have cut the last line short; its step is after the checkpoint.
    done = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= position.step]
    write_text_atomic(metrics, "".join(line + "\n" for line in done))
    return wrapped, position, {} if newest is None else load_file(newest / "best.safetensors")


def _evaluate_and_keep(
    job: TrainingJob, wrapped: WrappedTrainee, position: Position, best: dict[str, Tensor]
) -> tuple[Position, dict[str, Tensor]]:
    """Evaluate; return position and best weights. Set `stopped` after `patience` evaluations without a new best."""
    figures = evaluate(job, wrapped)
    _log(job, position.step, figures)
    value = figures.get("heldout_alpha", -figures["heldout_loss"])
    if position.best is None or value > position.best:
        position = replace(position, best=value, best_step=position.step, best_figures=figures)
        return replace(position, evaluations_since_best=0), parallel.gather_weights(wrapped)
    since = position.evaluations_since_best + 1
    return replace(position, evaluations_since_best=since, stopped=0 < job.config.patience <= since), best


def _log(job: TrainingJob, step: int, figures: dict[str, float], clock: dict[str, float] | None = None) -> None:
    """Append figures to metrics.jsonl; only the tracker gets those that depend on the machine (`clock`)."""
    path = job.run_dir / "metrics.jsonl"
    if job.world.accelerator.is_main_process:
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
    job.world.accelerator.log(figures | (clock or {}), step=step)
