"""The training loop: batches in, loss per valid token, an optimizer step, held-out figures,
checkpoints.

A killed run continues from `checkpoints/step_N`, bit for bit. A checkpoint holds safetensors files
(the best weights so far among them) and `state.json` with the position, the layout and the files'
hashes. The hashes reveal a damaged checkpoint, which is skipped.

Legend: D depths of a draft (1 for a language model), V vocabulary.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.propose import CHAIN
from decode.stats import independent_tau
from draftsmith_core.cards import checkpoint_card
from draftsmith_core.devices import peak_memory
from draftsmith_core.errors import InputError, RunError, one_line
from draftsmith_core.io import atomic_dir, read_json, sha256_file, write_text_atomic, writing
from draftsmith_core.progress import progress
from draftsmith_core.ranks import from_main, on_main
from draftsmith_core.runs import RECORD
from draftsmith_core.sampling import row_seed
from draftsmith_core.signals import StopSignal
from draftsmith_core.tokenization import Tokenizer
from train import parallel
from train.batch import Batch, LossSums
from train.config import Optim, TrainConfig
from train.data import Examples, collate, units
from train.objective import Objective
from train.parallel import World, WrappedTrainee

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingJob:
    """All that a run needs. trainee: not wrapped yet.

    identity: settings that must match for a run to resume this one. tokenizer: saved with the
    draft.
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
    target: PreTrainedModel | None = None

    @property
    def run_dir(self) -> Path:
        """Directory of what only training needs: checkpoints, the best weights, metrics."""
        return Path(self.config.out) / "run"

    @property
    def layout(self) -> str:
        """How this run divides the rows of a step."""
        config, world = self.config, self.world
        return (
            f"{config.batch_size} x {config.accumulation} x {world.size} processes "
            f"({world.sharing})"
        )


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule follow from `step` alone.

    best: held-out alpha at `best_step`; without a teacher, the negated held-out loss. best_figures:
    all figures there.
    """

    step: int = 0
    best_step: int = 0
    best: float | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped: bool = False


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then cosine to
    the final fraction.
    """
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


def make_batches(job: TrainingJob, step: int) -> list[Batch]:
    """Return this process's batches of a step.

    A step takes consecutive rows of the shuffled stream and deals them to (forward, process) in
    turn, so that its rows do not depend on how they are divided (law 6).
    """
    config, world = job.config, job.world
    shape = (config.accumulation, world.size, config.batch_size)
    places = np.arange(step * math.prod(shape), (step + 1) * math.prod(shape))
    options = config.seed, config.replay_fraction, config.mixing_temperature
    rows = units(job.training, places[0], places[-1] + 1, *options)
    process = world.accelerator.process_index
    batches = []
    mine = (indices.reshape(shape)[:, process].tolist() for indices in (rows, places))
    for rows_B, places_B in zip(*mine, strict=True):
        seeds_B = torch.tensor([row_seed(config.seed, f"row {place}") for place in places_B])
        batches.append(replace(collate(job.training, rows_B), seeds_B=seeds_B).to(world.device))
    return batches


def _vector(sums: LossSums) -> Tensor:
    """Pack the sums into one fp64 vector: loss, tokens, missing mass and its tokens, then alpha and
    tokens per depth.

    fp64, because the sums run over a whole held-out set.
    """
    zero = torch.zeros_like(sums.tokens)
    missing = (zero, zero) if sums.missing is None else (sums.missing, sums.tokens)
    parts = (sums.loss, sums.tokens, *missing, sums.depth_alpha_D, sums.depth_tokens_D)
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def _curves(vector: list[float], prefix: str) -> dict[str, float]:
    """Alpha of each measured depth, the tau it gives, and the target's mass on tokens that the
    draft lacks.
    """
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


def training_step(
    job: TrainingJob, wrapped: WrappedTrainee, step: int, stop: StopSignal
) -> dict[str, float]:
    """Do one optimizer step; return its loss per valid token, gradient norm, rate, tokens, and
    alpha if there is one.

    Afterwards `stop.agreed` is set in every process if `stop.asked` was set in any.
    """
    config, accelerator = job.config, job.world.accelerator
    batches = make_batches(job, step)
    rate = learning_rate(config.optim, step, job.steps)
    for group in wrapped.optimizer.param_groups:
        group["lr"] = rate
    counts = torch.stack([job.trainee.count(batch) for batch in batches]).sum()  # type: ignore[operator]
    valid = int(accelerator.reduce(counts, reduction="sum"))
    total: Tensor | None = None
    for index, batch in enumerate(batches):
        with parallel.accumulating(wrapped, last=index == len(batches) - 1):
            sums = wrapped.module(batch)
            # The wrappers average gradients over processes. Multiply by their number to get the
            # sum, and divide by the number of valid tokens of all processes: the loss is per token,
            # not per process or batch (law 6).
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
            f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; lower optim.lr (now "
            f"{config.optim.lr})"
        )
    return {"loss": loss, "lr": rate, "grad_norm": norm, "tokens": valid, **_curves(vector, "")}


@torch.no_grad()
def evaluate(job: TrainingJob, wrapped: WrappedTrainee) -> dict[str, float]:
    """Held-out loss per valid token over all processes; with a teacher, alpha and tau too."""
    job.trainee.eval()
    # Longest first: rows of similar length share a batch, and if memory runs out, it is in the
    # first batch.
    longest = np.argsort(-job.heldout.valid_tokens, kind="stable").tolist()
    size, world = job.config.batch_size, job.world.size
    batches = [longest[i : i + size] for i in range(0, len(longest), size)]
    total: Tensor | None = None
    # Sharded weights require the same number of forwards in every process: one with fewer batches
    # repeats the last batch, which does not count.
    for index in range(
        job.world.accelerator.process_index, math.ceil(len(batches) / world) * world, world
    ):
        rows = batches[min(index, len(batches) - 1)]
        vector = _vector(wrapped.module(collate(job.heldout, rows).to(job.world.device)))
        vector = vector if index < len(batches) else torch.zeros_like(vector)
        total = vector if total is None else total + vector
    job.trainee.train()
    assert total is not None
    vector = job.world.accelerator.reduce(total, reduction="sum").tolist()
    if not math.isfinite(vector[0]) or vector[1] == 0:
        raise RunError(
            f"the held-out loss is {vector[0]} over {vector[1]:g} tokens; check the models and "
            "`heldout`"
        )
    return {"heldout_loss": vector[0] / vector[1], **_curves(vector, "heldout_")}


def fit(job: TrainingJob, stop: StopSignal) -> tuple[Position, dict[str, Tensor]]:
    """Train to the end, from the newest checkpoint if there is one. Return the last position and
    the best weights.

    The weights are by name; outside the main process there are none.

    SIGTERM raises Terminated and Ctrl-C KeyboardInterrupt, with a checkpoint saved. Raise RunError
    if a number is not finite or memory runs out.
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
                clock = {
                    "tokens_per_s": speed,
                    "memory_gib": peak_memory(job.world.device)[0] / 2**30,
                }
                _log(job, position.step, figures, clock)
                if position.step % config.eval_every == 0 or position.step == job.steps:
                    position, best = _evaluate_and_keep(job, wrapped, position, best)
                    # An evaluation may be long. Before the next step, agree on any signal received
                    # during it.
                    asked = torch.tensor(float(stop.asked > 0), device=job.world.device)
                    stop.agreed |= float(job.world.accelerator.reduce(asked, reduction="sum")) > 0
                if position.step % config.save_every == 0 or position.stopped or stop.agreed:
                    save(job, wrapped, position, best)
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
            f"out of memory on {job.world.device.type} after step {position.step}, with "
            f"batch_size {config.batch_size} "
            f"and max_length {config.max_length} (peak of the "
            f"{'device' if kind == 'cuda' else 'process'}: "
            f"{peak / 2**30:.2f} GiB); lower batch_size and raise accumulation as much, or lower "
            "max_length; the run "
            f"continues from its newest checkpoint"
        ) from None
    finally:
        target: Any = getattr(job.trainee, "target", None)
        if target is not None and target.cache is not None:
            target.cache.flush()
    stop.held = False
    return position, best


def _start(job: TrainingJob) -> tuple[WrappedTrainee, Position, dict[str, Tensor]]:
    """Wrap the trainee and load the newest checkpoint, if there is one; also return the best
    weights so far.

    Cut metrics.jsonl after the checkpoint's step: the steps after it run again.
    """
    config, draft = job.config, job.trainee.draft
    assert isinstance(draft, nn.Module)
    checkpoint, position = newest(job.run_dir), Position()
    if checkpoint is not None:
        parallel.load_weights(draft, load_file(checkpoint / "model.safetensors"))
    wrapped = parallel.wrap(
        job.world, job.trainee, lambda model: make_optimizer(model, config.optim), config
    )
    if checkpoint is not None:
        parallel.load_optimizer(wrapped, load_file(checkpoint / "optimizer.safetensors"))
        position = _restore_random_state(job, checkpoint)
    if not job.world.accelerator.is_main_process:
        return wrapped, position, {}
    metrics = job.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if position.step > 0 and metrics.exists() else []
    # A kill may have cut the last line short; its step is after the checkpoint.
    done = [
        line for line in lines if line.endswith("}") and json.loads(line)["step"] <= position.step
    ]
    write_text_atomic(metrics, "".join(line + "\n" for line in done))
    return (
        wrapped,
        position,
        {} if checkpoint is None else load_file(checkpoint / "best.safetensors"),
    )


def _evaluate_and_keep(
    job: TrainingJob, wrapped: WrappedTrainee, position: Position, best: dict[str, Tensor]
) -> tuple[Position, dict[str, Tensor]]:
    """Evaluate; return position and best weights. Set `stopped` after `patience` evaluations
    without a new best.
    """
    figures = evaluate(job, wrapped)
    _log(job, position.step, figures)
    value = figures.get("heldout_alpha", -figures["heldout_loss"])
    if position.best is None or value > position.best:
        position = replace(position, best=value, best_step=position.step, best_figures=figures)
        return replace(position, evaluations_since_best=0), parallel.gather_weights(wrapped)
    since = position.evaluations_since_best + 1
    return replace(
        position, evaluations_since_best=since, stopped=0 < job.config.patience <= since
    ), best


def _log(
    job: TrainingJob, step: int, figures: dict[str, float], clock: dict[str, float] | None = None
) -> None:
    """Append figures to metrics.jsonl; only the tracker gets those that depend on the machine
    (`clock`).
    """
    path = job.run_dir / "metrics.jsonl"
    if job.world.accelerator.is_main_process:
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
    job.world.accelerator.log(figures | (clock or {}), step=step)


def save(
    job: TrainingJob, wrapped: WrappedTrainee, position: Position, best: dict[str, Tensor]
) -> None:
    """Write `checkpoints/step_N` whole or not at all, then delete old checkpoints. Every process
    calls it.

    best: the best weights so far, in the main process. Raise RunError in every process if it cannot
    be written; the checkpoints before it are then untouched.
    """
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    random_states = gather_object([random_state])
    weights, moments = parallel.gather_weights(wrapped), parallel.gather_optimizer(wrapped)

    def write() -> None:
        path = job.run_dir / "checkpoints" / f"step_{position.step:08d}"
        with writing(path), atomic_dir(path) as directory:
            for name, tensors in (("model", weights), ("optimizer", moments), ("best", best)):
                save_file(tensors, directory / f"{name}.safetensors")
            for rank, state in enumerate(random_states):
                save_file(state, directory / f"random_{rank}.safetensors")
            files = {file.name: sha256_file(file) for file in sorted(directory.iterdir())}
            state = {"position": asdict(position), "layout": job.layout, "files": files}
            (directory / "state.json").write_text(json.dumps(state))
        drop_old(job)

    on_main(write)


def drop_old(job: TrainingJob) -> None:
    """Keep the newest `keep` checkpoints of those at multiples of `save_every`, and the very
    newest.

    Also delete the staging directory of a killed `publish`.
    """
    shutil.rmtree(job.run_dir / "final", ignore_errors=True)
    checkpoints = _checkpoints(job.run_dir)
    # A checkpoint made because of a signal does not count, so that a stopped and resumed run leaves
    # the same files as one that was never stopped.
    every = job.config.save_every
    regular = [path for path in checkpoints if int(path.name.removeprefix("step_")) % every == 0]
    for old in checkpoints[:-1]:
        if old not in regular[-job.config.keep :]:
            shutil.rmtree(old)


def newest(run_dir: Path) -> Path | None:
    """Return the newest undamaged checkpoint, or None if there is no checkpoint. Every process
    calls this.

    Raise RunError if all checkpoints are damaged.
    """

    def look() -> Path | None:
        checkpoints = _checkpoints(run_dir)
        for path in reversed(checkpoints):
            try:
                for name, digest in _state(path)["files"].items():
                    if sha256_file(path / name) != digest:
                        raise InputError(f"{name} is not what was written")
            except (InputError, OSError) as error:
                log.warning(
                    "%s: %s; continuing from the checkpoint before it", path, one_line(error)
                )
            else:
                return path
        if checkpoints:
            raise RunError(
                f"{run_dir / 'checkpoints'}: none of its checkpoints is whole; delete it to "
                "start again"
            )
        return None

    return from_main(look)


def _restore_random_state(job: TrainingJob, checkpoint: Path) -> Position:
    """Restore the random states of a checkpoint; return its position.

    If the rows of a step are divided otherwise now, reseed; results then match up to rounding.
    """
    state, rank = _state(checkpoint), job.world.accelerator.process_index
    position, before = Position(**state["position"]), state["layout"]
    if before == job.layout:
        random_state = load_file(checkpoint / f"random_{rank}.safetensors")
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])
        return position
    if job.world.accelerator.is_main_process:
        log.warning(
            "continuing a run of %s as %s: results are equal up to rounding", before, job.layout
        )
    torch.manual_seed(row_seed(job.config.seed, f"process {rank} from step {position.step}"))
    return position


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def _state(directory: Path) -> dict[str, Any]:
    return dict(read_json(directory / "state.json", "the state of a training run"))


def publish(job: TrainingJob, write: Callable[[Path], None], record: dict[str, Any]) -> None:
    """Write the draft checkpoint into `out`, `config.json` last. write: writes the draft's own
    files to a directory.
    """
    out, staging = Path(job.config.out), job.run_dir / "final"
    with writing(out), atomic_dir(staging) as directory:
        write(directory)
        if job.tokenizer is not None:
            job.tokenizer.save_pretrained(directory)
        (directory / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    drop_old(job)
