"""The anchor: a draft that is held near the distributions it had before training."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith_core.models import load_model
from tests import train_laws
from tests.train_laws import Words, words_of
from train.batch import IGNORE
from train.data import collate, load_examples
from train.objective import parse_objective
from train.trainees.lm import LMTrainee

Door = Callable[..., tuple[int, str, str]]
ANCHOR = ["--anchor_kl", "0.5"]


@pytest.fixture(scope="module")
def distilled(answers: Callable[..., str]) -> str:
    return answers("A draft model proposes tokens and the target", 3, 2, 16)


@pytest.fixture
def words(distilled: str, draft_dir: str) -> Words:
    return words_of([distilled], draft_dir)


def kl_of_rows(base: Any, draft: Any, batch: Any) -> Tensor:
    """Sum over valid tokens of KL(base || draft), written out."""
    valid = batch.labels_BT != IGNORE
    p, q = (model(batch.ids_BT).logits[valid].log_softmax(-1) for model in (base, draft))
    total: Tensor = (p.exp() * (p - q)).sum()
    return total


@pytest.mark.parametrize("objective", ["ce", "jsd:beta=0.5"])
def test_the_pull_of_the_distributions_is_their_divergence_per_token(
    objective: str, distilled: str, draft_dir: str, dropout_dir: str, target_dir: str
) -> None:
    draft, base = load_model(draft_dir, device="cpu"), load_model(dropout_dir, device="cpu")
    target = None if objective == "ce" else load_model(target_dir, device="cpu")
    batch = collate(load_examples([distilled], None, 40), range(6))
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


def test_a_step_is_its_rows_however_they_are_divided(words: Words, tmp_path: Path, door: Door) -> None:
    train_laws.a_step_is_its_rows_however_they_are_divided(words, ANCHOR, tmp_path, door)


def test_a_killed_run_goes_on_from_the_same_anchor(words: Words, tmp_path: Path, spawn: Callable[..., Any]) -> None:
    """The weights before training are the anchor, and not those of the checkpoint."""
    train_laws.a_killed_run_ends_as_one_that_was_not(words, ANCHOR, tmp_path, spawn)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu2", "cpu2_fsdp2"])
def test_two_processes_are_one(
    config: str, words: Words, tmp_path: Path, door: Door, launch: Callable[..., Any]
) -> None:
    train_laws.two_processes_are_one(config, words, ANCHOR, tmp_path, door, launch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--draft d --anchor_kl nan", "anchor_kl"),
        ("--draft_config c.json --anchor_kl 1", "anchor_kl: fresh weights have nothing to keep; name the `draft`"),
        ("--kind medusa --target t --draft d --anchor_kl 1", "anchor_kl: is for draft language models"),
    ],
)
def test_anchors_that_mean_nothing_are_refused(more: str, message: str, tmp_path: Path, door: Door) -> None:
    code, _, err = door("train", "--out", tmp_path / "out", "--data", "x", *more.split())
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
