"""What a training run survives: signals, a full disk, damaged files, numbers that are none. And its
options.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.train_laws import BEFORE, close, metrics, result

CONTINUES = "; run the same command again to resume$"
FULL = "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'model.safetensors')"
TORN = (
    "__import__('safetensors').SafetensorError('I/O error: No space left on device (os error 28)')"
)
HOST = (
    "RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory: you tried to "
    "allocate 9 bytes')"
)
CUDA = "__import__('torch').OutOfMemoryError('CUDA out of memory.')"
MEMORY = (
    r"out of memory on cpu after step \d+, with batch_size 4 and max_length 48 \(peak of "
    r"the process: .*; lower "
)
TWICE = (
    "for _ in (1, 2): before(draftsmith.train.parallel.Copies, 'backward', 1, send(signal.SIGINT))"
)
NAN = (
    "before(draftsmith.train.loop, 'make_batches', 1, lambda: "
    "setattr(draftsmith.train.loop, 'learning_rate', lambda *words: float('nan')))"
)
# What happens to a run, in turn: the patch, the step of the checkpoint that it adds, exit code and
# last line.
DISTURBED = [
    ("before(draftsmith.train.checkpoint, 'newest', 1, send(signal.SIGTERM))", None, 143, ""),
    (
        "before(draftsmith.train.loop, 'learning_rate', 8, send(signal.SIGTERM))",
        8,
        143,
        "stopped by SIGTERM" + CONTINUES,
    ),
    (
        "before(draftsmith.train.loop, 'learning_rate', 2, send(signal.SIGINT))",
        10,
        130,
        "train: interrupted" + CONTINUES,
    ),
    (
        "before(draftsmith.train.loop, 'evaluate', 2, send(signal.SIGTERM))",
        16,
        143,
        "stopped by SIGTERM" + CONTINUES,
    ),
    (TWICE, None, 130, "train: interrupted" + CONTINUES),
    # Weights, optimizer, best weights and random state go through save_file.
    (
        f"before(draftsmith.train.checkpoint, 'save_file', 1, fail({FULL}))",
        None,
        1,
        "draft/run/.*No space left on device",
    ),
    (
        f"before(draftsmith.train.checkpoint, 'save_file', 3, fail({TORN}))",
        None,
        1,
        "draft/run/.*No space left on device",
    ),
    (f"before(draftsmith.train.parallel.Copies, 'backward', 1, fail({HOST}))", None, 1, MEMORY),
    (f"before(draftsmith.train.loop, 'evaluate', 1, fail({CUDA}))", 18, 1, MEMORY),
    (
        "before(draftsmith.train.parallel.Copies, 'gather_optimizer', 1, fail(MemoryError()))",
        None,
        1,
        MEMORY,
    ),
    (NAN, None, 1, "the loss is nan"),
]


@pytest.fixture(scope="module")
def words(answers, dropout_dir):
    """A run on 36 rows of unequal length whose every step draws random numbers."""
    distilled = answers("Numbers such as 12, 345 and 6789", 2, 3, 20)
    return (
        f"train --out draft --data {distilled} --draft {dropout_dir} --max_length 48 --steps 24 "
        "--batch_size 4 "
        "--eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 "
        "--optim.warmup_steps 3 --device cpu"
    ).split()


def last_line(err):
    return err.strip().splitlines()[-1]


def checkpoints(place):
    return sorted(path.name for path in (place / "draft/run/checkpoints").glob("*"))


@pytest.mark.slow
def test_what_stops_a_run_is_one_line_and_the_next_start_continues(words, tmp_path, spawn):
    place = tmp_path / "disturbed"
    place.mkdir()
    for patch, step, expected, told in DISTURBED:
        before = {name: data for name, data in result(place).items() if "checkpoints" in name}
        out, err = spawn(*words, cwd=place, patch=BEFORE + patch).wait(expected)
        assert not out and re.search(told, last_line(err)), (patch, err)
        after = {name: data for name, data in result(place).items() if "checkpoints" in name}
        if step is None:
            assert after == before, patch
        else:
            assert checkpoints(place)[-1] == f"step_{step:08d}", patch
        assert not list(place.rglob(".*tmp*")) and not (place / "draft/config.json").exists()
    (tmp_path / "whole").mkdir()
    for directory in (place, tmp_path / "whole"):
        spawn(*words, cwd=directory).wait()
    expected_files, found = result(tmp_path / "whole/draft"), result(place / "draft")
    assert sorted(found) == sorted(expected_files)
    assert [name for name in found if found[name] != expected_files[name]] == []


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_path_that_was_taken(words, tmp_path, spawn):
    """A kill between the best weights of step 8 and the next checkpoint; then step 8 turns out
    otherwise.
    """
    trap = "before(draftsmith.train.loop, 'learning_rate', 9, KILL)"
    spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait(-9)
    expected = load_file(tmp_path / "draft/run/checkpoints/step_00000006/best.safetensors")
    worse = """
real = draftsmith.train.loop.evaluate
draftsmith.train.loop.evaluate = lambda *words: {
    name: value + 100 for name, value in real(*words).items()
}
"""
    spawn(*words, cwd=tmp_path, patch=BEFORE + worse).wait()
    assert json.loads((tmp_path / "draft/draftsmith.json").read_text())["best_step"] == 4
    found = load_file(tmp_path / "draft/model.safetensors")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(words, tmp_path, spawn, golden):
    trap = "before(draftsmith.train.loop, 'learning_rate', 11, KILL)"
    spawn(*words, cwd=tmp_path, patch=BEFORE + trap).wait(-9)
    assert checkpoints(tmp_path) == ["step_00000006", "step_00000009"]
    file = tmp_path / "draft/run/checkpoints/step_00000009/optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.copytree(tmp_path / "draft", tmp_path / "both" / "draft")
    _, err = spawn(*words, cwd=tmp_path).wait()
    golden(err)
    # When no checkpoint is whole there is nothing to continue from, and nothing is thrown away
    # unasked.
    (tmp_path / "both/draft/run/checkpoints/step_00000006/state.json").unlink()
    (tmp_path / "both/draft/.draftsmith-lock").unlink()  # of the run that was killed
    before = result(tmp_path / "both")
    del before["draft/run.json"]  # says where it lies now
    out, err = spawn(*words, cwd=tmp_path / "both").wait(1)
    assert not out
    golden(last_line(err))
    after = result(tmp_path / "both")
    assert before == {name: after[name] for name in before}


def test_the_best_alpha_is_kept_and_as_many_checkpoints_as_asked_for(
    words, target_dir, tmp_path, door
):
    # A rate so high that the figures go up and down, each in its own way.
    more = ["--target", target_dir, "--optim.lr", "0.1", "--eval_every", "1", "--keep", "3"]
    assert door(*words, *more, "--out", tmp_path / "draft")[0] == 0
    assert checkpoints(tmp_path) == [f"step_{step:08d}" for step in (18, 21, 24)]
    judged = metrics(tmp_path / "draft", "heldout_alpha")
    best = max(judged, key=lambda line: line["heldout_alpha"])
    assert best["step"] != min(judged, key=lambda line: line["heldout_loss"])["step"], (
        "cannot tell the two apart"
    )
    record = json.loads((tmp_path / "draft/draftsmith.json").read_text())
    assert (record["best_step"], record["heldout_alpha"]) == (best["step"], best["heldout_alpha"])


@pytest.mark.parametrize(
    "option",
    [
        "--gradient_checkpointing",
        pytest.param(
            "--torch_compile",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU"
                ),
            ],
        ),
    ],
)
def test_saving_memory_or_time_does_not_change_what_is_learnt(
    option, words, draft_dir, tmp_path, spawn
):
    more = [
        "--draft",
        draft_dir,
        "--steps",
        "2",
        "--eval_every",
        "2",
        "--optim.name",
        "sgd",
        "--optim.lr",
        "0.5",
    ]
    for out, options in (("plain", []), ("changed", [option])):
        spawn(*words, *more, *options, "--out", tmp_path / out, cwd=tmp_path).wait()
    close(tmp_path / "changed", tmp_path / "plain")


def test_bf16_keeps_the_weights_in_fp32(words, draft_dir, tmp_path, door):
    found = {}
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        door.ok(*words, "--draft", draft_dir, "--precision", precision, "--out", out)
        assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {
            torch.float32
        }
        found[precision] = [line["loss"] for line in metrics(out, "loss")]
    assert found["fp32"] != found["bf16"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.03)
