"""What a training run survives: signals, a full disk, damaged files, numbers that are none. And its options."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]

# Before the n-th call of a function something happens.
BEFORE = """
import errno, os, signal
import train.checkpoint, train.loop, train.parallel
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
def fail(error):
    def action():
        raise error
    return action
"""
STEPS = 24


@pytest.fixture(scope="module")
def distilled(answers: Callable[..., str]) -> str:
    """36 rows of unequal length."""
    return answers("Numbers such as 12, 345 and 6789", 2, 3, 20)


@pytest.fixture(scope="module")
def words(distilled: str, dropout_dir: str) -> list[str]:
    """A run whose every step draws random numbers."""
    return (
        f"train --out draft --data {distilled} --draft {dropout_dir} --max_length 48 --steps {STEPS} --batch_size 4 "
        "--eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 --optim.warmup_steps 3 --device cpu"
    ).split()


def result(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture
def whole(words: list[str], tmp_path: Path, spawn: Spawn) -> dict[str, bytes]:
    """What the run leaves when nothing happens to it."""
    (tmp_path / "whole").mkdir()
    code, _, err = spawn(*words, cwd=tmp_path / "whole").wait()
    assert code == 0, err
    return result(tmp_path / "whole" / "draft")


def ends_like(whole: dict[str, bytes], words: list[str], place: Path, spawn: Spawn) -> str:
    """Start the run again, to its end; its standard error. The files are those of a run nothing happened to."""
    code, _, err = spawn(*words, cwd=place).wait()
    assert code == 0, err
    found = result(place / "draft")
    assert sorted(found) == sorted(whole)
    assert [name for name in whole if found[name] != whole[name]] == []
    return str(err)


def last_line(err: str) -> str:
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_the_next_start_continues(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    # In the middle of a step, in the middle of an evaluation, and before there is a step to speak of.
    for trap, step in (
        ("before(train.loop, 'learning_rate', 8, send(signal.SIGTERM))", 8),
        ("before(train.loop, 'evaluate', 2, send(signal.SIGTERM))", 16),
    ):
        code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()
        assert (code, out) == (143, "")
        assert last_line(err).endswith("stopped by SIGTERM; run the same command again to resume")
        assert (tmp_path / f"draft/run/checkpoints/step_{step:08d}/state.json").exists()
        assert not (tmp_path / "draft/config.json").exists()
    early = "before(train.checkpoint, 'newest', 1, send(signal.SIGTERM))"
    before = result(tmp_path / "draft")
    assert spawn(*words, cwd=tmp_path, patch=BEFORE + early).wait()[0] == 143
    assert result(tmp_path / "draft") == before
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_twice_stops_at_once(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    once = "before(train.loop, 'learning_rate', 7, send(signal.SIGINT))"
    code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + once).wait()
    assert (code, out) == (130, "")
    assert last_line(err) == "draftsmith train: interrupted; run the same command again to resume"
    assert (tmp_path / "draft/run/checkpoints/step_00000007/state.json").exists()
    before = result(tmp_path / "draft")
    twice = "\nfor number in (2, 3): before(train.loop, 'collate', number, send(signal.SIGINT))"
    code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + twice).wait()
    assert (code, out) == (130, "")
    assert last_line(err) == "draftsmith train: interrupted; run the same command again to resume"
    assert {name for name in result(tmp_path / "draft") if "checkpoints" in name} == {
        name for name in before if "checkpoints" in name
    }
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_path_that_was_taken(words: list[str], tmp_path: Path, spawn: Spawn) -> None:
    """A kill between the best weights of step 8 and the next checkpoint; then step 8 turns out otherwise."""
    killed = "train.checkpoint.on_main = lambda work: (work(), os.kill(os.getpid(), signal.SIGKILL))"
    for step in (4, 8):
        # The first process also evaluates at its start, the second from step 3 on at step 4.
        trap = f"before(train.checkpoint, 'save_best', 2, lambda: exec({killed!r}))"
        assert spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()[0] == -9
        best = tmp_path / f"draft/run/best_{step:08d}"
        assert best.exists()
        if step == 4:
            expected = load_file(best / "model.safetensors")
    worse = """
real = train.loop.evaluate
train.loop.evaluate = lambda *words: {name: value + 100 for name, value in real(*words).items()}
"""
    code, _, err = spawn(*words, cwd=tmp_path, patch=BEFORE + worse).wait()
    assert code == 0, err
    assert json.loads((tmp_path / "draft/draftsmith.json").read_text())["best_step"] == 4
    found = load_file(tmp_path / "draft/model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert not list((tmp_path / "draft/run").glob("best_*"))


@pytest.mark.slow
def test_sigkill_at_random_steps(whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn) -> None:
    """Law 7 at six random steps in one directory, each time in another part of the step."""
    draw = random.Random(7)
    for place in ("train.loop, 'learning_rate'", "train.parallel, 'backward'", "train.parallel, 'step'") * 2:
        trap = f"before({place}, {draw.randrange(2, 5)}, send(signal.SIGKILL))"
        code, _, err = spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()
        assert code == -9, err
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    full = "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'model.safetensors')"
    torn = "__import__('safetensors').SafetensorError('I/O error: No space left on device (os error 28)')"
    # Weights, optimizer and random state go through save_file; the best weights too.
    for count, error in ((9, full), (3, torn), (5, full)):
        before = {name for name in result(tmp_path) if "checkpoints" in name}
        trap = f"before(train.checkpoint, 'save_file', {count}, fail({error}))"
        code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()
        assert (code, out) == (1, ""), err
        assert "No space left on device" in last_line(err)
        assert last_line(err).startswith("draftsmith train: draft/run/")
        checkpoints = sorted((tmp_path / "draft/run/checkpoints").iterdir())
        assert checkpoints
        assert all((path / "state.json").exists() for path in checkpoints)
        assert not before or before & {name for name in result(tmp_path)}
        assert not list((tmp_path / "draft/run").rglob(".*tmp*"))
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_out_of_memory_is_one_line_and_the_last_good_checkpoint_stays(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    host = "RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory: you tried to allocate 9 bytes')"
    for place, count, error in (
        ("train.parallel, 'backward'", 5, host),
        ("train.checkpoint, 'gather_optimizer'", 1, "torch.OutOfMemoryError('CUDA out of memory.')"),
        ("train.loop, 'evaluate'", 1, "MemoryError()"),
    ):
        before = {name: data for name, data in result(tmp_path).items() if "checkpoints" in name}
        trap = f"import torch\nbefore({place}, {count}, fail({error}))"
        code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()
        assert (code, out) == (1, ""), err
        told = r"out of memory on cpu after step \d+, with batch_size 4 and max_length 48 \(GiB: draft 0.00.*; lower "
        assert re.search(told, last_line(err)), err
        assert before.items() <= result(tmp_path).items()
        assert not list((tmp_path / "draft/run").rglob(".*tmp*"))
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    trap = """
real, calls = train.parallel.step, []
def poisoned(wrapped, clip_norm):
    calls.append(1)
    norm = real(wrapped, clip_norm)
    if len(calls) == 16:
        next(wrapped.trainee.parameters()).data.fill_(float("nan"))
    return norm
train.parallel.step = poisoned
"""
    code, out, err = spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()
    assert (code, out) == (1, "")
    assert "nan" in last_line(err)
    assert (tmp_path / "draft/run/checkpoints").exists()
    ends_like(whole, words, tmp_path, spawn)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(
    whole: dict[str, bytes], words: list[str], tmp_path: Path, spawn: Spawn
) -> None:
    trap = "before(train.loop, 'learning_rate', 11, send(signal.SIGKILL))"
    assert spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait()[0] == -9
    checkpoints = sorted((tmp_path / "draft/run/checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_00000006", "step_00000009"]
    file = checkpoints[1] / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.copytree(tmp_path / "draft", tmp_path / "both" / "draft")
    err = ends_like(whole, words, tmp_path, spawn)
    assert "optimizer.safetensors is not what was written; continuing from the checkpoint before it" in err
    # When no checkpoint is whole there is nothing to continue from, and nothing is thrown away unasked.
    (tmp_path / "both/draft/run/checkpoints/step_00000006/state.json").unlink()
    (tmp_path / "both/draft/.lock").unlink()  # of the run that was killed
    before = result(tmp_path / "both")
    code, out, err = spawn(*words, cwd=tmp_path / "both").wait()
    assert (code, out) == (1, "")
    assert last_line(err).endswith("none of its checkpoints is whole; delete it to start again")
    assert result(tmp_path / "both") == before


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]


def test_which_weights_are_best_and_how_many_checkpoints_stay(
    words: list[str], target_dir: str, tmp_path: Path, door: Door
) -> None:
    records = {}
    for by in ("auto", "alpha", "loss"):
        # A rate so high that the figures go up and down, each in its own way.
        more = ["--target", target_dir, "--optim.lr", "0.1", "--eval_every", "1", "--keep", "3", "--best_by", by]
        assert door(*words, *more, "--out", tmp_path / by)[0] == 0
        records[by] = json.loads((tmp_path / by / "draftsmith.json").read_text())
        kept = sorted(path.name for path in (tmp_path / by / "run/checkpoints").iterdir())
        assert kept == [f"step_{step:08d}" for step in (18, 21, 24)]
    judged = [line for line in lines(tmp_path / "alpha") if "heldout_alpha" in line]
    best = {
        "alpha": max(judged, key=lambda line: line["heldout_alpha"]),
        "loss": min(judged, key=lambda line: line["heldout_loss"]),
    }
    assert best["alpha"]["step"] != best["loss"]["step"], "this run could not tell the two apart"
    for by in ("alpha", "loss"):
        assert records[by]["best_step"] == best[by]["step"]
        assert records[by]["heldout_alpha"] == best[by]["heldout_alpha"]
    assert records["auto"]["best_step"] == records["alpha"]["best_step"]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_gradient_checkpointing_does_not_change_what_is_learnt(words: list[str], tmp_path: Path, door: Door) -> None:
    for name, more in {"plain": [], "again": ["--gradient_checkpointing"]}.items():
        assert door(*words, *more, "--out", tmp_path / name)[0] == 0
    expected = weights(tmp_path / "plain")
    for key, value in weights(tmp_path / "again").items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiling_does_not_change_what_is_learnt(
    words: list[str], draft_dir: str, tmp_path: Path, door: Door, spawn: Spawn
) -> None:
    more = ["--draft", draft_dir, "--steps", "2", "--eval_every", "2", "--optim.name", "sgd"]
    assert door(*words, *more, "--out", tmp_path / "plain")[0] == 0
    code, _, err = spawn(*words, *more, "--compile", "--out", tmp_path / "compiled", cwd=tmp_path).wait()
    assert code == 0, err
    expected = weights(tmp_path / "plain")
    for key, value in weights(tmp_path / "compiled").items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-4)


def test_bf16_keeps_the_weights_in_fp32(words: list[str], draft_dir: str, tmp_path: Path, door: Door) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        code, _, err = door(*words, "--draft", draft_dir, "--precision", precision, "--out", out)
        assert code == 0, err
        assert {value.dtype for value in weights(out).values()} == {torch.float32}
        found[precision] = [line["loss"] for line in lines(out) if "loss" in line]
    assert found["fp32"] != found["bf16"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.03)
