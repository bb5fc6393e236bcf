"""Checkpoints of a training run, and the draft that it publishes.

A checkpoint holds safetensors files (the best weights so far among them) and `state.json` with the
position, the layout and the files' hashes, which reveal a damaged checkpoint; it is skipped.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.errors import InputError, RunError, fault
from draftsmith.core.io import (
    JsonObject,
    atomic_dir,
    checksums,
    first_damaged,
    read_json,
    write_sealed,
)
from draftsmith.core.ranks import from_main, on_main, own_group
from draftsmith.core.records import RECORD, note_progress
from draftsmith.core.sampling import row_seed
from draftsmith.drafts.cards import write_record
from draftsmith.train.job import Position, TrainingJob
from draftsmith.train.parallel import Copies

log = logging.getLogger(__name__)


def save(job: TrainingJob, wrapped: Copies, position: Position, best: dict[str, Tensor]) -> None:
    """Write `checkpoints/step_N` whole or not at all, then delete old ones. Every process calls it.

    best: the best weights so far, in the main process. Raise RunError in every process if it cannot
    be written; the checkpoints before it are then untouched.
    """
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    random_states = gather_object([random_state])
    tensors = {
        "model": wrapped.gather_weights(),
        "optimizer": wrapped.gather_optimizer(),
        "best": best,
    }

    def write() -> None:
        path = job.checkpoints / f"step_{position.step:08d}"
        with atomic_dir(path) as directory:
            for name, values in tensors.items():
                save_file(values, directory / f"{name}.safetensors")
            for rank, state in enumerate(random_states):
                save_file(state, directory / f"random_{rank}.safetensors")
            shutil.copy(job.metrics, directory)
            files = checksums(directory)
            state = {"position": asdict(position), "layout": job.layout, "files": files}
            write_sealed(directory / "state.json", state)
        drop_old(job)
        note_progress(Path(job.config.out), "steps", position.step, job.steps)

    on_main(write)


def drop_old(job: TrainingJob) -> None:
    """Keep the newest `keep` checkpoints at multiples of `save_every`, and the very newest.

    Also delete the staging directory of a killed `publish`.
    """
    shutil.rmtree(job.run_dir / "final", ignore_errors=True)
    checkpoints = _paths(job)
    # A checkpoint made because of a signal does not count, so that a stopped and resumed run leaves
    # the same files as one that was never stopped.
    every = job.config.save_every
    regular = [path for path in checkpoints if step_of(path) % every == 0]
    for old in checkpoints[:-1]:
        if old not in regular[-job.config.keep :]:
            shutil.rmtree(old)


def step_of(path: Path) -> int:
    """Steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def newest(job: TrainingJob) -> Path | None:
    """Return the newest undamaged checkpoint; None without any. Every process calls this.

    Raise RunError if all checkpoints are damaged.
    """

    def look() -> Path | None:
        checkpoints = _paths(job)
        for path in reversed(checkpoints):
            try:
                damaged = first_damaged(path, _state(path)["files"])
                if damaged:
                    raise InputError(f"{damaged} is not what was written")
            except (InputError, OSError) as error:
                log.warning(
                    "%s: %s; continuing from the checkpoint before it",
                    path,
                    fault(error),
                )
            else:
                return path
        if checkpoints:
            raise RunError(
                f"{job.checkpoints}: none of its checkpoints is whole; delete it to start again"
            )
        return None

    return from_main(look)


def restore_random_state(job: TrainingJob, checkpoint: Path) -> Position:
    """Restore the random states of a checkpoint; return its position.

    If the number of processes or the batch size changed, reseed; results then match up to rounding.
    """
    state = _state(checkpoint)
    rank = job.world.rank
    position = Position(**state["position"])
    before = state["layout"]
    if before == job.layout:
        random_state = load_file(checkpoint / f"random_{rank}.safetensors")
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])
        return position
    if job.world.is_main:
        log.warning(
            "continuing a run of %s as %s: results are equal up to rounding", before, job.layout
        )
    torch.manual_seed(row_seed(job.config.seed, f"process {own_group()} from step {position.step}"))
    return position


def is_published(job: TrainingJob) -> bool:
    """Whether the draft is published, and as it was written; warn if it is damaged."""
    out = Path(job.config.out)
    if not (out / "config.json").exists():
        return False
    try:
        record = read_json(out / RECORD, "the record of a draft", ["files", "metrics_sha256"])
    except InputError as error:
        log.warning("%s; publishing the draft again", fault(error))
        return False
    metrics = {f"run/{job.metrics.name}": record["metrics_sha256"]}
    if damaged := first_damaged(out, record["files"] | metrics):
        log.warning("%s: is not what was written; publishing the draft again", out / damaged)
    return damaged is None


@contextmanager
def publish(job: TrainingJob, record: JsonObject) -> Iterator[Path]:
    """Give a directory for the draft's own files; then write the draft checkpoint into `out`,
    `config.json` last.
    """
    out = Path(job.config.out)
    staging = job.run_dir / "final"
    with atomic_dir(staging) as directory:
        yield directory
        if job.tokenizer is not None:
            job.tokenizer.save_pretrained(directory)
        write_record(directory, record)
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    drop_old(job)


def _paths(job: TrainingJob) -> list[Path]:
    return sorted(job.checkpoints.glob("step_*"))


def _state(directory: Path) -> JsonObject:
    keys = ("position", "layout", "files")
    return dict(read_json(directory / "state.json", "the state of a training run", keys))
