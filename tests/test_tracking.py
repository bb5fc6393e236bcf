"""Weights & Biases: curves, tables and checkpoints are logged, secrets are not, and nobody is
asked.
"""

import json
import os
import pty
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError
from eval.results import Results
from tests.train_laws import BEFORE, metrics

wandb = pytest.importorskip("wandb")

ROOT = Path(__file__).parents[1]
SECRET = "0123456789abcdef" * 2 + "deadbeef"
ENV = {
    "WANDB_API_KEY": SECRET,
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "HF_TOKEN": "hf_" + SECRET,
}


def records(path: Path) -> list[Any]:
    """What an offline run wrote: LevelDB's log format, blocks of 32 KiB, behind a header of 7
    bytes.
    """
    from wandb.proto import wandb_internal_pb2 as messages

    content, place, whole, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : (place := place + 7 + size)]
        # 1: all of a record, 2: its first piece, 3: one in the middle, 4: its last.
        if kind in (1, 4):
            found.append(messages.Record.FromString(whole))  # type: ignore[attr-defined]
            whole = b""
    return found


def of(found: list[Any], kind: str) -> list[Any]:
    return [getattr(each, kind) for each in found if each.WhichOneof("record_type") == kind]


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


@pytest.fixture
def env(tmp_path):
    """An environment with a home of its own, where nobody has logged in."""
    (tmp_path / "home").mkdir()
    keys = ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR")
    return (
        ENV
        | {key: str(tmp_path / "home") for key in keys}
        | {"NETRC": str(tmp_path / "home/netrc")}
    )


@pytest.fixture
def trained(target_dir, draft_dir, tmp_path):
    """A training run on text, in W&B, with the target as its teacher."""
    text = "The quick brown fox jumps over the lazy dog and the dog does not mind. " * 3
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text[i:]}) + "\n" for i in range(8))
    )
    return (
        f"train --out draft --data {tmp_path}/texts.jsonl --draft {draft_dir} --target "
        f"{target_dir} --objective fkl "
        "--max_length 32 --steps 6 --batch_size 1 --eval_every 2 --save_every 2 "
        "--heldout_fraction 0.3 --device cpu "
        "--tracker wandb --project mine"
    ).split()


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_same_run_and_its_evaluation_is_logged(
    trained, target_dir, draft_dir, prompts_file, tmp_path, env, spawn
):
    kill = BEFORE + "before(train.loop, 'learning_rate', 4, KILL)"
    spawn(*trained, cwd=tmp_path, env=env, patch=kill).wait(-9)
    time.sleep(1.1)  # wandb names its directories by the second
    printed = ""
    evaluation = (
        f"eval --target {target_dir} --draft base={draft_dir} mine=draft --id prose={prompts_file} "
        "--ood code=texts.jsonl --out eval --max_prompts 3 --max_new_tokens 6 --bootstrap 100 "
        "--speed_prompts 1 "
        "--prompt_tokens 8 --device cpu --tracker wandb --project mine"
    ).split()
    for words in (trained, evaluation):
        printed += "".join(spawn(*words, cwd=tmp_path, env=env).wait())
    # wandb keeps what it has not flushed to itself and dies with the run, so the second directory
    # must have it all.
    first, second = sorted((tmp_path / "draft/run/wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    training, evaluated = (
        records(sorted((tmp_path / out).glob("wandb/offline-run-*/*.wandb"))[-1])
        for out in ("draft/run", "eval")
    )
    for found, kind in ((training, "train"), (evaluated, "eval")):
        assert (of(found, "run")[0].project, of(found, "run")[0].job_type) == ("mine", kind)

    # The curves are those of metrics.jsonl, and the clock's.
    curves = {
        line["_step"]: line for line in (items(update.item) for update in of(training, "history"))
    }
    written: dict[float, dict[str, float]] = {}
    for line in metrics(tmp_path / "draft"):
        written.setdefault(line.pop("step"), {}).update(line)
    assert curves.keys() == written.keys() == set(range(7))
    for step, figures in written.items():
        assert {name: curves[step][name] for name in figures} == pytest.approx(figures)
        assert step % 2 or {"heldout_loss", "heldout_alpha", "heldout_tau"} <= curves[step].keys()
    assert ["tokens_per_s" in curves[step] for step in range(7)] == [False] * 3 + [True] * 4

    record = json.loads((tmp_path / "draft/draftsmith.json").read_text())
    (checkpoint,) = of(training, "artifact")
    assert checkpoint.name == f"draft-{record['fingerprint']}" and "best" in checkpoint.aliases
    files = {entry.path: entry for entry in checkpoint.manifest.contents}
    assert {"model.safetensors", "config.json", "draftsmith.json"} <= files.keys()
    assert all(entry.ref for entry in files.values())

    media = {
        "/".join([path.parent.name, path.name.split("_")[0]])
        for path in (tmp_path / "eval/wandb").rglob("media/**/*.*")
    }
    assert {"tables/alpha", "tables/tau", "tables/speedup", "figures/alpha", "figures/tau"} <= media
    summary: dict[str, Any] = {}
    for update in of(evaluated, "summary"):
        summary |= items(update.update)
    alphas = Results.load(tmp_path / "eval").to_frame("alpha")
    assert summary["alpha/mine/prose/T1"] == pytest.approx(
        alphas.query("draft == 'mine' and domain == 'prose' and temperature == 1").iloc[0]["value"]
    )
    assert {
        "tau/mine/ood/T0/chain:4/speculative",
        "speedup/mine/prose/T1/chain:4/speculative",
    } <= summary.keys()

    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (ENV["WANDB_API_KEY"], ENV["HF_TOKEN"]):
        assert not [path for path in paths if secret.encode() in path.read_bytes()]
        assert secret not in printed


@pytest.mark.slow
def test_nobody_is_asked_at_a_terminal_for_a_missing_key(tmp_path, env):
    words = "eval --target t --draft a=b --id c=d --out eval --tracker wandb".split()
    ours, theirs = pty.openpty()
    clean = {
        key: value
        for key, value in (os.environ | env).items()
        if key not in ("WANDB_MODE", "WANDB_API_KEY")
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *words],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    assert child.wait() == 2
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.splitlines()[-1].startswith("draftsmith eval: tracker: wandb: ")
    assert "WANDB_MODE=offline" in shown and "account: " not in shown
    assert not (tmp_path / "eval").exists()


def test_what_wandb_fails_with_is_one_line_without_values():
    with pytest.raises(
        InputError, match="^tracker: wandb: no such host; or set WANDB_MODE=offline, which"
    ):
        with wandb_runs.without_prompts():
            raise wandb.errors.CommError("no such\nhost.")
    with pytest.raises(InputError) as refused:
        with wandb_runs.without_prompts():
            wandb.Settings(mode=SECRET)
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_tensorboard_gets_the_curves(trained, tmp_path, spawn):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    spawn(*trained, "--steps", "3", "--tracker", "tensorboard", cwd=tmp_path).wait()
    curves: dict[str, list[tuple[int, float]]] = {}
    for directory in {
        path.parent for path in (tmp_path / "draft/run").rglob("events.out.tfevents*")
    }:
        events = reader.EventAccumulator(str(directory))
        events.Reload()
        curves |= {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
    losses = {line["step"]: line["loss"] for line in metrics(tmp_path / "draft", "loss")}
    assert dict(curves["loss"]) == pytest.approx(losses, rel=1e-6)
    assert {"heldout_loss", "tokens_per_s", "memory_gib"} <= curves.keys()
    # What the clock says is in no file that two runs could be compared by.
    assert not metrics(tmp_path / "draft", "tokens_per_s")
