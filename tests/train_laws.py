"""What tests of training read of a run, how they stop one, and tiny models of many families."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SGD = "--optim.name sgd --optim.lr 0.5 --optim.clip_norm 0 --optim.final_lr_fraction 1".split()
# Patch of a process: call `action` before the n-th call of a function.
BEFORE = """
import os, signal
import draftsmith.train.loop
def before(owner, name, count, action):
    real, calls = getattr(owner, name), []
    def watched(*words, **more):
        calls.append(1)
        if len(calls) == count:
            action()
        return real(*words, **more)
    setattr(owner, name, watched)
def send(number):
    return lambda: os.kill(os.getpid(), number)
KILL = send(signal.SIGKILL)
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
    config = AutoConfig.for_model(kind, **(SIZES | FAMILIES.get(kind, {}) | changes))
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


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / "run" / "checkpoints" / f"step_{step:08d}" / "model.safetensors")
