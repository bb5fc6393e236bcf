"""Laws 6 and 7, and what a training run leaves behind."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.core.models import load_model
from draftsmith.core.prompts import prompt_hash, read_prompt_hashes
from draftsmith.train.batches import collate, make_batches
from draftsmith.train.config import TrainConfig
from draftsmith.train.data import load_examples
from draftsmith.train.objective import parse_objective
from draftsmith.train.stream import order
from draftsmith.train.trainees.lm import LMTrainee
from draftsmith.train.training_run import train
from tests.train_laws import BEFORE, SGD, close, metrics, result

ROOT = Path(__file__).parents[1]

# Where a run is killed, in turn; after each of these it is started again.
MOMENTS = [
    "draftsmith.train.loop, 'learning_rate', 8, KILL",
    "draftsmith.train.checkpoint, 'save', 2, KILL",
    "draftsmith.train.checkpoint, 'save_file', 6, KILL",
    "pathlib.Path, 'rename', 2, KILL, lambda a, b: a.name.startswith('.step_')",
    "pathlib.Path, 'replace', 1, KILL, lambda a, b: b.name == 'metrics.jsonl'",
    "os, 'rmdir', 1, KILL, lambda a, **k: 'step_' in str(a) and '.step_' not in str(a)",
    "draftsmith.train.checkpoint, 'publish', 1, KILL",
    "pathlib.Path, 'replace', 1, KILL, lambda a, b: b.name == 'tokenizer.json'",
    # All is there but for what is to be removed.
    "shutil, 'rmtree', 1, KILL, lambda a, **k: pathlib.Path(a).name == 'final' and a.exists()",
]


@pytest.fixture(scope="module")
def distilled(answers):
    """60 rows of very unequal length: 12 prompts, 5 samples each."""
    return answers("The quick brown fox jumps over the lazy dog", 3, 5, 24)


@pytest.fixture
def words(distilled, dropout_dir):
    """A run whose every step draws random numbers, with several evaluations and checkpoints."""
    return (
        f"train --out draft --data {distilled} --draft {dropout_dir} --max_length 48 --steps 24 "
        "--batch_size 4 "
        "--eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 "
        "--optim.warmup_steps 3 --optim.name muon --optim.schedule wsd --device cpu"
    ).split()


def test_a_draft_of_almost_no_use_is_said_with_what_to_do(
    words, target_dir, tmp_path, door, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    # Above what the tiny pair reaches.
    monkeypatch.setattr("draftsmith.train.training_run._NO_USE", 1.0)
    door.ok(*words, "--steps", 2, "--target", target_dir, "--objective", "fkl")
    said = r"held-out alpha 0\.\d+ at step \d: too low for any tree to pay; raise optim.lr or steps"
    assert re.match(said, caplog.messages[-1])


def test_a_draft_that_was_never_trained_gets_muon(tmp_path, door, target_dir, distilled):
    door.ok(
        *("init", "--target", target_dir, "--method", "prune", "--num_layers", 1),
        *("--out", tmp_path / "0", "--device", "cpu"),
    )
    chosen = []
    for begin, end in (("0", "1"), ("1", "2")):
        door.ok(
            *("train", "--draft", tmp_path / begin, "--out", tmp_path / end, "--data", distilled),
            *("--steps", 1, "--batch_size", 2, "--max_length", 48, "--device", "cpu"),
            *(("--optim.muon_lr", 0.01) if begin == "0" else ()),
        )
        record = json.loads((tmp_path / end / "draftsmith.json").read_text())
        chosen.append(record["config"]["optim"]["name"])
    assert chosen == ["muon", "adamw"]


def test_a_run_killed_anywhere_ends_like_one_that_was_not(words, tmp_path, spawn):
    """Law 7."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    out, _ = spawn(*words, "--json", cwd=whole).wait()
    summary = json.loads(out.splitlines()[-1])
    for moment in MOMENTS:
        spawn(*words, "--json", cwd=killed, patch=f"{BEFORE}before({moment})").wait(-9)
        assert "'final'" in moment or not (killed / "draft" / "config.json").exists(), moment
    out, _ = spawn(*words, "--json", cwd=killed).wait()
    assert json.loads(out.splitlines()[-1]) == summary
    expected, found = result(whole / "draft"), result(killed / "draft")
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []
    assert {
        "model.safetensors",
        "run/metrics.jsonl",
        "run/checkpoints/step_00000024/state.json",
    } < set(found)


def _killed_at(door, monkeypatch, step, *words):
    """Run until this step, which never ends."""

    def die(job, now):
        if now == step:
            raise KeyError("killed")
        return make_batches(job, now)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr("draftsmith.train.loop.make_batches", die)
        door(*words)


@pytest.mark.slow
def test_a_step_is_its_rows_however_they_are_divided(
    tmp_path, door, monkeypatch, distilled, draft_dir
):
    """Law 6, with SGD, which hides no scale: 8 x 1 == 1 x 8 == 4 x 2; `test_train_distributed` has
    processes.
    """
    monkeypatch.chdir(tmp_path)

    for name, size, accumulation in (("8x1", 8, 1), ("1x8", 1, 8), ("4x2", 4, 2)):
        run = (
            f"train --out {name} --data {distilled} --heldout {distilled} --draft {draft_dir} "
            "--max_length 48 "
            f"--steps 4 --eval_every 4 --batch_size {size} --accumulation {accumulation} "
            "--device cpu"
        ).split()
        assert door(*run, *SGD)[0] == 0
    start, expected = (
        load_file(path / "model.safetensors") for path in (Path(draft_dir), tmp_path / "8x1")
    )
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-2
    for other in ("1x8", "4x2"):
        close(tmp_path / other, tmp_path / "8x1", atol=1e-6, rtol=1e-5)
        for a, b in zip(metrics(tmp_path / "8x1"), metrics(tmp_path / other), strict=True):
            assert a == pytest.approx(b, rel=1e-5)
    # This data can tell a mean over forwards from the mean over tokens.
    trainee = LMTrainee(load_model(draft_dir, device="cpu"), parse_objective("ce"))
    examples = load_examples([distilled], None, 48)
    sums = [trainee(collate(examples, [int(row)])) for row in order(len(examples), 0, 8, 0)]
    parameters = list(trainee.draft.parameters())
    # A trainee's gradient can be taken once.
    each = [torch.autograd.grad(one.loss, parameters) for one in sums]
    tokens = [int(one.tokens) for one in sums]
    per_forward = [[g / n for g in gradients] for gradients, n in zip(each, tokens, strict=True)]
    means = [torch.stack(parts).mean(0) for parts in zip(*per_forward, strict=True)]
    wanted = [torch.stack(parts).sum(0) / sum(tokens) for parts in zip(*each, strict=True)]
    assert max(float((a - b).abs().max()) for a, b in zip(means, wanted, strict=True)) > 1e-2


def my_forward_kl(draft_NV, target_NV, tokens_N):
    p_NV = target_NV.softmax(-1)
    return (p_NV * (target_NV.log_softmax(-1) - draft_NV.log_softmax(-1))).sum(-1)


class OwnCrossEntropy:
    needs_target = False

    def __call__(self, draft_NV, target_NV, tokens_N):
        assert target_NV is None
        return torch.nn.functional.cross_entropy(draft_NV, tokens_N, reduction="none")


def test_a_loss_of_ones_own(tmp_path, distilled, draft_dir, target_dir, capsys, golden):
    def config(out, **more):
        sizes: dict[str, Any] = {
            "max_length": 48,
            "steps": 3,
            "eval_every": 3,
            "batch_size": 4,
            "device": "cpu",
        }
        return TrainConfig(
            out=str(tmp_path / out), data=[distilled], draft=draft_dir, **sizes, **more
        )

    for name, loss, target in (("fkl", my_forward_kl, target_dir), ("ce", OwnCrossEntropy(), None)):
        named = train(config(name, objective=name, target=target))
        own = train(config(f"own-{name}", target=target), loss=loss)
        assert own["heldout_loss"] == pytest.approx(named["heldout_loss"], rel=1e-5)
        close(tmp_path / f"own-{name}", tmp_path / name, atol=1e-5)
        shown = capsys.readouterr().err
        assert name in shown and "custom:" in shown
    record = json.loads((tmp_path / "own-fkl/draftsmith.json").read_text())
    assert (
        record["objective"] == record["config"]["objective"] == f"custom:{__name__}.my_forward_kl"
    )
    # The same loss continues the run; another one would be another run.
    assert (
        train(config("own-fkl", target=target_dir), loss=my_forward_kl)["fingerprint"]
        == record["fingerprint"]
    )
    with golden.raises():
        train(config("own-fkl", target=target_dir), loss=OwnCrossEntropy())
    refused: list[tuple[Any, dict[str, Any]]] = [
        (my_forward_kl, {}),
        (lambda *given: given[0].sum(), {"target": target_dir}),
        ("fkl", {"target": target_dir}),
    ]
    for wrong, more in refused:
        with golden.raises():
            train(config("refused", **more), loss=wrong)
        shutil.rmtree(tmp_path / "refused", ignore_errors=True)


def test_a_checkpoint_is_an_ordinary_directory_and_holds_the_best_weights(
    words, tmp_path, door, monkeypatch, golden
):
    monkeypatch.chdir(tmp_path)
    # A rate so high that the weights get worse after a while.
    more = ["--optim.lr", "0.3", "--optim.warmup_steps", "10", "--patience", "2", "--steps", "200"]
    out, _ = door.ok(*words, *more, "--json")
    summary, draft = json.loads(out.splitlines()[-1]), tmp_path / "draft"
    losses = {int(line["step"]): line["heldout_loss"] for line in metrics(draft, "heldout_loss")}
    best = min(losses, key=lambda step: (losses[step], step))
    assert list(losses)[:3] == [0, 4, 8] and summary["best_step"] == best
    assert summary["heldout_loss"] == pytest.approx(losses[best], rel=1e-6)
    # Patience: two evaluations after the best one, and no further.
    assert summary["steps"] == best + 8 == max(losses) < 200
    golden(out)
    model = AutoModelForCausalLM.from_pretrained(draft)
    assert model.num_parameters() == sum(
        value.numel() for value in load_file(draft / "model.safetensors").values()
    )
    assert AutoTokenizer.from_pretrained(draft)("The")["input_ids"]
    record = json.loads((draft / "draftsmith.json").read_text())
    assert record["kind"] == "draft-lm"
    golden(record["command"])
    assert record["data"]["training"]["rows"] + record["data"]["heldout"]["rows"] == 60
    # The checkpoint knows its prompts, so that an evaluation can tell that it is asked about them
    # again.
    rows = datasets.load_dataset(
        "parquet", data_files=f"{words[words.index('--data') + 1]}/*.parquet", split="train"
    )
    asked = {prompt_hash(ids) for ids in rows["prompt_ids"]}
    asked |= {int(hashed, 16) for hashed in rows["asked"]}
    trained = read_prompt_hashes(draft)
    assert trained is not None and 0 < len(trained) < len(asked) and set(trained.tolist()) < asked
    steps = metrics(draft, "loss")
    assert [line["step"] for line in steps] == list(range(1, summary["steps"] + 1))
    assert steps[0]["lr"] == pytest.approx(0.03) and not list(draft.glob(".*"))
    # A finished run is left as it is; another one in its place is refused by name.
    before = result(draft)
    code, out, _ = door(*words, *more, "--json")
    assert (code, json.loads(out.splitlines()[-1])) == (0, summary)
    door.refused(*words, *more, "--optim.lr", "0.2")
    assert result(draft) == before
    # The same directory without its record could be anyone's.
    os.rename("draft/run", "elsewhere")
    os.unlink("draft/run.json")
    door.refused(*words, *more)
    assert not Path("draft/run").exists()


def test_a_fresh_model_learns_text(tmp_path, door, monkeypatch, draft_dir, distilled, golden):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(
        '{"text": "The quick brown fox jumps over the lazy dog. 12345"}\n' * 20
    )
    words = (
        "train --out draft --data t.jsonl --heldout t.jsonl --draft_config "
        f"{draft_dir}/config.json "
        f"--tokenizer {draft_dir} --max_length 24 --steps 40 --optim.lr 0.02 --device cpu"
    ).split()
    door.ok(*words)
    losses = [line["heldout_loss"] for line in metrics(tmp_path / "draft", "heldout_loss")]
    assert losses[0] > 5 and losses[-1] < 1.5
    assert (
        "brown"
        in door("decode", "--target", "draft", "--prompt", "The quick", "--max_new_tokens", "8")[1]
    )
    # A shape that is not the draft's is refused.
    other = json.loads(Path(draft_dir, "config.json").read_text()) | {"hidden_size": 32}
    Path("other.json").write_text(json.dumps(other))
    code, _, err = door(
        *f"train --out x --data {distilled} --draft {draft_dir} --draft_config other.json".split()
    )
    assert code == 2
    golden(err)
