"""What must hold of a training run whatever its options, laws 6 and 7, for tests of options that could break them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Words = Callable[..., list[str]]
CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"
SGD = ["--optim.name", "sgd", "--optim.lr", "0.5", "--optim.clip_norm", "0", "--optim.final_lr_fraction", "1"]
_DIE = (
    "import os, signal, train.loop\nreal = train.loop.learning_rate\n"
    "def dying(optim, step, steps):\n    step == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
    "    return real(optim, step, steps)\ntrain.loop.learning_rate = dying\n"
)


def words_of(data: list[str], draft: str, *more: str) -> Words:
    """The words of a run: where it writes, its steps, and how eight rows per step are divided."""

    def run(out: Path | str, steps: int, size: int = 8, accumulation: int = 1) -> list[str]:
        return (
            f"train --out {out} --data {' '.join(data)} --heldout {data[0]} --draft {draft} --max_length 40 "
            f"--steps {steps} --eval_every {steps} --save_every 1 --keep 9 --device cpu --batch_size {size} "
            f"--accumulation {accumulation}"
        ).split() + list(more)

    return run


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / "run" / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def a_step_is_its_rows_however_they_are_divided(words: Words, options: list[str], tmp_path: Path, door: Any) -> None:
    """Law 6, with SGD."""
    for size, accumulation in ((8, 1), (1, 8)):
        code, _, err = door(*words(tmp_path / f"{size}", 3, size, accumulation), *SGD, *options)
        assert code == 0, err
    for name, value in weights(tmp_path / "8", 3).items():
        torch.testing.assert_close(weights(tmp_path / "1", 3)[name], value, atol=1e-6, rtol=1e-5)


def a_killed_run_ends_as_one_that_was_not(words: Words, options: list[str], tmp_path: Path, spawn: Any) -> None:
    """Law 7, of weights and of what was counted; in directories `whole` and `killed`."""
    for name, patch, expected in (("whole", "", 0), ("killed", _DIE, -9), ("killed", "", 0)):
        code, _, err = spawn(*words(name, 4), *options, cwd=tmp_path, patch=patch).wait()
        assert code == expected, err
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert (whole / "run" / "metrics.jsonl").read_bytes() == (killed / "run" / "metrics.jsonl").read_bytes()
    assert all(torch.equal(weights(killed, 4)[name], value) for name, value in weights(whole, 4).items())


def two_processes_are_one(
    config: str, words: Words, options: list[str], tmp_path: Path, door: Any, launch: Any
) -> None:
    """Law 6, over processes."""
    assert door(*words(tmp_path / "one", 3), *SGD, *options)[0] == 0
    started = ["--config_file", CONFIGS / f"{config}.yaml", "-m", "draftsmith"]
    done = launch(started, *words(tmp_path / "two", 3, 4), *SGD, *options)
    assert done.returncode == 0, done.stderr
    for name, value in weights(tmp_path / "one", 3).items():
        torch.testing.assert_close(weights(tmp_path / "two", 3)[name], value, atol=2e-5, rtol=1e-4)
