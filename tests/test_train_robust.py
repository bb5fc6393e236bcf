"""What a training run survives: damaged files, too little memory, numbers that are none. And its
options.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.train_laws import SGD, close, metrics, result


@pytest.fixture
def words(answers, dropout_dir):
    """A run on 36 rows of unequal length whose every step draws random numbers."""
    distilled = answers("Numbers such as 12, 345 and 6789", 2, 3, 20)
    return (
        f"train --out draft --data {distilled} --draft {dropout_dir} --max_length 48 --steps 24 "
        "--batch_size 4 "
        "--eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 "
        "--optim.warmup_steps 3 --device cpu"
    ).split()


def checkpoints(place):
    return sorted(path.name for path in (place / "draft/run/checkpoints").glob("*"))


def test_without_a_whole_checkpoint_nothing_is_thrown_away(words, tmp_path, door, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words += ["--steps", "3"]
    door.ok(*words)
    (tmp_path / "draft" / "config.json").unlink()
    for state in tmp_path.rglob("state.json"):
        state.unlink()
    before = result(tmp_path)
    door.refused(*words, code=1)
    assert result(tmp_path) == before


ALLOCATOR = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(ALLOCATOR), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_memory_that_runs_out_names_what_to_lower(error, words, tmp_path, door, monkeypatch):
    def fail(*given):
        raise error

    monkeypatch.setattr("draftsmith.train.loop.evaluate", fail)
    code, _, err = door(*words, "--out", tmp_path)
    said = r"on cpu after step 0, with batch_size 4 and max_length 48 \(peak of .*; lower "
    assert code == 1 and re.search(said, err.splitlines()[-1])


def test_a_loss_that_is_no_number_ends_the_run(words, tmp_path, door, monkeypatch):
    monkeypatch.setattr("draftsmith.train.loop.learning_rate", lambda *given: float("nan"))
    door.refused(*words, "--out", tmp_path, code=1)


def test_the_best_alpha_is_kept_and_as_many_checkpoints_as_asked_for(
    words, target_dir, tmp_path, door
):
    # A rate so high that the figures go up and down, each in its own way.
    more = f"--target {target_dir} --optim.lr 0.1 --eval_every 1 --keep 3".split()
    door.ok(*words, *more, "--out", tmp_path / "draft")
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
    option, words, draft_dir, tmp_path, door
):
    words += [*f"--draft {draft_dir} --steps 2 --eval_every 2".split(), *SGD]
    for out, options in (("plain", []), ("changed", [option])):
        door.ok(*words, *options, "--out", tmp_path / out)
    close(tmp_path / "changed", tmp_path / "plain")


def test_bf16_keeps_the_weights_in_fp32(words, draft_dir, tmp_path, door):
    found = {}
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        door.ok(*words, *f"--draft {draft_dir} --precision {precision} --out {out}".split())
        assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {
            torch.float32
        }
        found[precision] = [line["loss"] for line in metrics(out, "loss")]
    assert found["fp32"] != found["bf16"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.03)
