"""Hidden states of frozen models that are held for later epochs and evaluations: fewer forwards, the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaModel

from distill.config import DistillConfig
from distill.generate import distill
from train import draft_setup

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]

KILLED = """
import os, signal, train.loop
real = train.loop.learning_rate
def dying(optim, step, steps):
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(optim, step, steps)
train.loop.learning_rate = dying
"""


@pytest.fixture(scope="module")
def distilled(target_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """48 rows of unequal length; each prompt has three answers."""
    there = tmp_path_factory.mktemp("states")
    texts = ["The quick brown fox jumps over the lazy dog"[: 3 + 2 * i] for i in range(16)]
    (there / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options: dict[str, Any] = {"num_samples": 3, "max_new_tokens": 20, "device": "cpu"}
    distill(DistillConfig(target=target_dir, prompts=str(there / "p.jsonl"), out=str(there / "set"), **options), "d")
    return str(there / "set")


@pytest.fixture
def words(distilled: str, draft_dir: str, target_dir: str) -> list[str]:
    """Some three epochs, five evaluations."""
    return (
        f"train --data {distilled} --draft {draft_dir} --target {target_dir} --objective jsd:beta=0.5 --max_length 48 "
        "--steps 16 --batch_size 8 --eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 --device cpu"
    ).split()


def made(out: Path) -> dict[str, bytes]:
    """Weights, metrics and the best weights of a run."""
    return {name: (out / name).read_bytes() for name in ("model.safetensors", "run/metrics.jsonl")}


@pytest.mark.parametrize("more", [["--packing", "true"], ["--anchor_kl", "0.3"]], ids=["packed", "anchored"])
def test_held_states_save_forwards_and_change_no_bit(
    more: list[str], words: list[str], tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All held, some, none, and the target's on disk."""
    forwards: list[tuple[int, ...]] = []
    real = LlamaModel.forward

    def counted(self: LlamaModel, input_ids: Any = None, **options: Any) -> Any:
        if not self.training and input_ids is not None:
            forwards.append(tuple(input_ids.shape))
        return real(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    found, counts = {}, {}
    for name, limit in (("all", 2**31), ("some", 10_000), ("none", 0), ("disk", 0)):
        forwards.clear()
        monkeypatch.setattr(draft_setup, "_MEMORY_BYTES", limit)
        place = ["--head.features", str(tmp_path / "features")] if name == "disk" else []
        code, _, err = door(*words, *more, *place, "--out", tmp_path / name)
        assert code == 0, err
        in_memory = name != "disk" or "--anchor_kl" in more
        assert ("are held in memory" in err) == in_memory, err
        assert ("the rest is computed every time" in err) == (in_memory and name != "all"), err
        found[name], counts[name] = made(tmp_path / name), len(forwards)
    assert found["some"] == found["all"]
    assert found["none"] == found["all"]
    assert found["disk"] == found["all"]
    assert counts["all"] < counts["some"] < counts["none"]
    assert counts["disk"] < counts["none"]


@pytest.mark.slow
def test_a_killed_run_that_holds_states_ends_with_the_same_bytes(
    words: list[str], tmp_path: Path, spawn: Spawn, door: Door
) -> None:
    """Law 7: what was held is gone, and made again."""
    assert door(*words, "--out", tmp_path / "whole")[0] == 0
    again = [*words, "--out", str(tmp_path / "killed")]
    assert spawn(*again, cwd=tmp_path, patch=KILLED.format(step=11)).wait()[0] == -9
    code, _, err = spawn(*again, cwd=tmp_path).wait()
    assert code == 0, err
    assert made(tmp_path / "killed") == made(tmp_path / "whole")


def test_a_single_epoch_holds_held_out_data_alone(words: list[str], tmp_path: Path, door: Door) -> None:
    tokens = {}
    for steps in (4, 16):
        words[words.index("--steps") + 1] = str(steps)
        code, _, err = door(*words, "--out", tmp_path / str(steps))
        assert code == 0, err
        (line,) = [line for line in err.splitlines() if "held in memory" in line]
        tokens[steps] = int(line.split(" tokens")[0].split()[-1].replace(",", ""))
    assert 0 < 3 * tokens[4] < tokens[16]


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--on_policy.fraction", "0.5"], "answers of on_policy do not come back"), ([], "no target is given")],
)
def test_a_cache_that_would_not_be_used_is_refused(more: list[str], said: str, words: list[str], door: Door) -> None:
    at = words.index("--target")
    run = words if more else words[:at] + words[at + 2 :]
    code, _, err = door(*run, *more, "--head.features", "features", "--out", "draft")
    assert code == 2
    assert said in err
