"""LoRA: a few weights are trained, the checkpoint is an ordinary one, and the adapters lie beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith_core.packages import is_installed

pytestmark = pytest.mark.skipif(not is_installed("peft"), reason="needs peft (pip install 'draftsmith[peft]')")
Door = Callable[..., tuple[int, str, str]]
CONFIGS = Path(__file__).parents[1] / "configs" / "accelerate"
SGD = ["--optim.name", "sgd", "--optim.lr", "0.5", "--optim.clip_norm", "0", "--optim.final_lr_fraction", "1"]


@pytest.fixture(scope="module")
def distilled(answers: Callable[..., str]) -> str:
    return answers("A draft model proposes tokens and the target", 3, 2, 16)


@pytest.fixture
def words(distilled: str, draft_dir: str) -> Callable[..., list[str]]:
    def run(out: Path | str, steps: int, size: int = 8, accumulation: int = 1) -> list[str]:
        return (
            f"train --out {out} --data {distilled} --heldout {distilled} --draft {draft_dir} --max_length 40 "
            f"--steps {steps} --eval_every {steps} --save_every 2 --device cpu --batch_size {size} "
            f"--accumulation {accumulation} --lora.rank 4"
        ).split()

    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(2, 30)[None]).logits
    return found


def test_the_checkpoint_is_the_draft_with_its_adapters_merged(
    words: Callable[..., list[str]], draft_dir: str, tmp_path: Path, door: Door
) -> None:
    import peft

    out = tmp_path / "out"
    code, _, err = door(*words(out, 8), "--optim.lr", "0.02", "--lora.targets", "q_proj", "up_proj")
    assert code == 0, err
    before, after = load_file(Path(draft_dir) / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "up_proj" in name}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 4
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    base = AutoModelForCausalLM.from_pretrained(draft_dir).eval()
    assert (logits(base) - logits(merged)).abs().max() > 1e-2
    beside = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    torch.testing.assert_close(logits(beside), logits(merged), atol=1e-4, rtol=1e-4)
    record = json.loads((out / "draftsmith.json").read_text())
    assert record["config"]["lora"] == {"rank": 4, "alpha": None, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    figures = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["heldout_loss"] for line in figures if "heldout_loss" in line]
    assert losses[-1] < losses[0]
    # What was measured while training is what the merged checkpoint gives.
    code, _, err = door(*words(tmp_path / "again", 1), "--draft", out)
    assert code == 0, err
    first = json.loads((tmp_path / "again" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["heldout_loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_a_step_is_its_rows_however_they_are_divided(
    words: Callable[..., list[str]], tmp_path: Path, door: Door
) -> None:
    """Law 6, with SGD."""
    for size, accumulation in ((8, 1), (1, 8)):
        assert door(*words(tmp_path / f"{size}", 2, size, accumulation), *SGD)[0] == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("8", "1"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(
    words: Callable[..., list[str]], tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    """Law 7, dropout included."""
    die = (
        "import os, signal, train.loop\nreal = train.loop.learning_rate\n"
        "def dying(optim, step, steps):\n    step == 3 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(optim, step, steps)\ntrain.loop.learning_rate = dying\n"
    )
    for name, patch, expected in (("whole", "", 0), ("killed", die, -9), ("killed", "", 0)):
        code, _, err = spawn(*words(name, 4), "--lora.dropout", "0.2", cwd=tmp_path, patch=patch).wait()
        assert code == expected, err
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu2", "cpu2_fsdp2"])
def test_two_processes_are_one(
    config: str, words: Callable[..., list[str]], tmp_path: Path, door: Door, launch: Callable[..., Any]
) -> None:
    assert door(*words(tmp_path / "one", 2), *SGD)[0] == 0
    options = ["--config_file", CONFIGS / f"{config}.yaml", "-m", "draftsmith"]
    done = launch(options, *words(tmp_path / "two", 2, 4), *SGD)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--lora.rank -1", "lora.rank: -1 must be at least 0"),
        ("--lora.rank 0 --lora.alpha 3", "lora: is not used while lora.rank is 0"),
        ("--lora.alpha 0", "lora.alpha: 0.0 must be above 0"),
        ("--lora.dropout 1", "lora.dropout: 1.0 must be at least 0 and below 1"),
        ("--lora.targets q_proj qproj", "is named 'qproj'; it has q_proj, k_proj, v_proj, o_proj, gate_proj"),
        ("--lora.targets lm_head", "lora.targets: names the output projection"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    more: str, message: str, words: Callable[..., list[str]], tmp_path: Path, door: Door
) -> None:
    code, _, err = door(*words(tmp_path / "out", 1), *more.split())
    assert code == 2 and message in err and "Traceback" not in err, err
    assert not (tmp_path / "out" / "config.json").exists()
