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

from draftsmith.core.prompts import prompt_hash, read_prompt_hashes
from draftsmith.train.config import TrainConfig
from draftsmith.train.training_run import train
from tests.train_laws import close, metrics, result


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
    pruned = f"init --target {target_dir} --method prune --num_layers 1 --out {tmp_path}/0"
    door.ok(*pruned.split(), "--device", "cpu")
    chosen = []
    for begin, end in (("0", "1"), ("1", "2")):
        words = f"train --draft {tmp_path}/{begin} --out {tmp_path}/{end} --data {distilled} "
        words += "--steps 1 --batch_size 2 --max_length 48 --device cpu"
        door.ok(*words.split(), *(("--optim.muon_lr", 0.01) if begin == "0" else ()))
        record = json.loads((tmp_path / end / "draftsmith.json").read_text())
        chosen.append(record["config"]["optim"]["name"])
    assert chosen == ["muon", "adamw"]


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
    more = "--optim.lr 0.3 --optim.warmup_steps 10 --patience 2 --steps 200".split()
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
    door.refused(
        *f"train --out x --data {distilled} --draft {draft_dir} --draft_config other.json".split()
    )
