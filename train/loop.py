"""The training loop: batches in, loss per valid token, an optimizer step, held-out figures, checkpoints.

Legend: B sequences, T tokens, N valid response tokens, V vocabulary.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import RunError
from draftsmith.io import write_text_atomic
from draftsmith.progress import progress
from draftsmith.sampling import Sampling, acceptance, probs
from train import checkpoint
from train.checkpoint import Position
from train.config import Optim, TrainConfig
from train.data import IGNORE, Batch, Examples, collate, order
from train.losses import LOSSES, NEEDS_TARGET

# alpha is quoted while training for sampling at temperature 1, the law the losses are about.
_LAW = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Job:
    """Everything a run is made of. `model` is the bare draft; the loop wraps it for the processes there are."""

    config: TrainConfig
    accelerator: Accelerator
    model: PreTrainedModel
    target: PreTrainedModel | None
    training: Examples
    heldout: Examples
    steps: int
    run_dir: Path


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then cosine to the final fraction."""
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
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))


def valid_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits `[N, V]` at the positions that predict a response token."""
    logits_BTV: Tensor = model(input_ids=batch.ids_BT, use_cache=False).logits
    return logits_BTV[batch.labels_BT != IGNORE]


def global_batch(job: Job, step: int) -> tuple[list[list[int]], int]:
    """This process's rows of optimizer step `step`, one list a forward, and the valid tokens of all processes.

    The rows of a step are one run of the shuffled stream, dealt to (forward, process) in turn; so the same rows
    make a step however they are divided between batch size, accumulation and processes (law 6).
    """
    config, world = job.config, job.accelerator.num_processes
    size = config.batch_size * config.accumulation * world
    rows = order(len(job.training.rows), step * size, (step + 1) * size, config.seed)
    valid = int(job.training.valid_tokens[rows].sum())
    shares = rows.reshape(config.accumulation, world, config.batch_size)
    return [list(map(int, share)) for share in shares[:, job.accelerator.process_index]], valid


def training_step(job: Job, wrapped: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, float]:
    """One optimizer step; returns its loss per valid token, gradient norm, rate and tokens."""
    config, accelerator = job.config, job.accelerator
    loss_fn = LOSSES[config.objective]
    forwards, valid = global_batch(job, step)
    rate = learning_rate(config.optim, step, job.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for index, rows in enumerate(forwards):
        batch = collate(job.training, rows).to(accelerator.device)
        last = index == len(forwards) - 1
        with nullcontext() if last else accelerator.no_sync(wrapped):
            target_NV = None
            with accelerator.autocast():
                if config.objective in NEEDS_TARGET and job.target is not None:
                    with torch.no_grad():
                        target_NV = valid_logits(job.target, batch)
                draft_NV = valid_logits(wrapped, batch)
            tokens_N = batch.labels_BT[batch.labels_BT != IGNORE]
            loss = loss_fn(draft_NV, target_NV, tokens_N).sum()
            # Processes average their gradients; times their number, the average is the sum that is wanted.
            accelerator.backward(loss * (accelerator.num_processes / valid))
        total += loss.detach().double()
    limit = config.optim.clip_norm or math.inf
    norm = accelerator.clip_grad_norm_(wrapped.parameters(), limit)
    loss_per_token = float(accelerator.reduce(total, reduction="sum")) / valid
    for name, value in (("loss", loss_per_token), ("gradient norm", float(norm))):
        if not math.isfinite(value):
            raise RunError(f"step {step + 1}: the {name} is {value}; lower optim.lr (now {config.optim.lr})")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss_per_token, "lr": rate, "grad_norm": float(norm), "tokens": valid}


@torch.no_grad()
def evaluate(job: Job) -> dict[str, float]:
    """Held-out loss, and held-out alpha when there is a target, per valid token over all processes."""
    config, accelerator = job.config, job.accelerator
    job.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    # Longest first: rows of like length share a batch, and memory runs out at the start or not at all.
    longest = np.argsort(-job.heldout.valid_tokens, kind="stable")
    for rows in _dealt(longest.tolist(), config.batch_size, accelerator):
        batch = collate(job.heldout, rows).to(accelerator.device)
        tokens_N = batch.labels_BT[batch.labels_BT != IGNORE]
        with accelerator.autocast():
            draft_NV = valid_logits(job.model, batch)
            target_NV = valid_logits(job.target, batch) if job.target is not None else None
        sums[0] += LOSSES[config.objective](draft_NV, target_NV, tokens_N).double().sum()
        if target_NV is not None:
            sums[1] += acceptance(probs(target_NV, _LAW), probs(draft_NV, _LAW)).double().sum()
        sums[2] += len(tokens_N)
    job.model.train()
    loss, alpha, count = accelerator.reduce(sums, reduction="sum").tolist()
    if not math.isfinite(loss):
        raise RunError(f"the held-out loss is {loss}; the draft or the target gives numbers that are not finite")
    figures = {"heldout_loss": loss / count}
    if job.target is not None:
        figures["heldout_alpha"] = alpha / count
    return figures


def _dealt(rows: list[int], size: int, accelerator: Accelerator) -> Iterator[list[int]]:
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    yield from batches[accelerator.process_index :: accelerator.num_processes]


def fit(job: Job) -> tuple[Position, dict[str, float]]:
    """Train to the end, from wherever the run was left. The model then holds the best weights seen."""
    config, accelerator, model = job.config, job.accelerator, job.model
    optimizer = make_optimizer(model, config.optim)
    position = checkpoint.load_newest(job.run_dir, accelerator, model, optimizer)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    metrics = Metrics(job.run_dir / "metrics.jsonl", accelerator, position.step)
    model.train()
    if position.step == 0:
        position = _judge(job, position, metrics)
    note = _note(position)
    with progress(f"train {config.objective}", job.steps, position.step) as advance:
        while position.step < job.steps and not position.stopped:
            started = time.perf_counter()
            figures = training_step(job, wrapped, optimizer, position.step)
            position = replace(position, step=position.step + 1)
            speed = figures["tokens"] / (time.perf_counter() - started)
            metrics.write(position.step, figures, clock={"tokens_per_s": speed})
            if position.step % config.eval_every == 0 or position.step == job.steps:
                position = _judge(job, position, metrics)
                note = _note(position)
            if position.step % config.save_every == 0 or position.stopped:
                checkpoint.save(job.run_dir, accelerator, model, optimizer, position)
            advance(1, f"loss {figures['loss']:.3f} {note}")
    checkpoint.load_best(job.run_dir, model)
    return position, evaluate(job)


def _judge(job: Job, position: Position, metrics: "Metrics") -> Position:
    """Evaluate; keep the weights when they are the best so far; stop when they have long not been."""
    figures = evaluate(job)
    metrics.write(position.step, figures)
    loss = figures["heldout_loss"]
    if position.best_loss is None or loss < position.best_loss:
        if job.accelerator.is_main_process:
            checkpoint.save_best(job.run_dir, job.model)
        job.accelerator.wait_for_everyone()
        return replace(position, best_loss=loss, best_step=position.step, evaluations_since_best=0)
    since = position.evaluations_since_best + 1
    stopped = 0 < job.config.patience <= since
    return replace(position, evaluations_since_best=since, stopped=stopped)


def _note(position: Position) -> str:
    return f"best held-out {position.best_loss:.3f} at step {position.best_step}"


class Metrics:
    """metrics.jsonl: one object a line, no clock times, so that a resumed run has the bytes of one never killed."""

    def __init__(self, path: Path, accelerator: Accelerator, step: int) -> None:
        self.path = path
        self.accelerator = accelerator
        if accelerator.is_main_process:
            kept = []
            if step > 0:
                lines = path.read_text().splitlines() if path.exists() else []
                # The last line may be torn; it is then of a step after the checkpoint.
                kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            # Whole or not at all: a kill in here must not lose lines that no further step writes again.
            write_text_atomic(path, "".join(line + "\n" for line in kept))

    def write(self, step: int, figures: dict[str, float], clock: dict[str, float] | None = None) -> None:
        """Append figures; the tracker also gets what the clock says."""
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
        self.accelerator.log(figures | (clock or {}), step=step)
