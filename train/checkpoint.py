"""The state that a killed run continues from, bit for bit, and the draft checkpoint it ends with.

A checkpoint is a directory `checkpoints/step_N` of safetensors files, with their hashes in `files.json`: a damaged file
is found before it is used, and the checkpoint before it is taken instead.
"""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import atomic_dir, read_json, sha256_file, writing
from draftsmith_core.processes import on_main
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer
from train.config import TrainConfig
from train.parallel import World, WrappedTrainee, gather_optimizer, gather_weights, load_optimizer, load_weights

log = logging.getLogger(__name__)

_FILES = "files.json"


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


def save_best(run_dir: Path, wrapped: WrappedTrainee, step: int) -> None:
    """Keep the weights of this step as the best so far. Every process calls it.

    Best weights that a checkpoint refers to are kept beside them: a run that continues from that checkpoint needs them.
    """
    weights = gather_weights(wrapped)

    def write() -> None:
        best = run_dir / "best"
        before = _best_step(best)
        if before in _best_steps_of_checkpoints(run_dir) and before != step:
            shutil.rmtree(_aside(run_dir, before), ignore_errors=True)
            best.rename(_aside(run_dir, before))
        with writing(best), atomic_dir(best) as directory:
            save_file(weights, directory / "model.safetensors")
            (directory / "step.json").write_text(json.dumps({"step": step}))
            _seal(directory)

    on_main(write)


def restore_best(run_dir: Path, position: Position) -> None:
    """Make `best` that of a restored position. Every process calls it; RunError when those weights are gone."""

    def restore() -> None:
        best, aside = run_dir / "best", _aside(run_dir, position.best_step)
        if _best_step(best) != position.best_step:
            if not aside.exists():
                raise RunError(
                    f"{best}: the weights of step {position.best_step} are gone; "
                    f"delete `checkpoints` beside it to train again from the start"
                )
            shutil.rmtree(best, ignore_errors=True)
            aside.rename(best)
        _drop_bests(run_dir)

    on_main(restore)


def _best_step(directory: Path) -> int | None:
    try:
        step = read_json(directory / "step.json", "the step of the best weights")["step"]
    except (InputError, KeyError):
        return None
    return int(step)


def _aside(run_dir: Path, step: int) -> Path:
    return run_dir / f"best_{step:08d}"


def _best_steps_of_checkpoints(run_dir: Path) -> set[int]:
    found = set()
    for path in _checkpoints(run_dir):
        try:
            found.add(int(read_json(path / "position.json", "the position of a training run")["best_step"]))
        except (InputError, KeyError):
            continue  # a damaged checkpoint, which `newest` reports
    return found


def _drop_bests(run_dir: Path) -> None:
    wanted = {_aside(run_dir, step) for step in _best_steps_of_checkpoints(run_dir)}
    for path in run_dir.glob("best_*"):
        if path not in wanted:
            shutil.rmtree(path)


def load_best(run_dir: Path) -> dict[str, Tensor]:
    """The best weights so far, by name; RunError when the file is damaged."""
    reason = _damage(run_dir / "best")
    if reason is not None:
        raise RunError(f"{run_dir / 'best'}: {reason}; delete `checkpoints` beside it to train again from the start")
    return load_file(run_dir / "best" / "model.safetensors")


def save(run_dir: Path, wrapped: WrappedTrainee, position: Position, layout: BatchLayout, config: TrainConfig) -> None:
    """Write `checkpoints/step_N` whole or not at all, then delete what need not be kept. Every process calls it.

    RunError, one line, in every process when it cannot be written; the checkpoints before it are then untouched.
    """
    states = gather_object([_random_state()])
    weights, moments = gather_weights(wrapped), gather_optimizer(wrapped)

    def write() -> None:
        path = run_dir / "checkpoints" / f"step_{position.step:08d}"
        with writing(path), atomic_dir(path) as directory:
            save_file(weights, directory / "model.safetensors")
            save_file(moments, directory / "optimizer.safetensors")
            for rank, state in enumerate(states):
                save_file(state, directory / f"random_{rank}.safetensors")
            (directory / "position.json").write_text(json.dumps(asdict(position)))
            (directory / "layout.json").write_text(json.dumps(asdict(layout)))
            _seal(directory)
        _drop_old(run_dir, config)
        _drop_bests(run_dir)

    on_main(write)


def _drop_old(run_dir: Path, config: TrainConfig) -> None:
    """Keep the newest `config.keep` checkpoints of those at multiples of `config.save_every`, and the very newest."""
    *older, newest = _checkpoints(run_dir)
    # A checkpoint made because of a signal does not count, so that a stopped and resumed run leaves the same files as
    # one that was never stopped.
    regular = [path for path in [*older, newest] if _step(path) % config.save_every == 0]
    for old in older:
        if old not in regular[-config.keep :]:
            shutil.rmtree(old)


def newest(run_dir: Path, world: World) -> Path | None:
    """The newest undamaged checkpoint, or None when there is none at all. Every process calls it.

    A damaged one is skipped with a warning; RunError when all are damaged.
    """
    found: list[str | None] = [None]

    def look() -> None:
        there = _checkpoints(run_dir)
        for path in reversed(there):
            reason = _damage(path)
            if reason is None:
                found[0] = str(path)
                return
            log.warning("%s: %s; continuing from the checkpoint before it", path, reason)
        if there:
            raise RunError(f"{run_dir / 'checkpoints'}: none of its checkpoints is whole; delete it to start again")

    on_main(look)
    if world.size > 1:
        broadcast_object_list(found)
    return None if found[0] is None else Path(found[0])


def restore_weights(path: Path, draft: nn.Module) -> None:
    """Load a checkpoint's weights into a draft that is not wrapped yet."""
    load_weights(draft, load_file(path / "model.safetensors"))


def restore_rest(path: Path, wrapped: WrappedTrainee, layout: BatchLayout, seed: int) -> Position:
    """Restore the optimizer and the random states of a checkpoint; returns its position."""
    load_optimizer(wrapped, load_file(path / "optimizer.safetensors"))
    position = Position(**read_json(path / "position.json", "the position of a training run"))
    before = BatchLayout(**read_json(path / "layout.json", "the layout of a training run"))
    rank = wrapped.world.accelerator.process_index
    if before == layout:
        _restore_random_state(load_file(path / f"random_{rank}.safetensors"))
        return position
    if wrapped.world.accelerator.is_main_process:
        log.warning("continuing a run of %s as %s: the same up to rounding", _described(before), _described(layout))
    torch.manual_seed(row_seed(seed, f"process {rank} from step {position.step}"))
    return position


def _described(layout: BatchLayout) -> str:
    return f"{layout.batch_size} x {layout.accumulation} x {layout.processes} processes ({layout.sharing})"


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _seal(directory: Path) -> None:
    hashes = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    (directory / _FILES).write_text(json.dumps(hashes))


def _damage(directory: Path) -> str | None:
    """What is damaged in a directory, or None when its files are what was written."""
    try:
        hashes = read_json(directory / _FILES, "the list of a checkpoint's files")
        for name, there in hashes.items():
            if sha256_file(directory / name) != there:
                return f"{name} is not what was written"
    except InputError:
        return f"{_FILES} cannot be read"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read"
    return None


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


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
        (directory / "draftsmith.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    tidy(out / "run", config)


def tidy(run_dir: Path, config: TrainConfig) -> None:
    """Delete what only an unfinished run needs, also what one that was killed while it published has left."""
    shutil.rmtree(run_dir / "final", ignore_errors=True)
    for path in run_dir.glob("best_*"):
        shutil.rmtree(path)
    if _checkpoints(run_dir):
        _drop_old(run_dir, config)
