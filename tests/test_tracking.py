"""Weights & Biases: data, drafts and evaluations hang together there, no secret goes there, and nobody is asked."""

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith_core import wandb_runs
from draftsmith_core.errors import InputError
from eval.results import Results
from eval.tracking import TABLES

wandb = pytest.importorskip("wandb")

Spawn = Callable[..., Any]
ROOT = Path(__file__).parents[1]
SECRET = "0123456789abcdef" * 2 + "deadbeef"
ENV = {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_TOKEN": "hf_" + SECRET}


def records(path: Path) -> list[Any]:
    """What an offline run wrote: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as messages

    content, place, whole = path.read_bytes(), 7, b""
    found = []
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        # 1: all of a record, 2: its first piece, 3: one in the middle, 4: its last.
        if kind in (1, 4):
            found.append(messages.Record.FromString(whole))  # type: ignore[attr-defined]
            whole = b""
    return found


def of(found: list[Any], kind: str) -> list[Any]:
    return [getattr(each, kind) for each in found if each.WhichOneof("record_type") == kind]


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def runs(directory: Path) -> list[list[Any]]:
    return [records(path) for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"))]


def written_by(out: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl, one entry a step."""
    written: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (out / "run/metrics.jsonl").read_text().splitlines()):
        written.setdefault(line.pop("step"), {}).update(line)
    return written


def curves_of(found: list[Any]) -> dict[int, dict[str, Any]]:
    return {line["_step"]: line for line in (items(each.item) for each in of(found, "history"))}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment with a home of its own, where nobody has logged in."""
    (tmp_path / "home").mkdir()
    keys = ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR")
    return {key: str(tmp_path / "home") for key in keys} | {"NETRC": str(tmp_path / "home/netrc")}


@pytest.fixture
def trained(target_dir: str, draft_dir: str, prompts_file: str) -> list[str]:
    """A training run on text, in W&B, with the target's teacher."""
    return (
        f"train --out draft --data {prompts_file} --draft {draft_dir} --target {target_dir} --objective fkl "
        "--max_length 32 --steps 6 --batch_size 1 --eval_every 2 --save_every 2 --heldout_fraction 0.3 --device cpu "
        "--tracker wandb --project mine"
    ).split()


def text_only(prompts_file: str, there: Path) -> str:
    lines = [json.loads(line) for line in Path(prompts_file).read_text(encoding="utf-8").splitlines()]
    texts = [line.get("text") or line.get("prompt") for line in lines]
    path = there / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in texts if text))
    return str(path)


@pytest.mark.slow
def test_data_draft_and_evaluation_hang_together(
    trained: list[str],
    target_dir: str,
    draft_dir: str,
    prompts_file: str,
    tmp_path: Path,
    home: dict[str, str],
    spawn: Spawn,
) -> None:
    texts = text_only(prompts_file, tmp_path)
    said = ""
    for words in (
        [texts if word == prompts_file else word for word in trained],
        f"eval --target {target_dir} --draft base={draft_dir} mine=draft --id prose={prompts_file} --ood code={texts} "
        "--out eval --max_prompts 3 --max_new_tokens 6 --bootstrap 100 --speed_prompts 1 --prompt_tokens 8 "
        "--device cpu --tracker wandb --project mine".split(),
    ):
        code, out, err = spawn(*words, cwd=tmp_path, env=ENV | home).wait()
        assert code == 0, err
        said += out + err
    record = json.loads((tmp_path / "draft/draftsmith.json").read_text())
    results = json.loads((tmp_path / "eval/results.json").read_text())
    (training,), (evaluation,) = runs(tmp_path / "draft/run"), runs(tmp_path / "eval")

    for found, kind in ((training, "train"), (evaluation, "eval")):
        run = of(found, "run")[0]
        assert (run.project, run.job_type) == ("mine", kind)
    config: dict[str, Any] = {}
    for run in of(training, "run"):
        config |= items(run.config.update)
    for update in of(training, "config"):
        config |= items(update.update)
    assert config["config"]["objective"] == "fkl"
    assert config["target_fingerprint"] == record["target_fingerprint"]

    # The curves are those of metrics.jsonl, and what the clock says.
    written, curves = written_by(tmp_path / "draft"), curves_of(training)
    assert curves.keys() == written.keys() == set(range(7))
    for step, figures in written.items():
        assert {name: curves[step][name] for name in figures} == pytest.approx(figures)
        assert step == 0 or {"loss", "lr", "alpha", "tau", "tokens_per_s", "memory_gib"} <= curves[step].keys()
        assert step % 2 or {"heldout_loss", "heldout_alpha", "heldout_tau"} <= curves[step].keys()

    # data -> draft: what went in is marked as used, what came out is not.
    made = {each.name: each for each in of(training, "artifact")}
    name = f"draft-{record['fingerprint']}"
    inputs = {f"data-{record['data']['training']['digest'][:16]}", f"heldout-data-{config['heldout_data'][:16]}"}
    assert {each.name for each in made.values() if each.use_after_commit} == inputs
    assert {each.type for each in made.values() if each.use_after_commit} == {"dataset"}
    assert made.keys() - inputs == {name}
    assert "best" in made[name].aliases
    draft_files = {entry.path: entry for entry in made[name].manifest.contents}
    assert {"model.safetensors", "config.json", "draftsmith.json"} <= draft_files.keys()
    assert draft_files["model.safetensors"].ref == (tmp_path / "draft/model.safetensors").as_uri()
    # draft -> evaluation: the very version that training made.
    of_eval = {each.name: each for each in of(evaluation, "artifact")}
    base = f"draft-{results['models']['base']['fingerprint']}"
    assert {each.name for each in of_eval.values() if each.use_after_commit} == {name, base}
    assert (of_eval[name].digest, of_eval[name].type) == (made[name].digest, made[name].type)
    own = [each for each in of_eval.values() if not each.use_after_commit]
    (came,) = (each for each in own if each.type == "eval")
    # The tables that can be filtered there, and the figures of the report.
    filled = {name for name in TABLES if len(Results.load(tmp_path / "eval").to_frame(name))}
    assert {"alpha", "decoding", "predictions", "speed", "transfer"} <= filled
    assert sum(each.type == "run_table" for each in own) == len(filled) == len(own) - 1
    media = {
        path.parent.name + "/" + path.name.split("_")[0] for path in (tmp_path / "eval/wandb").rglob("media/**/*.*")
    }
    assert {"tables/alpha", "tables/decoding", "tables/speed", "figures/alpha", "figures/tau"} <= media
    assert {entry.path for entry in came.manifest.contents} == {"results.json", "report.html"}
    # What is to be uploaded waits beside the runs.
    for each in (*made.values(), *of_eval.values()):
        for entry in each.manifest.contents:
            assert entry.ref or Path(entry.local_path).is_relative_to(tmp_path)
            assert entry.ref or not Path(entry.local_path).is_relative_to(tmp_path / "home")
            assert entry.ref or Path(entry.local_path).is_file()

    summary: dict[str, Any] = {}
    for update in of(evaluation, "summary"):
        summary |= items(update.update)
    for cell in results["alpha"]:
        key = f"alpha/{cell['draft']}/{cell['domain']}/T{cell['temperature']:g}"
        assert summary[key] == pytest.approx(cell["alpha"]["value"])
    assert {"tau/mine/all ood/T0/chain:4/speculative", "speedup/mine/prose/T1/chain:4/speculative"} <= summary.keys()

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 30
    for secret in (ENV["WANDB_API_KEY"], ENV["HF_TOKEN"]):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        assert secret not in said


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_same_run(
    trained: list[str], prompts_file: str, tmp_path: Path, home: dict[str, str], spawn: Spawn
) -> None:
    texts = text_only(prompts_file, tmp_path)
    words = [texts if word == prompts_file else word for word in trained]
    kill = (
        "import os, signal, train.loop\nreal, calls = train.loop.training_step, []\n"
        "def step(*words):\n    calls.append(1)\n"
        "    if len(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n    return real(*words)\n"
        "train.loop.training_step = step"
    )
    code, _, err = spawn(*words, cwd=tmp_path, env=ENV | home, patch=kill).wait()
    assert code == -signal.SIGKILL, err
    time.sleep(1.1)  # wandb names its directories by the second
    code, _, err = spawn(*words, cwd=tmp_path, env=ENV | home).wait()
    assert code == 0, err
    # wandb-core keeps what it has not flushed to itself and dies with it, so the second directory must say it all.
    first, second = sorted((tmp_path / "draft/run/wandb").glob("offline-run-*"))
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]
    curves = curves_of(runs(tmp_path / "draft/run")[1])
    written = written_by(tmp_path / "draft")
    assert curves.keys() == written.keys() == set(range(7))
    for step, figures in written.items():
        assert {name: curves[step][name] for name in figures} == pytest.approx(figures)
    assert ["tokens_per_s" in curves[step] for step in range(7)] == [False] * 3 + [True] * 4


def test_disabled_wandb_does_nothing(
    trained: list[str], prompts_file: str, tmp_path: Path, home: dict[str, str], spawn: Spawn
) -> None:
    texts = text_only(prompts_file, tmp_path)
    words = [texts if word == prompts_file else word for word in trained]
    code, _, err = spawn(*words, cwd=tmp_path, env=ENV | home | {"WANDB_MODE": "disabled"}).wait()
    assert code == 0, err
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WANDB_MODE": "online", "WANDB_API_KEY": ""}, "tracker: wandb has no key; set WANDB_API_KEY, or"),
        ({"WANDB_MODE": "nonsense"}, "tracker: wandb: mode: Input should be"),
        ({"WANDB_MODE": "online", "WANDB_API_KEY": "5ecre7"}, "WANDB_API_KEY invalid"),
    ],
)
def test_what_wandb_lacks_is_said_in_one_line_before_anything_is_made(
    changes: dict[str, str], said: str, trained: list[str], tmp_path: Path, home: dict[str, str], spawn: Spawn
) -> None:
    evaluate = "eval --target t --draft a=b --id c=d --out eval --tracker wandb".split()
    there = tmp_path / "there"
    there.mkdir()
    for words in (trained, evaluate):
        code, out, err = spawn(*words, cwd=there, env=ENV | home | changes).wait()
        assert (code, out) == (2, ""), err
        (line,) = (each for each in err.splitlines() if each.startswith("draftsmith"))
        assert said in line
        assert "WANDB_MODE=offline, which needs neither account nor network" in line
        assert "Traceback" not in err and "5ecre7" not in err
        assert not list(there.iterdir())


@pytest.mark.slow
def test_nobody_is_asked_at_a_terminal(tmp_path: Path, home: dict[str, str]) -> None:
    words = "eval --target t --draft a=b --id c=d --out eval --tracker wandb".split()
    ours, theirs = pty.openpty()
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | home
    command = [sys.executable, "-m", "draftsmith", *words]
    child = subprocess.Popen(
        command, cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert child.wait() == 2
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert said.splitlines()[-1].startswith("draftsmith eval: tracker: wandb has no key; set WANDB_API_KEY, or ")
    assert "(1)" not in said and "account: " not in said


def test_what_wandb_fails_with_is_one_line_without_values() -> None:
    with pytest.raises(InputError, match="^tracker: wandb: no such host; there is WANDB_MODE=offline, which"):
        with wandb_runs.without_prompts():
            raise wandb.errors.CommError("no such\nhost.")
    with pytest.raises(InputError, match="^a file of ours$"):
        with wandb_runs.without_prompts():
            raise InputError("a file of ours")
    with pytest.raises(InputError) as refused:
        with wandb_runs.without_prompts():
            wandb.Settings(mode=SECRET)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_draft_is_known_by_its_contents(tmp_path: Path) -> None:
    digests = []
    for place, weights in (("here", b"1"), ("there", b"1"), ("else", b"2")):
        directory = tmp_path / place
        (directory / "run").mkdir(parents=True)
        (directory / "run" / "step").write_bytes(place.encode())
        (directory / "model.safetensors").write_bytes(weights)
        (directory / "draftsmith.json").write_text(json.dumps({"fingerprint": "abc", "steps": 3}))
        with wandb_runs.staging_artifacts_in(tmp_path / "staged"):
            artifact = wandb_runs.draft_artifact(str(directory), "of other arithmetic")
        assert artifact.name == "draft-abc"
        assert artifact.metadata["steps"] == 3
        digests.append(artifact.digest)
    assert digests[0] == digests[1] != digests[2]
    with wandb_runs.staging_artifacts_in(tmp_path / "staged"):
        assert wandb_runs.draft_artifact("some/hub-name", "def").name == "draft-def"
