"""Weights & Biases: curves and checkpoints are logged, secrets are not, and nobody is asked."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.core import wandb_runs
from draftsmith.core.errors import InputError
from tests.train_laws import BEFORE, metrics

wandb = pytest.importorskip("wandb")

ROOT = Path(__file__).parents[1]
SECRET = "0123456789abcdef" * 2 + "deadbeef"
ENV = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline", "HF_TOKEN": "hf_" + SECRET}
TRACKED = ["--tracker", "wandb", "--device", "cpu"]


@pytest.fixture
def env(tmp_path):
    """An environment with a home of its own, where nobody has logged in."""
    (tmp_path / "home").mkdir()
    return ENV | {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "home/netrc")}


@pytest.fixture
def trained(target_dir, draft_dir, tmp_path):
    """A training run on text, with the target as its teacher."""
    text = "The quick brown fox jumps over the lazy dog and the dog does not mind. " * 3
    rows = [json.dumps({"text": text[i:]}) + "\n" for i in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(rows))
    return (
        f"train --out {tmp_path}/draft --data {tmp_path}/texts.jsonl --draft {draft_dir} --target "
        f"{target_dir} --objective fkl --max_length 32 --steps 6 --batch_size 1 --eval_every 2 "
        "--save_every 2 --heldout_fraction 0.3"
    ).split() + TRACKED


@pytest.mark.slow
def test_a_killed_run_continues_its_wandb_run_and_nothing_leaks(trained, tmp_path, env, spawn):
    kill = BEFORE + "before(draftsmith.train.loop, 'learning_rate', 4, KILL)"
    (tmp_path / "cwd").mkdir()
    spawn(*trained, cwd=tmp_path / "cwd", env=env, patch=kill).wait(-9)
    time.sleep(1.1)  # wandb names its directories by the second
    printed = "".join(spawn(*trained, cwd=tmp_path / "cwd", env=env).wait())
    assert printed.count("W&B: ") == 1
    for others in ("wandb: ", "Loading weights", "Writing model shards", "ds_accelerator"):
        assert others not in printed
    assert list((tmp_path / "cwd").iterdir()) == []

    first, second = sorted((tmp_path / "draft/run/wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    # The second run has the steps that died with the first, which had a clock of their own.
    (sent,) = (path.read_bytes() for path in second.glob("*.wandb"))
    assert sent.count(b"train/loss") > sent.count(b"train/tokens_per_s") >= 3
    fingerprint = json.loads((tmp_path / "draft/draftsmith.json").read_text())["fingerprint"]
    assert f"draft-{fingerprint}".encode() in sent and b"model.safetensors" in sent

    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert SECRET not in printed


@pytest.mark.slow
def test_nobody_is_asked_at_a_terminal_for_a_missing_key(trained, tmp_path, env, golden):
    ours, theirs = pty.openpty()
    clean = os.environ | env | {"PYTHONPATH": str(ROOT)}
    for key in ("WANDB_MODE", "WANDB_API_KEY"):
        del clean[key]
    command = [sys.executable, "-m", "draftsmith", *trained]
    child = subprocess.Popen(
        command, cwd=tmp_path, env=clean, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert child.wait() == 2
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    golden(shown.splitlines()[-1])
    assert "WANDB_MODE=offline" in shown and "account: " not in shown
    assert not (tmp_path / "draft").exists() and not (tmp_path / "wandb").exists()


def test_what_wandb_fails_with_is_one_line_without_values(golden):
    with golden.raises(), wandb_runs.without_prompts():
        raise wandb.errors.CommError("no such\nhost.")
    with pytest.raises(InputError) as refused, wandb_runs.without_prompts():
        wandb.Settings(mode=SECRET)
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_tensorboard_gets_the_curves(trained, tmp_path, spawn):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spawn(*trained, "--steps", "3", "--tracker", "tensorboard", cwd=tmp_path).wait()
    curves = {}
    for file in (tmp_path / "draft/run").rglob("events.out.tfevents*"):
        events = reader.EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path / "draft", "loss")}
    assert dict(curves["train/loss"]) == pytest.approx(losses, rel=1e-6)
    assert {"heldout/loss", "train/tokens_per_s", "train/memory_gib"} <= curves.keys()
    # What the clock says is in no file that two runs could be compared by.
    assert not metrics(tmp_path / "draft", "tokens_per_s")
