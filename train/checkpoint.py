"""The state that a killed run continues from, bit for bit, and the draft checkpoint it ends with.

A checkpoint is a directory `checkpoints/step_N` of safetensors files; `state.json` has the position, the layout and the
files' hashes, so that a damaged checkpoint is found before it is used, and the one before it is taken instead. The best
weights at a checkpoint lie beside it in `best_N`, until the draft is published.
"""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import atomic_dir, read_json, sha256_file, writing
from draftsmith_core.processes import from_main, on_main
from draftsmith_core.runs import RECORD
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer
from train.config import TrainConfig
from train.parallel import WrappedTrainee, gather_optimizer, gather_weights, load_optimizer, load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule follow from `step` alone.

    best: the held-out figure that `best_by` names, at `best_step`; best_figures: all held-out figures at that step.
    """

    step: int = 0
    best_step: int = 0
    best: float | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class BatchLayout:
    """How the rows of a step are divided. Another layout of as many rows gives the same run up to rounding."""

    batch_size: int
    accumulation: int
    processes: int
    sharing: str

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.accumulation} x {self.processes} processes ({self.sharing})"


def save_best(run_dir: Path, wrapped: WrappedTrainee, step: int) -> None:
    """Keep the weights of this step as the best so far. Every process calls it."""
    weights = gather_weights(wrapped)

    def write() -> None:
        path = _best(run_dir, step)
        with writing(path), atomic_dir(path) as directory:
            save_file(weights, directory / "model.safetensors")
            _seal(directory, {})
        _drop_bests(run_dir, path)

    on_main(write)


def load_best(run_dir: Path, step: int) -> dict[str, Tensor]:
    """The best weights, which are those of this step; RunError if the file is damaged."""
    reason = _damage(_best(run_dir, step))
    if reason is not None:
        raise RunError(
            f"{_best(run_dir, step)}: {reason}; delete `checkpoints` beside it to train again from the start"
        )
    return load_file(_best(run_dir, step) / "model.safetensors")


def _best(run_dir: Path, step: int) -> Path:
    return run_dir / f"best_{step:08d}"


def _drop_bests(run_dir: Path, *wanted: Path) -> None:
    """Delete best weights that no checkpoint refers to: a run that continues from a checkpoint needs its own."""
    for path in _checkpoints(run_dir):
        # A damaged checkpoint is reported by `newest`.
        with suppress(InputError):
            wanted += (_best(run_dir, int(_state(path)["position"]["best_step"])),)
    for path in run_dir.glob("best_*"):
        if path not in wanted:
            shutil.rmtree(path)


def save(run_dir: Path, wrapped: WrappedTrainee, position: Position, layout: BatchLayout, config: TrainConfig) -> None:
    """Write `checkpoints/step_N` whole or not at all, then delete what need not be kept. Every process calls it.

    Raise RunError in every process if it cannot be written; the checkpoints before it are then untouched.
    """
    random_states = gather_object([_random_state()])
    weights, moments = gather_weights(wrapped), gather_optimizer(wrapped)

    def write() -> None:
        path = run_dir / "checkpoints" / f"step_{position.step:08d}"
        with writing(path), atomic_dir(path) as directory:
            save_file(weights, directory / "model.safetensors")
            save_file(moments, directory / "optimizer.safetensors")
            for rank, state in enumerate(random_states):
                save_file(state, directory / f"random_{rank}.safetensors")
            _seal(directory, {"position": asdict(position), "layout": asdict(layout)})
        _drop_old(run_dir, config)
        _drop_bests(run_dir)

    on_main(write)


def _drop_old(run_dir: Path, config: TrainConfig) -> None:
    """Keep the newest `config.keep` checkpoints of those at multiples of `config.save_every`, and the very newest."""
    *older, newest = _checkpoints(run_dir)
    # A checkpoint made because of a signal does not count, so that a stopped and resumed run leaves the same files as
    # one that was never stopped.
    regular = [path for path in (*older, newest) if int(path.name.removeprefix("step_")) % config.save_every == 0]
    for old in older:
        if old not in regular[-config.keep :]:
            shutil.rmtree(old)


def newest(run_dir: Path) -> Path | None:
    """The newest undamaged checkpoint, or None if there is none at all. Every process calls it.

    Skip a damaged one with a warning; raise RunError if all are damaged.
    """

    def look() -> Path | None:
        checkpoints = _checkpoints(run_dir)
        for path in reversed(checkpoints):
            reason = _damage(path)
            if reason is None:
                return path
            log.warning("%s: %s; continuing from the checkpoint before it", path, reason)
        if checkpoints:
            raise RunError(f"{run_dir / 'checkpoints'}: none of its checkpoints is whole; delete it to start again")
        return None

    return from_main(look)


def restore_weights(path: Path, draft: nn.Module) -> None:
    """Load a checkpoint's weights into a draft that is not wrapped yet."""
    load_weights(draft, load_file(path / "model.safetensors"))


def restore_rest(path: Path, wrapped: WrappedTrainee, layout: BatchLayout, seed: int) -> Position:
    """Restore the optimizer and the random states of a checkpoint; returns its position."""
    load_optimizer(wrapped, load_file(path / "optimizer.safetensors"))
    state = _state(path)
    position, before = Position(**state["position"]), BatchLayout(**state["layout"])
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


def _seal(directory: Path, state: dict[str, Any]) -> None:
    hashes = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    (directory / "state.json").write_text(json.dumps(state | {"files": hashes}))


def _state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = read_json(directory / "state.json", "the state of a training run")
    return state


def _damage(directory: Path) -> str | None:
    """What is damaged in a directory, or None if its files are what was written."""
    try:
        for name, digest in _state(directory)["files"].items():
            if sha256_file(directory / name) != digest:
                return f"{name} is not what was written"
    except InputError:
        return "state.json cannot be read"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read"
    return None


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def publish(
    out: Path, write: Callable[[Path], None], tokenizer: Tokenizer | None, record: dict[str, Any], config: TrainConfig
) -> None:
    """Write the draft checkpoint into `out`: every file whole, `config.json` last, so that half of it cannot be loaded.

    write: writes the draft's own files into a directory.
    """
    staging = out / "run" / "final"
    with writing(out), atomic_dir(staging) as directory:
        write(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        (directory / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    tidy(out / "run", config)


def tidy(run_dir: Path, config: TrainConfig) -> None:
    """Delete what only an unfinished run needs, also what one that was killed while it published has left."""
    for path in (run_dir / "final", *run_dir.glob("best_*")):
        shutil.rmtree(path, ignore_errors=True)
    if _checkpoints(run_dir):
        _drop_old(run_dir, config)
