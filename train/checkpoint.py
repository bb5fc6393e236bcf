"""The state that a killed run continues from, bit for bit, and the draft checkpoint it ends with.

`checkpoints/step_N` has safetensors files (the best weights so far among them) and `state.json` with the position, the
layout and the files' hashes, so that a damaged checkpoint is skipped.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError, RunError, one_line
from draftsmith_core.io import atomic_dir, read_json, sha256_file, writing
from draftsmith_core.processes import from_main, on_main
from draftsmith_core.runs import RECORD
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer
from train.config import TrainConfig
from train.parallel import WrappedTrainee, gather_optimizer, gather_weights, load_optimizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule follow from `step` alone.

    best: at `best_step`, held-out alpha, or without a teacher minus the loss. best_figures: all held-out figures there.
    """

    step: int = 0
    best_step: int = 0
    best: float | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped: bool = False


def save(
    run_dir: Path,
    wrapped: WrappedTrainee,
    position: Position,
    best: dict[str, Tensor],
    layout: str,
    config: TrainConfig,
) -> None:
    """Write `checkpoints/step_N` whole or not at all, then delete what need not be kept. Every process calls it.

    best: the best weights so far, in the main process. Raise RunError in every process if it cannot be written; the
    checkpoints before it are then untouched.
    """
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    random_states = gather_object([random_state])
    weights, moments = gather_weights(wrapped), gather_optimizer(wrapped)

    def write() -> None:
        path = run_dir / "checkpoints" / f"step_{position.step:08d}"
        with writing(path), atomic_dir(path) as directory:
            for name, tensors in (("model", weights), ("optimizer", moments), ("best", best)):
                save_file(tensors, directory / f"{name}.safetensors")
            for rank, state in enumerate(random_states):
                save_file(state, directory / f"random_{rank}.safetensors")
            files = {file.name: sha256_file(file) for file in sorted(directory.iterdir())}
            state = {"position": asdict(position), "layout": layout, "files": files}
            (directory / "state.json").write_text(json.dumps(state))
        drop_old(run_dir, config)

    on_main(write)


def drop_old(run_dir: Path, config: TrainConfig) -> None:
    """Keep the newest `config.keep` checkpoints of those at multiples of `config.save_every`, and the very newest.

    Also delete what a run that was killed while it published has left.
    """
    shutil.rmtree(run_dir / "final", ignore_errors=True)
    checkpoints = _checkpoints(run_dir)
    # A checkpoint made because of a signal does not count, so that a stopped and resumed run leaves the same files as
    # one that was never stopped.
    regular = [path for path in checkpoints if int(path.name.removeprefix("step_")) % config.save_every == 0]
    for old in checkpoints[:-1]:
        if old not in regular[-config.keep :]:
            shutil.rmtree(old)


def newest(run_dir: Path) -> Path | None:
    """The newest undamaged checkpoint, None if there is none, RunError if all are damaged. Every process calls it."""

    def look() -> Path | None:
        checkpoints = _checkpoints(run_dir)
        for path in reversed(checkpoints):
            try:
                for name, digest in _state(path)["files"].items():
                    if sha256_file(path / name) != digest:
                        raise InputError(f"{name} is not what was written")
            except (InputError, OSError) as error:
                log.warning("%s: %s; continuing from the checkpoint before it", path, one_line(error))
            else:
                return path
        if checkpoints:
            raise RunError(f"{run_dir / 'checkpoints'}: none of its checkpoints is whole; delete it to start again")
        return None

    return from_main(look)


def restore_rest(path: Path, wrapped: WrappedTrainee, layout: str, seed: int) -> Position:
    """Restore the optimizer and the random states of a checkpoint; return its position.

    layout: how the rows of a step are divided now. Another one gives the same run up to rounding, from a fresh seed.
    """
    load_optimizer(wrapped, load_file(path / "optimizer.safetensors"))
    state = _state(path)
    position, before = Position(**state["position"]), state["layout"]
    rank = wrapped.world.accelerator.process_index
    if before == layout:
        random_state = load_file(path / f"random_{rank}.safetensors")
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda"])
        return position
    if wrapped.world.accelerator.is_main_process:
        log.warning("continuing a run of %s as %s: the same up to rounding", before, layout)
    torch.manual_seed(row_seed(seed, f"process {rank} from step {position.step}"))
    return position


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def _state(directory: Path) -> dict[str, Any]:
    return dict(read_json(directory / "state.json", "the state of a training run"))


def publish(
    out: Path, write: Callable[[Path], None], tokenizer: Tokenizer | None, record: dict[str, Any], config: TrainConfig
) -> None:
    """Write the draft checkpoint into `out`, `config.json` last. write: writes the draft's own files to a directory."""
    staging = out / "run" / "final"
    with writing(out), atomic_dir(staging) as directory:
        write(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        (directory / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    drop_old(out / "run", config)
