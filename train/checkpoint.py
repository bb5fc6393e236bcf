"""State that a killed run continues from, bit for bit, and the draft checkpoint it ends with.

A checkpoint is a directory `checkpoints/step_N` of safetensors files, with `files.json`, which has their hashes: a
file that is not what was written is found before it is used, and the checkpoint before it taken instead.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith_core.cards import checkpoint_card
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.io import (
    atomic_dir,
    make_dir,
    read_json,
    remove_leftovers,
    sha256_file,
    write_json_atomic,
)
from draftsmith_core.processes import on_main
from draftsmith_core.provenance import difference
from draftsmith_core.sampling import row_seed
from draftsmith_core.tokenization import Tokenizer
from train.parallel import Engine, gather_optimizer, gather_weights, load_optimizer, load_weights
from train.world import World

log = logging.getLogger(__name__)

_FILES = "files.json"


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule are functions of `step` alone.

    best: the held-out figure that `best_by` names, at `best_step`, where all figures were `best_figures`.
    """

    step: int = 0
    best_step: int = 0
    best: float | None = None
    best_figures: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Layout:
    """How a step's rows are divided. Another layout of as many rows gives the same run up to rounding."""

    batch_size: int
    accumulation: int
    processes: int
    sharing: str


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay: the newest `keep` of those at multiples of `every`, and the very newest."""

    keep: int
    every: int


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What cannot be written is one line that names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise RunError(f"{path}: cannot be written ({reason}); make room, and the same command continues") from None


def save_best(run_dir: Path, engine: Engine, step: int) -> None:
    """Keep the weights of this step as the best so far. Every process calls it.

    What a checkpoint calls the best stays beside it: a run that continues from there may take another path.
    """
    weights = gather_weights(engine)

    def write() -> None:
        best = run_dir / "best"
        before = _best_step(best)
        if before in _bests_of_checkpoints(run_dir) and before != step:
            shutil.rmtree(_aside(run_dir, before), ignore_errors=True)
            best.rename(_aside(run_dir, before))
        with writing(best), atomic_dir(best) as directory:
            save_file(weights, directory / "model.safetensors")
            (directory / "step.json").write_text(json.dumps({"step": step}))
            _seal(directory)

    on_main(write)


def restore_best(run_dir: Path, position: Position) -> None:
    """Make `best` the one of a position that was restored. Every process calls it; RunError when it is nowhere."""

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


def _bests_of_checkpoints(run_dir: Path) -> set[int]:
    found = set()
    for path in _checkpoints(run_dir):
        try:
            found.add(int(read_json(path / "position.json", "the position of a training run")["best_step"]))
        except (InputError, KeyError):
            continue  # a damaged checkpoint; `newest` says so
    return found


def _drop_bests(run_dir: Path) -> None:
    wanted = {_aside(run_dir, step) for step in _bests_of_checkpoints(run_dir)}
    for path in run_dir.glob("best_*"):
        if path not in wanted:
            shutil.rmtree(path)


def load_best(run_dir: Path) -> dict[str, Tensor]:
    """The best weights so far, by name; RunError when the file is not what was written."""
    reason = _damage(run_dir / "best")
    if reason is not None:
        raise RunError(f"{run_dir / 'best'}: {reason}; delete `checkpoints` beside it to train again from the start")
    return load_file(run_dir / "best" / "model.safetensors")


def save(run_dir: Path, engine: Engine, position: Position, layout: Layout, keeping: Keeping) -> None:
    """Write `checkpoints/step_N` whole or not at all, and drop what is not to be kept. Every process calls it.

    RunError, one line, in every process when it cannot be written; what was there before then still is.
    """
    states = gather_object([_random_state()])
    weights, moments = gather_weights(engine), gather_optimizer(engine)

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
        _drop_old(run_dir, keeping)
        _drop_bests(run_dir)

    on_main(write)


def _drop_old(run_dir: Path, keeping: Keeping) -> None:
    *older, newest = _checkpoints(run_dir)
    # One that was made because the run was told to stop would not be there had it not been.
    regular = [path for path in [*older, newest] if _step(path) % keeping.every == 0]
    for old in older:
        if old not in regular[-keeping.keep :]:
            shutil.rmtree(old)


def newest(run_dir: Path, world: World) -> Path | None:
    """The newest checkpoint that is whole, or None when there is none at all. Every process calls it.

    A damaged one is passed over with a warning; RunError when all are damaged.
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
    """Put a checkpoint's weights into a draft that is not wrapped yet."""
    load_weights(draft, load_file(path / "model.safetensors"))


def restore_rest(path: Path, engine: Engine, layout: Layout, seed: int) -> Position:
    """Optimizer and random states of a checkpoint; its position."""
    load_optimizer(engine, load_file(path / "optimizer.safetensors"))
    position = Position(**read_json(path / "position.json", "the position of a training run"))
    before = Layout(**read_json(path / "layout.json", "the layout of a training run"))
    rank = engine.world.accelerator.process_index
    if before == layout:
        _restore_random_state(load_file(path / f"random_{rank}.safetensors"))
        return position
    if engine.world.accelerator.is_main_process:
        log.warning("continuing a run of %s as %s: the same up to rounding", _words(before), _words(layout))
    torch.manual_seed(row_seed(seed, f"process {rank} from step {position.step}"))
    return position


def _words(layout: Layout) -> str:
    return f"{layout.batch_size} x {layout.accumulation} x {layout.processes} processes ({layout.sharing})"


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _seal(directory: Path) -> None:
    hashes = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    (directory / _FILES).write_text(json.dumps(hashes))


def _damage(directory: Path) -> str | None:
    """Why a directory is not what was written, or None when it is."""
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


def claim(run_dir: Path, identity: dict[str, Any]) -> None:
    """Make `run_dir` this run's own, or make sure it is; InputError names what differs from the run that is there."""
    record = run_dir / "run.json"
    if not record.exists():
        if (run_dir.parent / "config.json").exists():
            raise InputError(f"{run_dir.parent}: holds a model that this run did not make; choose another `out`")
        make_dir(run_dir, "out")
        write_json_atomic(record, identity)
        return
    there = read_json(record, "the record of a training run")
    differs = difference(there, identity)
    if differs is not None and differs.startswith("rows_per_step "):
        raise InputError(
            f"{run_dir.parent}: holds a run of {there['rows_per_step']} sequences a step (batch_size x accumulation x "
            f"processes), and this would be {identity['rows_per_step']}; set batch_size or accumulation so that they "
            f"are as many, or choose another `out`"
        )
    if differs is not None:
        raise InputError(
            f"{run_dir.parent}: holds another run: its {differs}; choose another `out` or delete the directory"
        )
    remove_leftovers(run_dir)
    remove_leftovers(run_dir / "checkpoints")


def publish(
    out: Path,
    write: Callable[[Path], None],
    tokenizer: Tokenizer | None,
    record: dict[str, Any],
    keeping: Keeping,
) -> None:
    """Write the draft checkpoint into `out`: every file whole, `config.json` last, so that half is not loadable.

    write: puts the draft's own files into a directory.
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
    tidy(out / "run", keeping)


def tidy(run_dir: Path, keeping: Keeping) -> None:
    """Remove what only a run that goes on needs, and what one that was killed at its very end has left."""
    shutil.rmtree(run_dir / "final", ignore_errors=True)
    for path in run_dir.glob("best_*"):
        shutil.rmtree(path)
    if _checkpoints(run_dir):
        _drop_old(run_dir, keeping)
