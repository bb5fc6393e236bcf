"""`tvd@e2e`: the loss of drafts of several tokens, compared with itself written out; laws 6 and 7."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith_core.errors import InputError
from draftsmith_core.models import load_model
from tests import train_laws
from tests.train_laws import words_of
from train.batch import IGNORE, Batch
from train.data import collate, load_examples
from train.losses import draft_losses
from train.objective import parse_objective
from train.trainees.lm import LMTrainee

Door = Callable[..., tuple[int, str, str]]
OBJECTIVE = ["--objective", "tvd@e2e:depth=3"]


@pytest.fixture(scope="module")
def distilled(answers: Callable[..., str]) -> str:
    return answers("A draft model proposes tokens and the target", 3, 2, 16)


def losses_written_out(alpha_L: list[Any], depth: int) -> list[Any]:
    """Of one sequence: 1 - (1/g) sum_j prod_(i<=j) alpha_i of the draft that begins at each place."""
    found = []
    for start in range(len(alpha_L)):
        length, product, total = min(depth, len(alpha_L) - start), 1.0, 0.0
        for step in range(length):
            product = product * alpha_L[start + step]
            total = total + product
        found.append(1 - total / length)
    return found


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_losses_and_slopes_are_those_that_are_written_out(depth: int) -> None:
    lengths = [5, 1, 2, 9]
    alpha_N = torch.rand(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alpha_N[3] = 0.0  # nothing behind a certain rejection counts, and no slope is lost by dividing by it
    sequence_N = torch.repeat_interleave(torch.tensor([4, 7, 8, 11]), torch.tensor(lengths))
    loss_N, weight_N = draft_losses(alpha_N, sequence_N, depth)
    own = alpha_N.clone().requires_grad_()
    pieces = [losses_written_out(list(part), depth) for part in own.split(lengths)]
    expected_N = torch.stack([loss for piece in pieces for loss in piece])
    torch.testing.assert_close(loss_N, expected_N.detach())
    expected_N.sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(weight_N, -own.grad)
    # A draft of one token is the token alone.
    if depth == 1:
        torch.testing.assert_close(loss_N, 1 - alpha_N)
        assert weight_N.tolist() == [1.0] * len(alpha_N)


def of_batch(draft: Any, target: Any, batch: Batch, depth: int) -> Tensor:
    """The loss of a batch, written out from whole logits."""
    q, p = (model(batch.ids_BT).logits.softmax(-1) for model in (draft, target))
    alpha_BT = torch.minimum(p, q).sum(-1)
    total = torch.zeros(())
    for alpha_T, labels_T in zip(alpha_BT, batch.labels_BT, strict=True):
        total = total + sum(losses_written_out(list(alpha_T[labels_T != IGNORE]), depth))
    return total


def test_the_loss_of_a_batch_and_its_gradient(distilled: str, draft_dir: str, target_dir: str) -> None:
    draft, target = load_model(draft_dir, device="cpu"), load_model(target_dir, device="cpu")
    batch = collate(load_examples([distilled], None, 40), range(5))
    trainee = LMTrainee(draft, parse_objective("tvd@e2e:depth=3"), target, chunk=7)
    found, expected = trainee(batch), of_batch(draft, target, batch, 3)
    torch.testing.assert_close(found.loss, expected, atol=1e-4, rtol=1e-5)
    plain = LMTrainee(draft, parse_objective("tvd"), target)(batch)
    torch.testing.assert_close(found.alpha, plain.alpha)
    assert torch.equal(found.tokens, plain.tokens) and found.loss.item() > plain.loss.item()
    inner = list(draft.parameters())
    ours, theirs = (torch.autograd.grad(loss, inner) for loss in (found.loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_a_step_is_its_rows_however_they_are_divided(
    distilled: str, draft_dir: str, target_dir: str, tmp_path: Path, door: Door
) -> None:
    options = [*OBJECTIVE, "--target", target_dir]
    train_laws.a_step_is_its_rows_however_they_are_divided(words_of([distilled], draft_dir), options, tmp_path, door)


def test_names() -> None:
    assert parse_objective("e2e").depth == 4
    short, long = parse_objective("e2e:depth=2"), parse_objective("tvd@e2e:depth=2")
    assert (short.depth, short.terms, short.keep) == (long.depth, long.terms, None) == (2, long.terms, None)
    for spec, message in (("jsd@e2e", "only tvd stands before it"), ("e2e:depth=1.5", "depth must be a whole number")):
        with pytest.raises(InputError, match=f"^objective: .*{message}"):
            parse_objective(spec)
