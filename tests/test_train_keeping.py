"""What keeps what a draft knew: the anchor, LoRA, and several domains in one run; with laws 6 and 7."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaModel

from draftsmith_core.errors import is_installed
from draftsmith_core.models import load_model
from tests import train_laws
from tests.train_laws import metrics, words_of
from train import draft_setup
from train.batch import IGNORE
from train.data import collate, load_examples, units
from train.objective import parse_objective
from train.trainees.lm import LMTrainee

NEEDS_PEFT = pytest.mark.skipif(not is_installed("peft"), reason="needs peft (pip install 'draftsmith[peft]')")
ALL = ["--anchor_kl", "0.5", "--mixing_temperature", "3"]
LORA = ["--lora.rank", "4", "--lora.dropout", "0.2"] if is_installed("peft") else []


@pytest.fixture(scope="module")
def domains(answers):
    """Distilled sets of 24 and of 12 answers."""
    return [
        answers("A draft model proposes tokens and the target", 3, 2, 16),
        answers("Numbers such as 12, 345", 1, 1, 9),
    ]


@pytest.fixture
def words(domains, draft_dir):
    return words_of(domains, draft_dir)


@pytest.mark.parametrize("options", [[*ALL, *LORA[:2]], ["--objective", "tvd@e2e:depth=3"]], ids=["kept", "e2e"])
def test_a_step_is_its_rows_however_they_are_divided(options, words, target_dir, tmp_path, door):
    more = ["--target", target_dir] if "--objective" in options else []
    train_laws.a_step_is_its_rows_however_they_are_divided(words, [*options, *more], tmp_path, door)


def test_a_killed_run_ends_as_one_that_was_not(words, tmp_path, spawn):
    """The weights before training are the anchor, and not those of the checkpoint; dropout is in the updates."""
    train_laws.a_killed_run_ends_as_one_that_was_not(words, [*ALL, *LORA], tmp_path, spawn)


def kl_of_rows(base: Any, draft: Any, batch: Any) -> Tensor:
    """Sum over valid tokens of KL(base || draft), written out."""
    valid = batch.labels_BT != IGNORE
    p, q = (model(batch.ids_BT).logits[valid].log_softmax(-1) for model in (base, draft))
    total: Tensor = (p.exp() * (p - q)).sum()
    return total


@pytest.mark.parametrize("objective", ["ce", "jsd:beta=0.5"])
def test_the_pull_of_the_distributions_is_their_divergence_per_token(
    objective, domains, draft_dir, dropout_dir, target_dir
):
    draft, base = load_model(draft_dir, device="cpu"), load_model(dropout_dir, device="cpu")
    target = None if objective == "ce" else load_model(target_dir, device="cpu")
    batch = collate(load_examples(domains, None, 40), range(6))
    parsed = parse_objective(objective)
    plain = LMTrainee(copy.deepcopy(draft), parsed, target)(batch)
    same = LMTrainee(copy.deepcopy(draft), parsed, target, anchor=(draft, 0.7))(batch)
    torch.testing.assert_close(same.loss, plain.loss)
    pulled = LMTrainee(draft, parsed, target, anchor=(base, 0.7))
    found = pulled(batch)
    expected = 0.7 * kl_of_rows(base, draft, batch)
    torch.testing.assert_close(found.loss - plain.loss, expected, atol=1e-3, rtol=1e-4)
    assert expected.item() > 1
    assert torch.equal(found.tokens, plain.tokens) and torch.equal(found.alpha, plain.alpha)
    inner = list(draft.parameters())
    slopes = torch.autograd.grad(found.loss - 0, inner)
    again = LMTrainee(draft, parsed, target)(batch).loss
    for slope, other, extra in zip(
        slopes, torch.autograd.grad(again, inner), torch.autograd.grad(expected, inner), strict=True
    ):
        torch.testing.assert_close(slope, other + extra, atol=1e-4, rtol=1e-3)


@NEEDS_PEFT
def test_the_checkpoint_is_the_draft_with_its_adapters_merged(words, draft_dir, tmp_path, door):
    out = tmp_path / "out"
    door.ok(*words(out, 8), "--lora.rank", 4, "--optim.lr", "0.02", "--lora.targets", "q_proj", "up_proj")
    before, after = load_file(Path(draft_dir) / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "up_proj" in name}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 4
    record = json.loads((out / "draftsmith.json").read_text())
    assert record["config"]["lora"] == {"rank": 4, "alpha": None, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    losses = [line["heldout_loss"] for line in metrics(out, "heldout_loss")]
    assert losses[-1] < losses[0]
    # What was measured while training is what the merged checkpoint gives.
    door.ok(*words(tmp_path / "again", 1), "--draft", out)
    assert metrics(tmp_path / "again")[0]["heldout_loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_a_small_domain_is_drawn_more_often_and_each_of_its_rows_as_often(domains):
    examples = load_examples(domains, None, 40)
    assert examples.domains is not None and examples.domains.tolist() == [0] * 24 + [1] * 12
    stream = units(examples, 0, 480, seed=3, temperature=1e9)
    counts = torch.bincount(torch.from_numpy(stream), minlength=36).tolist()
    assert counts[:24] == [10] * 24 and counts[24:] == [20] * 12
    for start, stop in ((0, 7), (7, 8), (100, 333)):
        assert units(examples, start, stop, 3, temperature=1e9).tolist() == stream[start:stop].tolist()


@pytest.mark.parametrize("more", [["--packing", "true"], ["--anchor_kl", "0.3"]], ids=["packed", "anchored"])
def test_held_states_save_forwards_and_change_no_bit(more, answers, draft_dir, target_dir, tmp_path, door, monkeypatch):
    """All held, some, none, and the target's on disk; some three epochs, five evaluations."""
    data = answers("Numbers such as 12, 345 and 6789", 2, 3, 20)
    words = (
        f"train --data {data} --draft {draft_dir} --target {target_dir} --objective fkl --max_length 48 "
        "--steps 16 --batch_size 8 --eval_every 4 --save_every 3 --heldout_fraction 0.2 --optim.lr 0.01 --device cpu"
    ).split()
    forwards: list[tuple[int, ...]] = []
    real = LlamaModel.forward

    def counted(self: LlamaModel, input_ids: Any = None, **options: Any) -> Any:
        if not self.training and input_ids is not None:
            forwards.append(tuple(input_ids.shape))
        return real(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    files, counts = {}, {}
    for name, limit in (("all", 2**31), ("some", 10_000), ("none", 0), ("disk", 0)):
        forwards.clear()
        monkeypatch.setattr(draft_setup, "_MEMORY_BYTES", limit)
        cache = ["--head.features", str(tmp_path / "features")] if name == "disk" else []
        door.ok(*words, *more, *cache, "--out", tmp_path / name)
        made = [(tmp_path / name / file).read_bytes() for file in ("model.safetensors", "run/metrics.jsonl")]
        files[name], counts[name] = made, len(forwards)
    assert files["some"] == files["all"] == files["none"] == files["disk"]
    assert counts["all"] < counts["some"] < counts["none"]
    assert counts["disk"] < counts["none"]
