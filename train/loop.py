"""The training loop: batches in, loss per valid token, an optimizer step, held-out figures, checkpoints.

Legend: D depths of a draft (1 for a language model), V vocabulary.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith_core.errors import RunError
from draftsmith_core.io import write_text_atomic
from draftsmith_core.processes import StopSignal
from draftsmith_core.progress import progress
from train import checkpoint, parallel
from train.checkpoint import Keeping, Layout, Position, writing
from train.config import Optim, TrainConfig
from train.data import Batch, Examples, collate, units
from train.loss_sums import Sums
from train.onpolicy import Answerer
from train.parallel import Engine
from train.world import World

# tau is quoted for a chain of this many drafted tokens where the draft can go to any depth.
CHAIN = 5


@dataclass(frozen=True)
class Job:
    """Everything a run is made of. `trainee` is bare; the loop hands it to the processes. `answerer`: the draft as one
    that answers, where training is on-policy.
    """

    config: TrainConfig
    world: World
    trainee: nn.Module
    training: Examples
    heldout: Examples
    steps: int
    run_dir: Path
    answerer: Answerer | None = None


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
    groups = [group for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2))


def layout(job: Job) -> Layout:
    """How this run divides a step's rows."""
    return Layout(job.config.batch_size, job.config.accumulation, job.world.size, job.world.kind)


def global_batch(job: Job, step: int) -> list[tuple[list[int], list[int]]]:
    """This process's units of optimizer step `step` and their places in the stream, a pair of lists a forward.

    The units of a step are one run of the shuffled stream, dealt to (forward, process) in turn; so the same units
    make a step however they are divided between batch size, accumulation and processes (law 6).
    """
    config, world = job.config, job.world
    size = config.batch_size * config.accumulation * world.size
    rows = units(job.training, step * size, (step + 1) * size, config.seed, config.replay_fraction)
    shape = (config.accumulation, world.size, config.batch_size)
    places = np.arange(step * size, (step + 1) * size)
    mine = [each.reshape(shape)[:, world.accelerator.process_index].tolist() for each in (rows, places)]
    return list(zip(*mine, strict=True))


@dataclass(frozen=True)
class Step:
    """What a step is made of, on this process; how many of its sequences the draft drew, and their tokens."""

    batches: list[Batch]
    drawn: int
    drawn_tokens: int


def make_step(job: Job, step: int) -> Step:
    """The batches of a step, with answers of the draft's own where `on_policy` asks for them."""
    batches, drawn = [], []
    for rows, places in global_batch(job, step):
        answers = {} if job.answerer is None else job.answerer.draw(job.training, rows, places)
        drawn += [len(answer) for _, answer in answers.values()]
        batches.append(collate(job.training, rows, answers).to(job.world.device))
    return Step(batches, len(drawn), sum(drawn))


def expected_tokens(alphas: list[float]) -> float:
    """Tokens a target call gives, estimated: 1 + alpha_1 + alpha_1 alpha_2 + ..., as if depths were independent.

    One alpha stands for every depth of a chain of CHAIN tokens (Leviathan et al. 2023, equation 1).
    """
    chain = alphas * CHAIN if len(alphas) == 1 else alphas
    return 1.0 + sum(math.prod(chain[: depth + 1]) for depth in range(len(chain)))


def _vector(sums: Sums) -> Tensor:
    """Loss, tokens, missing mass and over how many tokens, alpha of every depth, their tokens: fp64, so that they add
    up exactly enough.
    """
    zero = torch.zeros_like(sums.tokens)
    missing = (zero, zero) if sums.missing is None else (sums.missing, sums.tokens)
    parts = (sums.loss, sums.tokens, *missing, sums.depth_alpha_D, sums.depth_tokens_D)
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def _curves(vector: list[float], prefix: str) -> dict[str, float]:
    """Alpha by depth as far as it was measured, tau by it, and the mass that the draft has no word for."""
    missing, missing_tokens, *by_depth = vector[2:]
    depths = len(by_depth) // 2
    pairs = zip(by_depth[:depths], by_depth[depths:], strict=True)
    alphas = [alpha / tokens for alpha, tokens in pairs if tokens]
    figures: dict[str, float] = {}
    if alphas:
        figures |= {f"{prefix}alpha": alphas[0], f"{prefix}tau": expected_tokens(alphas)}
    if len(alphas) > 1:
        figures |= {f"{prefix}alpha_{depth}": alpha for depth, alpha in enumerate(alphas, start=1)}
    if missing_tokens:
        figures[f"{prefix}missing_mass"] = missing / missing_tokens
    return figures


def training_step(job: Job, engine: Engine, step: int, stop: StopSignal) -> dict[str, float]:
    """One optimizer step; returns its loss per valid token, gradient norm, rate, tokens, and alpha with a teacher.

    `stop.agreed` is set in every process when `stop.asked` was set in any.
    """
    config, accelerator = job.config, job.world.accelerator
    made = make_step(job, step)
    rate = learning_rate(config.optim, step, job.steps)
    parallel.set_rate(engine, rate)
    counts = torch.stack([job.trainee.count(batch) for batch in made.batches]).sum()  # type: ignore[operator]
    told = torch.stack([counts, *(torch.tensor(n, device=counts.device) for n in (made.drawn, made.drawn_tokens))])
    valid, drawn, drawn_tokens = accelerator.reduce(told, reduction="sum").tolist()
    total: Tensor | None = None
    for index, batch in enumerate(made.batches):
        with parallel.accumulating(engine, last=index == len(made.batches) - 1):
            sums = parallel.forward(engine, batch)
            # Processes average their gradients; times their number, the average is the sum that is wanted.
            parallel.backward(engine, sums.loss * (job.world.size / max(valid, 1)))
        total = _vector(sums) if total is None else total + _vector(sums)
    assert total is not None
    asked = torch.tensor([float(stop.asked > 0)], dtype=torch.float64, device=total.device)
    *vector, stops = accelerator.reduce(torch.cat([total, asked]), reduction="sum").tolist()
    stop.agreed = stops > 0
    loss = vector[0] / max(valid, 1)
    _check_finite(step, "loss", loss, config)
    norm = parallel.step(engine, config.optim.clip_norm)
    _check_finite(step, "gradient norm", norm, config)
    figures = {"loss": loss, "lr": rate, "grad_norm": norm, "tokens": valid, **_curves(vector, "")}
    return figures | ({"drawn_tokens": drawn_tokens / drawn} if drawn else {})


def _check_finite(step: int, name: str, value: float, config: TrainConfig) -> None:
    if not math.isfinite(value):
        raise RunError(f"step {step + 1}: the {name} is {value}; lower optim.lr (now {config.optim.lr})")


@torch.no_grad()
def evaluate(job: Job, engine: Engine) -> dict[str, float]:
    """Held-out loss, and held-out alpha and tau when there is a teacher, per valid token over all processes."""
    job.trainee.eval()
    total: Tensor | None = None
    for rows, counts in _dealt(job):
        vector = _vector(parallel.forward(engine, collate(job.heldout, rows).to(job.world.device)))
        vector = vector if counts else torch.zeros_like(vector)
        total = vector if total is None else total + vector
    job.trainee.train()
    assert total is not None
    vector = job.world.accelerator.reduce(total, reduction="sum").tolist()
    if not math.isfinite(vector[0]):
        raise RunError(f"the held-out loss is {vector[0]}; the draft or the target gives numbers that are not finite")
    if vector[1] == 0:
        raise RunError("the held-out data hold no token that this kind of draft is trained on; add data or `heldout`")
    return {"heldout_loss": vector[0] / vector[1], **_curves(vector, "heldout_")}


def _dealt(job: Job) -> Iterator[tuple[list[int], bool]]:
    """This process's batches of held-out units, and whether each counts: sharded weights need all to go in step."""
    # Longest first: rows of like length share a batch, and memory runs out at the start or not at all.
    longest = np.argsort(-job.heldout.valid_tokens, kind="stable").tolist()
    size, world = job.config.batch_size, job.world.size
    batches = [longest[i : i + size] for i in range(0, len(longest), size)]
    for index in range(job.world.accelerator.process_index, math.ceil(len(batches) / world) * world, world):
        yield (batches[index], True) if index < len(batches) else (batches[-1], False)


def fit(job: Job, stop: StopSignal) -> Position:
    """Train to the end, from wherever the run was left; the best weights are then `run/best`.

    After SIGTERM raises Terminated, after Ctrl-C KeyboardInterrupt, with a checkpoint made; RunError when a number is
    not finite.
    """
    config = job.config
    draft = job.trainee.draft
    assert isinstance(draft, nn.Module)
    found = checkpoint.newest(job.run_dir, job.world)
    if found is not None:
        checkpoint.restore_weights(found, draft)
    engine = parallel.wrap(job.world, job.trainee, lambda model: make_optimizer(model, config.optim), config)
    position = Position()
    if found is not None:
        position = checkpoint.restore_rest(found, engine, layout(job), config.seed)
        checkpoint.restore_best(job.run_dir, position)
    metrics = Metrics(job.run_dir / "metrics.jsonl", job.world.accelerator, position.step)
    job.trainee.train()
    keeping = Keeping(config.keep, config.save_every)
    stop.held = True
    if position.step == 0:
        position = _judge(job, engine, position, metrics)
    note = _note(config, position)
    with progress(f"train {config.objective}", job.steps, position.step) as advance:
        while position.step < job.steps and not position.stopped:
            started = time.perf_counter()
            figures = training_step(job, engine, position.step, stop)
            position = replace(position, step=position.step + 1)
            clock = {"tokens_per_s": figures["tokens"] / (time.perf_counter() - started), "memory_gib": memory_gib()}
            metrics.write(position.step, figures, clock)
            if position.step % config.eval_every == 0 or position.step == job.steps:
                position = _judge(job, engine, position, metrics)
                note = _note(config, position)
                _agree(job, stop)
            if position.step % config.save_every == 0 or position.stopped or stop.agreed:
                checkpoint.save(job.run_dir, engine, position, layout(job), keeping)
            if stop.agreed:
                raise stop.leaving()
            advance(1, f"loss {figures['loss']:.3f} {note}")
    stop.held = False
    return position


def _agree(job: Job, stop: StopSignal) -> None:
    """As at the end of a training step: an evaluation is long, and a signal does not come to all at once."""
    asked = torch.tensor(float(stop.asked > 0), device=job.world.device)
    stop.agreed = stop.agreed or float(job.world.accelerator.reduce(asked, reduction="sum")) > 0


def memory_gib() -> float:
    """The most memory this process has held, GiB: on its GPU, or without one altogether."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux counts kilobytes, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def _judge(job: Job, engine: Engine, position: Position, metrics: "Metrics") -> Position:
    """Evaluate; keep the weights when they are the best so far; stop when they have long not been."""
    figures = evaluate(job, engine)
    metrics.write(position.step, figures)
    by_alpha = judged_by(job.config, figures) == "alpha"
    value = figures["heldout_alpha"] if by_alpha else figures["heldout_loss"]
    if position.best is None or (value > position.best if by_alpha else value < position.best):
        checkpoint.save_best(job.run_dir, engine, position.step)
        return replace(position, best=value, best_step=position.step, best_figures=figures, evaluations_since_best=0)
    since = position.evaluations_since_best + 1
    stopped = 0 < job.config.patience <= since
    return replace(position, evaluations_since_best=since, stopped=stopped)


def judged_by(config: TrainConfig, figures: dict[str, float]) -> str:
    """What `best_by` comes to with these held-out figures: `alpha` or `loss`."""
    if config.best_by == "auto":
        return "alpha" if "heldout_alpha" in figures else "loss"
    return config.best_by


def _note(config: TrainConfig, position: Position) -> str:
    by = judged_by(config, position.best_figures)
    return f"best held-out {by} {position.best:.3f} at step {position.best_step}"


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
            with writing(self.path), self.path.open("a") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
        self.accelerator.log(figures | (clock or {}), step=step)
