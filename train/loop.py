"""The training loop: batches in, loss per valid token, an optimizer step, held-out figures,
checkpoints.

A killed run continues from `checkpoints/step_N`, bit for bit.
"""

import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.devices import peak_memory
from draftsmith.core.errors import RunError, ran_out
from draftsmith.core.io import write_text_atomic, writing
from draftsmith.core.progress import progress
from draftsmith.core.ranks import groups
from draftsmith.core.signals import StopSignal
from draftsmith.decode.propose import CHAIN
from draftsmith.decode.stats import independent_tau
from draftsmith.train import checkpoint, parallel
from draftsmith.train.batch import Batch, LossSums
from draftsmith.train.batches import collate, heldout_batches, make_batches, reads
from draftsmith.train.job import Position, TrainingJob
from draftsmith.train.optimizer import learning_rate, make_optimizer
from draftsmith.train.parallel import Copies
from draftsmith.train.states_ahead import StatesAhead
from draftsmith.train.tracking import curve_names, log_again
from draftsmith.train.trainee import Trainee
from draftsmith.train.world import World


def curves(sums: LossSums, prefix: str) -> dict[str, float]:
    """Alpha of each measured depth, the tau it gives, and the target's mass on tokens that the
    draft lacks.
    """
    alphas = sums.alphas
    figures: dict[str, float] = {}
    if alphas:
        # Predict tau of the default chain, as `independent` in the predictions of `eval`.
        chain = alphas[:CHAIN] if len(alphas) > 1 else alphas * CHAIN
        figures |= {f"{prefix}alpha": alphas[0], f"{prefix}tau": independent_tau(chain)}
    if len(alphas) > 1:
        figures |= {f"{prefix}alpha_{depth}": alpha for depth, alpha in enumerate(alphas, start=1)}
    if sums.missing is not None:
        figures[f"{prefix}missing_mass"] = float(sums.missing / sums.tokens)
    return figures


def batches_ahead(job: TrainingJob, step: int) -> Generator[list[Batch], None, None]:
    """Yield the batches of the steps from `step` on; a thread makes the next ones meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(make_batches, job, step)
        for following in range(step + 1, job.steps + 1):
            batches = coming.result()
            if following < job.steps:
                coming = thread.submit(make_batches, job, following)
            yield batches


def training_step(
    job: TrainingJob, wrapped: Copies, step: int, batches: Sequence[Batch]
) -> dict[str, float]:
    """Do one optimizer step; return its loss per valid token, gradient norm, rates, tokens and
    `curves`.
    """
    config = job.config
    rate = learning_rate(config.optim, step, job.steps)
    rates = {"lr": rate}
    for group in wrapped.optimizer.param_groups:
        group["lr"] = rate * group.get("multiple", 1.0)
        if "multiple" in group:
            rates["muon_lr"] = group["lr"]
    counts = torch.stack([wrapped.trainee.count(batch) for batch in batches])
    valid = int(job.world.total(counts.sum()))
    vectors = []
    for index, batch in enumerate(batches):
        with wrapped.accumulating(last=index == len(batches) - 1):
            sums = wrapped.module(batch.to(job.world.device))
            # The wrappers average gradients over processes, which are equal within a group.
            # Multiply by the number of groups to get the sum, and divide by the number of valid
            # tokens of all: the loss is per token, not per process or batch (law 6).
            wrapped.backward(sums.loss * (groups() / max(valid, 1)))
        vectors.append(sums.to_vector())
    summed = _add_up(job.world, vectors)
    norms = wrapped.step(config.optim.clip_norm).to(summed)
    # The device is asked once a step.
    found = torch.cat([summed, norms.reshape(1)]).cpu()
    totals = LossSums.from_vector(found[:-1])
    loss = float(totals.loss) / max(valid, 1)
    norm = float(found[-1])
    if not math.isfinite(loss + norm):
        raise RunError(
            f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; lower optim.lr (now "
            f"{config.optim.lr})"
        )
    figures = {"loss": loss, **rates, "grad_norm": norm, "tokens": valid}
    return figures | curves(totals, "")


def _add_up(world: World, vectors: list[Tensor]) -> Tensor:
    # In the order of the batches, which decides how the sum rounds; then over the processes.
    return world.total(sum(vectors[1:], vectors[0]))


@torch.no_grad()
def evaluate(job: TrainingJob, wrapped: Copies) -> dict[str, float]:
    """Held-out loss per valid token over all processes; with a teacher, alpha and tau too."""
    world = job.world
    wrapped.trainee.eval()
    vectors = []
    for rows, counts in heldout_batches(job):
        batch = collate(job.heldout, rows).to(world.device)
        vector = wrapped.module(batch).to_vector()
        vectors.append(vector if counts else torch.zeros_like(vector))
    wrapped.trainee.train()
    totals = LossSums.from_vector(_add_up(world, vectors))
    loss = float(totals.loss)
    tokens = float(totals.tokens)
    if not math.isfinite(loss) or tokens == 0:
        raise RunError(
            f"the held-out loss is {loss} over {tokens:g} tokens; check the models and `heldout`"
        )
    return {"heldout_loss": loss / tokens, **curves(totals, "heldout_")}


def agree_to_stop(world: World, stop: StopSignal) -> None:
    """Set `stop.agreed` in every process if `stop.asked` is set in any."""
    stop.agreed |= bool(world.summed(torch.tensor(stop.asked)))


@dataclass
class Progress:
    """Where a run is, and the best weights so far: by name in the main process, empty elsewhere."""

    position: Position = field(default_factory=Position)
    best: dict[str, Tensor] = field(default_factory=dict)


def fit(job: TrainingJob, trainee: Trainee, stop: StopSignal) -> Progress:
    """Train to the end, from the newest checkpoint if there is one.

    SIGTERM raises Terminated and Ctrl-C KeyboardInterrupt, with a checkpoint saved. Raise RunError
    if a number is not finite or memory runs out.
    """
    run = Progress()
    states = None if trainee.target is None else trainee.target.states
    ahead = states if isinstance(states, StatesAhead) else None
    try:
        wrapped = _start(job, trainee, run)
        if ahead is not None:
            taught = job.config.kind != "lm" or job.objective.needs_target
            ahead.begin(reads(job, run.position.step, training=taught))
        trainee.train()
        stop.held = True
        begun = run.position.step
        with (
            progress(f"train {job.objective.spec}", job.steps, begun) as advance,
            closing(batches_ahead(job, begun)) as batches,
        ):
            if begun == 0:
                _evaluate_and_keep(job, wrapped, run)
            while run.position.step < job.steps and not run.position.stopped:
                figures = _step_and_evaluate(job, wrapped, run, batches)
                agree_to_stop(job.world, stop)
                position = run.position
                due = position.step % job.config.save_every == 0
                if due or position.stopped or stop.agreed:
                    checkpoint.save(job, wrapped, position, run.best)
                if stop.agreed:
                    raise stop.leaving()
                by = "alpha" if "heldout_alpha" in position.best_figures else "loss"
                figure = f"best held-out {by} {position.best_figures[f'heldout_{by}']:.3f}"
                figure += f" at step {position.best_step}"
                if ahead is not None:
                    figure += f", waited {ahead.waited():.0%} for states"
                advance(1, f"loss {figures['loss']:.3f} {figure}")
    except Exception as error:
        if isinstance(error, RunError) or not ran_out(error):
            raise
        raise _out_of_memory(job, run.position.step) from None
    finally:
        if ahead is not None:
            ahead.close()
    stop.held = False
    return run


def _step_and_evaluate(
    job: TrainingJob, wrapped: Copies, run: Progress, batches: Iterator[list[Batch]]
) -> dict[str, float]:
    """Do the next step, and the evaluation that is due behind it; return the step's figures."""
    started = time.perf_counter()
    figures = training_step(job, wrapped, run.position.step, next(batches))
    seconds = time.perf_counter() - started
    step = run.position.step + 1
    run.position = replace(run.position, step=step)
    memory = peak_memory(job.world.device)[0]
    clock = {"tokens_per_s": figures["tokens"] / seconds, "memory_gib": memory / 2**30}
    _log(job, step, figures, clock)
    if job.evaluates(step):
        _evaluate_and_keep(job, wrapped, run)
    return figures


def _out_of_memory(job: TrainingJob, step: int) -> RunError:
    config = job.config
    peak, kind = peak_memory(job.world.device)
    owner = "device" if kind == "cuda" else "process"
    return RunError(
        f"out of memory on {job.world.device.type} after step {step}, with batch_size "
        f"{config.batch_size} and max_length {config.max_length} (peak of the {owner}: "
        f"{peak / 2**30:.2f} GiB); lower batch_size and raise accumulation as much, or lower "
        "max_length; the run continues from its newest checkpoint"
    )


def _start(job: TrainingJob, trainee: Trainee, run: Progress) -> Copies:
    """Wrap the trainee and load the newest checkpoint, if there is one, into it and `run`.

    Take metrics.jsonl from it: the steps after it run again.
    """
    config = job.config
    saved = checkpoint.newest(job)
    if saved is not None:
        parallel.load_weights(trainee.draft, load_file(saved / "model.safetensors"))
    wrapped = parallel.wrap(
        job.world, trainee, lambda: make_optimizer(trainee.draft, config.optim), config
    )
    if saved is not None:
        wrapped.load_optimizer(load_file(saved / "optimizer.safetensors"))
        run.position = checkpoint.restore_random_state(job, saved)
    if not job.world.is_main:
        return wrapped
    figures = ""
    if saved is not None:
        run.best = load_file(saved / "best.safetensors")
        figures = (saved / job.metrics.name).read_text()
    write_text_atomic(job.metrics, figures)
    log_again(job.world.accelerator, figures.splitlines(keepends=True))
    return wrapped


def _evaluate_and_keep(job: TrainingJob, wrapped: Copies, run: Progress) -> None:
    """Evaluate; keep the weights if they are the best so far.

    Set `stopped` after `patience` evaluations without a new best.
    """
    position = run.position
    figures = evaluate(job, wrapped)
    _log(job, position.step, figures)
    value = figures.get("heldout_alpha", -figures["heldout_loss"])
    if position.best is None or value > position.best:
        run.best = wrapped.gather_weights()
        run.position = replace(
            position,
            best=value,
            best_step=position.step,
            best_figures=figures,
            evaluations_since_best=0,
        )
        return
    since = position.evaluations_since_best + 1
    stopped = 0 < job.config.patience <= since
    run.position = replace(position, evaluations_since_best=since, stopped=stopped)


def _log(
    job: TrainingJob, step: int, figures: dict[str, float], clock: dict[str, float] | None = None
) -> None:
    """Append figures to metrics.jsonl; only the tracker gets those that depend on the machine
    (`clock`).
    """
    if job.world.is_main:
        with writing(job.metrics), job.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
    job.world.accelerator.log(curve_names(figures | (clock or {})), step=step)
