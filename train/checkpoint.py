"""State that a killed run continues from, bit for bit, and the draft checkpoint it ends with."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import InputError
from draftsmith.io import atomic_dir, make_dir, read_json, remove_leftovers, write_json_atomic
from draftsmith.run import difference
from draftsmith.text import Tokenizer

KEPT = 2


@dataclass(frozen=True)
class Position:
    """How far training is. Data order and schedule are functions of `step` alone."""

    step: int = 0
    best_step: int = 0
    best_loss: float | None = None
    evaluations_since_best: int = 0
    stopped: bool = False


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, tied ones once, on the CPU."""
    found = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    found |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}  # type: ignore[misc]
    return {name: value.detach().cpu().contiguous() for name, value in found.items()}


def load_weights(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Put what `weights` gave back in place."""
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            places[name].copy_(value)


def save_best(run_dir: Path, model: nn.Module) -> None:
    """Keep the weights with the lowest held-out loss so far."""
    with atomic_dir(run_dir / "best") as directory:
        save_file(weights(model), directory / "model.safetensors")


def load_best(run_dir: Path, model: nn.Module) -> None:
    """Put the best weights so far into the model."""
    load_weights(model, load_file(run_dir / "best" / "model.safetensors"))


def save(
    run_dir: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
) -> None:
    """Write `checkpoints/step_N` whole or not at all, and drop all but the newest two. Every process calls it."""
    states = gather_object([_random_state()])
    if accelerator.is_main_process:
        with atomic_dir(run_dir / "checkpoints" / f"step_{position.step:08d}") as directory:
            save_file(weights(model), directory / "model.safetensors")
            torch.save(optimizer.state_dict(), directory / "optimizer.pt")
            for rank, state in enumerate(states):
                save_file(state, directory / f"random_{rank}.safetensors")
            (directory / "position.json").write_text(json.dumps(asdict(position)))
        for old in _checkpoints(run_dir)[:-KEPT]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_newest(
    run_dir: Path, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Position:
    """Continue from the newest checkpoint, or from the start when there is none."""
    found = _checkpoints(run_dir)
    if not found:
        return Position()
    newest = found[-1]
    load_weights(model, load_file(newest / "model.safetensors"))
    optimizer.load_state_dict(torch.load(newest / "optimizer.pt", weights_only=True, map_location="cpu"))
    _restore_random_state(load_file(newest / f"random_{accelerator.process_index}.safetensors"))
    return Position(**read_json(newest / "position.json", "the position of a training run"))


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


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
    if differs is not None:
        raise InputError(
            f"{run_dir.parent}: holds another run: its {differs}; choose another `out` or delete the directory"
        )
    remove_leftovers(run_dir)
    remove_leftovers(run_dir / "checkpoints")


def publish(out: Path, model: PreTrainedModel, tokenizer: Tokenizer | None, record: dict[str, Any]) -> None:
    """Write the draft checkpoint into `out`: every file whole, `config.json` last, so that half is not loadable."""
    staging = out / "run" / "final"
    with atomic_dir(staging) as directory:
        model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        (directory / "draftsmith.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(out / file.name)
    staging.rmdir()
