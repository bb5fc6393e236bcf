"""What keeps what a draft knew: the anchor, LoRA, and several domains in one run; with laws 6 and 7."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith_core.errors import is_installed
from draftsmith_core.models import load_model
from tests import train_laws
from tests.train_laws import Words, words_of
from train.batch import IGNORE
from train.data import collate, load_examples
from train.mixture import drawn, shares, units
from train.objective import parse_objective
from train.trainees.lm import LMTrainee

Door = Callable[..., tuple[int, str, str]]
NEEDS_PEFT = pytest.mark.skipif(not is_installed("peft"), reason="needs peft (pip install 'draftsmith[peft]')")
ALL = ["--anchor_kl", "0.5", "--mixing_temperature", "3"]
LORA = ["--lora.rank", "4", "--lora.dropout", "0.2"] if is_installed("peft") else []


@pytest.fixture(scope="module")
def domains(answers: Callable[..., str]) -> list[str]:
    """Distilled sets of 24 and of 12 answers."""
    return [
        answers("A draft model proposes tokens and the target", 3, 2, 16),
        answers("Numbers such as 12, 345", 1, 1, 9),
    ]


@pytest.fixture
def words(domains: list[str], draft_dir: str) -> Words:
    return words_of(domains, draft_dir)


def test_a_step_is_its_rows_however_they_are_divided(words: Words, tmp_path: Path, door: Door) -> None:
    train_laws.a_step_is_its_rows_however_they_are_divided(words, [*ALL, *LORA[:2]], tmp_path, door)


def test_a_killed_run_ends_as_one_that_was_not(words: Words, tmp_path: Path, spawn: Callable[..., Any]) -> None:
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
    objective: str, domains: list[str], draft_dir: str, dropout_dir: str, target_dir: str
) -> None:
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


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(2, 30)[None]).logits
    return found


@NEEDS_PEFT
def test_the_checkpoint_is_the_draft_with_its_adapters_merged(
    words: Words, draft_dir: str, tmp_path: Path, door: Door
) -> None:
    import peft

    out = tmp_path / "out"
    code, _, err = door(*words(out, 8), "--lora.rank", 4, "--optim.lr", "0.02", "--lora.targets", "q_proj", "up_proj")
    assert code == 0, err
    before, after = load_file(Path(draft_dir) / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "up_proj" in name}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= 4
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    base = AutoModelForCausalLM.from_pretrained(draft_dir).eval()
    assert (logits(base) - logits(merged)).abs().max() > 1e-2
    beside = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    torch.testing.assert_close(logits(beside), logits(merged), atol=1e-4, rtol=1e-4)
    record = json.loads((out / "draftsmith.json").read_text())
    assert record["config"]["lora"] == {"rank": 4, "alpha": None, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    figures = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["heldout_loss"] for line in figures if "heldout_loss" in line]
    assert losses[-1] < losses[0]
    # What was measured while training is what the merged checkpoint gives.
    code, _, err = door(*words(tmp_path / "again", 1), "--draft", out)
    assert code == 0, err
    first = json.loads((tmp_path / "again" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["heldout_loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_shares_go_from_sizes_to_alike() -> None:
    assert shares([30, 10], 1.0) == pytest.approx([0.75, 0.25])
    assert shares([30, 10], 2.0) == pytest.approx([math.sqrt(3) / (1 + math.sqrt(3)), 1 / (1 + math.sqrt(3))])
    assert shares([30, 10, 5], 1e9) == pytest.approx([1 / 3] * 3)
    assert shares([10**9, 1], 1e-3) == [1.0, 0.0]


def test_every_place_is_one_domains_wherever_the_stream_is_cut() -> None:
    wanted = [0.5, 0.3, 0.2]
    whole = drawn(wanted, 0, 1000)
    assert sorted(place for places, _, _ in whole for place in places.tolist()) == list(range(1000))
    assert [last - first for _, first, last in whole] == pytest.approx([500, 300, 200], abs=1)
    of_place = {place: k for k, (places, _, _) in enumerate(whole) for place in places.tolist()}
    for start, stop in ((0, 1), (3, 3), (17, 40), (999, 1000)):
        for k, (places, first, last) in enumerate(drawn(wanted, start, stop)):
            assert places.tolist() == [place - start for place in range(start, stop) if of_place[place] == k]
            assert first == sum(of_place[place] == k for place in range(start)) and last - first == len(places)
    # Evenly spread: no ten places in a row are without the commonest domain.
    assert all(any(of_place[place + i] == 0 for i in range(10)) for place in range(990))


def test_a_small_domain_is_drawn_more_often_and_each_of_its_rows_as_often(domains: list[str]) -> None:
    examples = load_examples(domains, None, 40)
    assert examples.domains is not None and examples.domains.tolist() == [0] * 24 + [1] * 12
    stream = units(examples, 0, 480, seed=3, temperature=1e9)
    counts = torch.bincount(torch.from_numpy(stream), minlength=36).tolist()
    assert counts[:24] == [10] * 24 and counts[24:] == [20] * 12
    for start, stop in ((0, 7), (7, 8), (100, 333)):
        assert units(examples, start, stop, 3, temperature=1e9).tolist() == stream[start:stop].tolist()
