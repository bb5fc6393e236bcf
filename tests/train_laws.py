"""Laws 6 and 7 for any options of a run, what tests read of a run, and tiny models of many
families.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Words = Callable[..., list[str]]
SGD = [
    "--optim.name",
    "sgd",
    "--optim.lr",
    "0.5",
    "--optim.clip_norm",
    "0",
    "--optim.final_lr_fraction",
    "1",
]
# Patch of a process: call `action` before the n-th call of a function.
BEFORE = """
import errno, os, pathlib, shutil, signal
import draftsmith.train.checkpoint, draftsmith.train.loop, draftsmith.train.parallel
def before(owner, name, count, action, when=lambda *words, **more: True):
    real, calls = getattr(owner, name), []
    def watched(*words, **more):
        if when(*words, **more):
            calls.append(1)
            if len(calls) == count:
                action()
        return real(*words, **more)
    setattr(owner, name, watched)
def send(number):
    return lambda: os.kill(os.getpid(), number)
KILL = send(signal.SIGKILL)
def fail(error):
    def action():
        raise error
    return action
"""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
ONE_HEAD = {"num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": ONE_HEAD | {"final_logit_softcapping": 0.5, "sliding_window": 4},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 24},
    "phi": {},
    "mistral": {"num_key_value_heads": 1, "sliding_window": 4},
    "qwen3": ONE_HEAD,
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


def tiny_family(kind: str, seed: int = 0, spread: float = 0.2, **changes: Any) -> PreTrainedModel:
    """A small random model of a family, in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SIZES | FAMILIES[kind] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    model.eval()
    return model


def result(out: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def metrics(out: Path, key: str = "step") -> list[dict[str, float]]:
    """The lines of metrics.jsonl that have this figure."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def close(found: Path, expected: Path, atol: float = 2e-5, rtol: float = 1e-4) -> None:
    """The drafts of two runs are equal up to rounding."""
    wanted, weights = (load_file(out / "model.safetensors") for out in (expected, found))
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, atol=atol, rtol=rtol)


def words_of(data: list[str], draft: str, *more: str) -> Words:
    """The words of a run: where it writes, its steps, and how eight rows per step are divided."""

    def run(out: Path | str, steps: int, size: int = 8, accumulation: int = 1) -> list[str]:
        return (
            f"train --out {out} --data {' '.join(data)} --heldout {data[0]} --draft {draft} "
            "--max_length 40 "
            f"--steps {steps} --eval_every {steps} --save_every 1 --keep 9 --device cpu "
            f"--batch_size {size} "
            f"--accumulation {accumulation}"
        ).split() + list(more)

    return run


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / "run" / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def a_step_is_its_rows_however_they_are_divided(
    words: Words, options: list[str], tmp_path: Path, door: Any
) -> None:
    """Law 6, with SGD."""
    for size, accumulation in ((8, 1), (1, 8)):
        door.ok(*words(tmp_path / f"{size}", 3, size, accumulation), *SGD, *options)
    for name, value in weights(tmp_path / "8", 3).items():
        torch.testing.assert_close(weights(tmp_path / "1", 3)[name], value, atol=1e-6, rtol=1e-5)


def a_killed_run_ends_as_one_that_was_not(
    words: Words, options: list[str], tmp_path: Path, spawn: Any
) -> None:
    """Law 7, of weights and of what was counted; in directories `whole` and `killed`."""
    die = BEFORE + "before(draftsmith.train.loop, 'learning_rate', 3, KILL)"
    for name, patch, expected in (("whole", "", 0), ("killed", die, -9), ("killed", "", 0)):
        spawn(*words(name, 4), *options, cwd=tmp_path, patch=patch).wait(expected)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert (whole / "run" / "metrics.jsonl").read_bytes() == (
        killed / "run" / "metrics.jsonl"
    ).read_bytes()
    assert all(
        torch.equal(weights(killed, 4)[name], value) for name, value in weights(whole, 4).items()
    )
