"""Laws 6 and 7, and what a training run leaves behind."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaModel

from distill.config import DistillConfig
from distill.generate import distill
from draftsmith_core.errors import InputError
from draftsmith_core.models import load_model
from draftsmith_core.prompts import prompt_hash, read_prompt_hashes
from train.config import TrainConfig
from train.data import collate, load_examples
from train.mixture import order
from train.objective import parse_objective
from train.trainees.lm import LMTrainee
from train.training_run import train

Door = Callable[..., tuple[int, str, str]]
Spawn = Callable[..., Any]
Launch = Callable[..., Any]
ROOT = Path(__file__).parents[1]

DIE = """
import os, signal
def die():
    os.kill(os.getpid(), signal.{signal})
def before(owner, name, count, when=lambda *words: True):
    real, calls = getattr(owner, name), []
    def dying(*words, **more):
        if when(*words):
            calls.append(1)
            if len(calls) == count:
                die()
        return real(*words, **more)
    setattr(owner, name, dying)
import pathlib, draftsmith_core.io, train.checkpoint, train.loop
"""
# Where a run is killed, in turn; after each of these it is started again.
MOMENTS = {
    "in the middle of a step": "before(train.loop, 'learning_rate', 8)",
    "after the best weights, before the checkpoint": "before(train.checkpoint, 'save', 2)",
    "while a checkpoint is written": "before(train.checkpoint, 'save_file', 6)",
    "before a checkpoint gets its name": (
        "before(pathlib.Path, 'rename', 2, lambda a, b: a.name.startswith('.step_'))"
    ),
    "while old best weights are removed": "before(os, 'rmdir', 1, lambda a, **k: '/best_' in str(a))",
    "while the metrics are cut": "before(pathlib.Path, 'replace', 1, lambda a, b: b.name == 'metrics.jsonl')",
    "while an old checkpoint is removed": (
        "before(os, 'rmdir', 1, lambda a, **k: 'step_' in str(a) and '.step_' not in str(a))"
    ),
    "before the checkpoint is published": "before(train.checkpoint, 'publish', 1)",
    "half way through publishing": "before(pathlib.Path, 'replace', 1, lambda a, b: b.name == 'tokenizer.json')",
}


@pytest.fixture(scope="session")
def distilled(target_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 rows of very unequal length: 20 prompts, 3 samples each."""
    there = tmp_path_factory.mktemp("distilled")
    texts = ["The quick brown fox jumps over the lazy dog"[: 3 + 2 * i] for i in range(20)]
    (there / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = DistillConfig(
        target=target_dir,
        prompts=str(there / "p.jsonl"),
        out=str(there / "set"),
        num_samples=3,
        max_new_tokens=24,
        device="cpu",
    )
    distill(config, "distill")
    return str(there / "set")


@pytest.fixture
def words(distilled: str, dropout_dir: str) -> list[str]:
    """A run whose every step draws random numbers, with several evaluations and checkpoints."""
    return (
        f"train --out draft --data {distilled} --draft {dropout_dir} --max_length 48 --steps 24 --batch_size 4 "
        "--eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 --optim.warmup_steps 3 --device cpu"
    ).split()


def result(out: Path) -> dict[str, bytes]:
    """Everything a run leaves, by name; optimizer states as their tensors' bytes."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_killed_anywhere_ends_like_one_that_was_not(words: list[str], tmp_path: Path, spawn: Spawn) -> None:
    """Law 7."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    code, out, err = spawn(*words, "--json", cwd=whole).wait()
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    for moment, trap in MOMENTS.items():
        child = spawn(*words, "--json", cwd=killed, patch=DIE.format(signal="SIGKILL") + trap)
        code, _, err = child.wait()
        assert code == -9, (moment, err)
        assert not (killed / "draft" / "config.json").exists(), moment
    # At the very end, when all is there but for what is to be removed.
    last = DIE.format(signal="SIGKILL") + "before(train.checkpoint, 'tidy', 1)"
    assert spawn(*words, "--json", cwd=killed, patch=last).wait()[0] == -9
    code, out, err = spawn(*words, "--json", cwd=killed).wait()
    assert code == 0, err
    assert json.loads(out.splitlines()[-1]) == summary
    expected, found = result(whole / "draft"), result(killed / "draft")
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []
    assert {"model.safetensors", "draftsmith.json", "run/metrics.jsonl"} < set(found)
    assert "run/checkpoints/step_00000024/state.json" in found
    # Dropout was on: the same run from another seed of the generator would have differed.
    assert summary["steps"] == 24


def test_a_step_is_its_rows_however_they_are_divided(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch, distilled: str, draft_dir: str
) -> None:
    """Law 6, with SGD, which hides no scale: 8 x 1 == 1 x 8 == 4 x 2; `test_train_distributed` has processes."""
    monkeypatch.chdir(tmp_path)

    def run(out: str, size: int, accumulation: int) -> list[str]:
        return (
            f"train --out {out} --data {distilled} --heldout {distilled} --draft {draft_dir} --max_length 48 "
            f"--steps 4 --eval_every 4 --batch_size {size} --accumulation {accumulation} "
            "--optim.name sgd --optim.lr 0.5 --optim.clip_norm 0 --optim.final_lr_fraction 1 --device cpu"
        ).split()

    for name, size, accumulation in (("8x1", 8, 1), ("1x8", 1, 8), ("4x2", 4, 2)):
        assert door(*run(name, size, accumulation))[0] == 0
    start = load_file(Path(draft_dir) / "model.safetensors")
    expected = load_file(tmp_path / "8x1" / "model.safetensors")
    assert json.loads((tmp_path / "8x1/draftsmith.json").read_text())["best_step"] == 4
    assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-2
    for other in ("1x8", "4x2"):
        found = load_file(tmp_path / other / "model.safetensors")
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)
        for a, b in zip(metrics(tmp_path / "8x1"), metrics(tmp_path / other), strict=True):
            assert a == pytest.approx(b, rel=1e-5)
    mean_of_means = difference_of_means(distilled, draft_dir)
    assert mean_of_means > 1e-2, "this data could not tell a mean over forwards from a mean over tokens"


def difference_of_means(distilled: str, draft_dir: str) -> float:
    """How far the gradient of a mean over forwards is from that of the mean over tokens, for the first 8 rows."""
    trainee = LMTrainee(load_model(draft_dir, device="cpu"), parse_objective("ce"))
    examples = load_examples([distilled], None, 48)
    sums = [trainee(collate(examples, [int(row)])) for row in order(len(examples), 0, 8, 0)]
    parameters = list(trainee.draft.parameters())
    # A trainee's gradient can be taken once.
    each = [torch.autograd.grad(one.loss, parameters) for one in sums]
    tokens = [int(one.tokens) for one in sums]
    worst = 0.0
    for gradients in zip(*each, strict=True):
        per_token = torch.stack(gradients).sum(0) / sum(tokens)
        per_forward = torch.stack([g / n for g, n in zip(gradients, tokens, strict=True)]).mean(0)
        worst = max(worst, float((per_token - per_forward).abs().max()))
    return worst


def my_forward_kl(draft_NV: torch.Tensor, target_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    p_NV = target_NV.softmax(-1)
    return (p_NV * (target_NV.log_softmax(-1) - draft_NV.log_softmax(-1))).sum(-1)


class OwnCrossEntropy:
    needs_target = False

    def __call__(self, draft_NV: torch.Tensor, target_NV: object, tokens_N: torch.Tensor) -> torch.Tensor:
        assert target_NV is None
        return torch.nn.functional.cross_entropy(draft_NV, tokens_N, reduction="none")


def test_a_loss_of_ones_own(
    tmp_path: Path,
    distilled: str,
    draft_dir: str,
    target_dir: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def config(out: str, **more: Any) -> TrainConfig:
        sizes: dict[str, Any] = {"max_length": 48, "steps": 3, "eval_every": 3, "batch_size": 4, "device": "cpu"}
        return TrainConfig(out=str(tmp_path / out), data=[distilled], draft=draft_dir, **sizes, **more)

    for name, loss, target in (("fkl", my_forward_kl, target_dir), ("ce", OwnCrossEntropy(), None)):
        named = train(config(name, objective=name, target=target))
        own = train(config(f"own-{name}", target=target), loss=loss)
        assert own["heldout_loss"] == pytest.approx(named["heldout_loss"], rel=1e-5)
        expected = load_file(tmp_path / name / "model.safetensors")
        for key, value in load_file(tmp_path / f"own-{name}" / "model.safetensors").items():
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)
        shown = capsys.readouterr().err
        assert f"train {name}" in shown and "train custom:" in shown
    record = json.loads((tmp_path / "own-fkl/draftsmith.json").read_text())
    assert record["objective"] == record["config"]["objective"] == f"custom:{__name__}.my_forward_kl"
    # The same loss continues the run; another one would be another run.
    assert train(config("own-fkl", target=target_dir), loss=my_forward_kl)["fingerprint"] == record["fingerprint"]
    with pytest.raises(InputError, match="objective is .*my_forward_kl.*, now it is .*OwnCrossEntropy"):
        train(config("own-fkl", target=target_dir), loss=OwnCrossEntropy())
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (my_forward_kl, {}, "target: objective custom:.*my_forward_kl needs the target"),
        (lambda *given: given[0].sum(), {"target": target_dir}, r"loss: .* returned \[\]; return one value"),
    ]
    for wrong, more, message in refused:
        with pytest.raises(InputError, match=message):
            train(config("refused", **more), loss=wrong)
        shutil.rmtree(tmp_path / "refused", ignore_errors=True)


def test_a_checkpoint_is_an_ordinary_directory_and_holds_the_best_weights(
    words: list[str], tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A rate so high that the weights get worse after a while.
    more = ["--optim.lr", "0.3", "--optim.warmup_steps", "10", "--patience", "2", "--steps", "200"]
    code, out, err = door(*words, *more, "--json")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    lines = metrics(tmp_path / "draft")
    losses = {int(line["step"]): line["heldout_loss"] for line in lines if "heldout_loss" in line}
    assert list(losses)[:3] == [0, 4, 8]
    best = min(losses, key=lambda step: (losses[step], step))
    assert summary["best_step"] == best
    assert summary["heldout_loss"] == pytest.approx(losses[best], rel=1e-6)
    # Patience: two evaluations after the best one, and no further.
    assert summary["steps"] == best + 8 == max(losses) < 200
    assert f"best held-out loss {summary['heldout_loss']:.4f}" in out
    published = load_file(tmp_path / "draft" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert model.num_parameters() == sum(value.numel() for value in published.values())
    assert AutoTokenizer.from_pretrained(tmp_path / "draft")("The")["input_ids"]
    record = json.loads((tmp_path / "draft" / "draftsmith.json").read_text())
    assert record["kind"] == "draft-lm"
    assert record["data"]["training"]["rows"] + record["data"]["heldout"]["rows"] == 60
    # The checkpoint knows its prompts, so that an evaluation can tell that it is asked about them again.
    rows = datasets.load_dataset("parquet", data_files=f"{words[words.index('--data') + 1]}/*.parquet", split="train")
    asked = {prompt_hash(ids) for ids in rows["prompt_ids"]}
    trained = read_prompt_hashes(tmp_path / "draft")
    assert trained is not None and 0 < len(trained) < len(asked) and set(trained.tolist()) < asked
    assert record["command"].startswith("draftsmith train --out draft --data ")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, summary["steps"] + 1))
    assert steps[0]["lr"] == pytest.approx(0.03)
    assert not list((tmp_path / "draft").glob(".*"))
    # A finished run is left as it is; another one in its place is refused by name.
    before = result(tmp_path / "draft")
    code, out, _ = door(*words, *more, "--json")
    assert (code, json.loads(out.splitlines()[-1])) == (0, summary)
    code, _, err = door(*words, *more, "--optim.lr", "0.2")
    assert code == 2
    assert "with other options: optim.lr is 0.3, now it is 0.2" in err
    assert len(err.strip().splitlines()) == 1
    assert result(tmp_path / "draft") == before
    # The same directory without its record could be anyone's.
    os.rename("draft/run", "elsewhere")
    code, _, err = door(*words, *more)
    assert code == 2
    assert "holds a model that this run did not make" in err
    assert not Path("draft/run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--seed -1", "--seed: Input should be greater than or equal to 0, got -1"),
        ("--heldout_fraction 0", "--heldout_fraction: Input should be greater than 0, got 0"),
        ("--packing yes", "--packing: Input should be"),
        ("--objective 0.9fkl+0.1*ce", "no loss is named '0.9fkl' (write 0.9*fkl)"),
        ("--objective jsd=0.5", "no loss is named 'jsd=0.5' (write jsd:beta=0.5)"),
        ("--objective fkl@adaspec", "reference: @adaspec needs a distilled draft to compare with"),
        ("--objective fkl", "target: objective fkl needs the target as its teacher, or data with teacher columns"),
        ("--replay d", "replay_fraction: goes with `replay`; set both or neither"),
        ("--mixing_temperature 2", "--mixing_temperature: needs several `data`, and packing false"),
        ("--lora.alpha 3", "lora: is for a language model that starts from a `draft`, and needs lora.rank"),
        ("--on_policy.fraction 0.5", "target: is missing; heads, on_policy,"),
        ("--kind eagle --target t --anchor_kl 1", "--anchor_kl: is for a language model that starts from a `draft`"),
        ("--kind medusa --target t --objective tvd@e2e", "--objective: @adaspec and @e2e are for kind lm, not medusa"),
        ("--head.noise 0.1", "--head.noise: not an option of kind lm; it has draft_vocab_size"),
        ("--max_length 97", "max_length: 97 is more than the 96 positions of the draft"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    more: str, message: str, words: list[str], tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = door(*words, *more.split())
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("draft").exists()


def test_help_fits_three_screens_and_the_drafts_forward_is_near(
    words: list[str], tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 7 frames of our own from the command to the draft's forward, and 100 lines of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    assert len(door("train", "--help")[1].splitlines()) <= 100
    rooms = ("draftsmith_core", "drafts", "decode", "train", "draftsmith")
    homes = tuple(f"{ROOT / room}{os.sep}" for room in rooms)
    counts: set[int] = set()
    real = LlamaModel.forward

    def counted(self: LlamaModel, *given: Any, **options: Any) -> Any:
        frame, count = sys._getframe(1), 0
        while frame is not None:
            count += frame.f_code.co_filename.startswith(homes)
            frame = frame.f_back  # type: ignore[assignment]
        if self.training:
            counts.add(count)
        return real(self, *given, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    assert door(*words, "--steps", 2, "--out", tmp_path / "draft")[0] == 0
    assert counts and max(counts) <= 7


def test_a_fresh_model_learns_text(
    tmp_path: Path, door: Door, monkeypatch: pytest.MonkeyPatch, draft_dir: str, distilled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"text": "The quick brown fox jumps over the lazy dog. 12345"}\n' * 20)
    words = (
        f"train --out draft --data t.jsonl --heldout t.jsonl --draft_config {draft_dir}/config.json "
        f"--tokenizer {draft_dir} --max_length 24 --steps 40 --optim.lr 0.02 --device cpu"
    ).split()
    code, _, err = door(*words)
    assert code == 0, err
    losses = [line["heldout_loss"] for line in metrics(tmp_path / "draft") if "heldout_loss" in line]
    assert losses[0] > 5
    assert losses[-1] < 1.5
    code, out, _ = door("decode", "--target", "draft", "--prompt", "The quick", "--max_new_tokens", "8")
    assert code == 0
    assert "brown" in out
    # A shape that is not the draft's is refused.
    other = json.loads(Path(draft_dir, "config.json").read_text()) | {"hidden_size": 32}
    (tmp_path / "other.json").write_text(json.dumps(other))
    code, _, err = door(
        *("train", "--out", "x", "--data", distilled, "--draft", draft_dir, "--draft_config", "other.json")
    )
    assert code == 2
    assert "its hidden_size is 16, other.json says 32" in err


@pytest.mark.slow
def test_tensorboard_gets_the_curves(words: list[str], tmp_path: Path, spawn: Spawn) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, out, err = spawn(*words, "--steps", "3", "--tracker", "tensorboard", cwd=tmp_path).wait()
    assert code == 0, err
    found: dict[str, list[tuple[int, float]]] = {}
    for directory in {path.parent for path in (tmp_path / "draft/run").rglob("events.out.tfevents*")}:
        events = reader.EventAccumulator(str(directory))
        events.Reload()
        found |= {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    losses = [(line["step"], line["loss"]) for line in metrics(tmp_path / "draft") if "loss" in line]
    assert [step for step, _ in found["loss"]] == [step for step, _ in losses] == [1, 2, 3]
    assert [value for _, value in found["loss"]] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert {"heldout_loss", "tokens_per_s", "memory_gib"} <= found.keys()
    # What the clock says is in no file that two runs could be compared by.
    assert "tokens_per_s" not in (tmp_path / "draft/run/metrics.jsonl").read_text()
