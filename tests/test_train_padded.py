"""Draft and target with vocabularies padded to different sizes: losses, gradients, acceptance, missing mass."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafts.heads.borrowed import OutputProjection
from draftsmith_core.errors import InputError
from train.batch import IGNORE, Batch
from train.chunked import projected, token_measures
from train.losses import LOSSES
from train.objective import parse_objective
from train.teacher import LiveTeacher, ReducedTeacher, StoredTeacher, teacher_for_draft
from train.trainees.lm import LMTrainee

TARGET = 11
SIZES = [7, 15]
N, H = 9, 5


def problem(size: int) -> tuple[Tensor, nn.Linear, Tensor, nn.Linear, Tensor]:
    torch.manual_seed(size)
    draft, target = nn.Linear(H, size, dtype=torch.float64), nn.Linear(4, TARGET, dtype=torch.float64)
    hidden, teaching = torch.randn(N, H, dtype=torch.float64), 3 * torch.randn(N, 4, dtype=torch.float64)
    return hidden, draft, teaching, target, torch.randint(min(size, TARGET), (N,))


def plain_distributions(draft_NV: Tensor, target_NW: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of plain models: the target's distribution on the draft's tokens, the draft's, alpha and what is missing."""
    size, other = draft_NV.shape[-1], target_NW.shape[-1]
    shared = min(size, other)
    p_NW = target_NW.softmax(-1)
    seen_NV = torch.zeros_like(draft_NV)
    seen_NV[:, :shared] = p_NW[:, :shared] / p_NW[:, :shared].sum(-1, keepdim=True)
    # Decoding cuts the draft's padding off and makes the rest add up to one.
    q_N = draft_NV[:, :shared].softmax(-1)
    return seen_NV, q_N, torch.minimum(p_NW[:, :shared], q_N).sum(-1), p_NW[:, shared:].sum(-1)


@pytest.mark.parametrize("name", [*sorted(LOSSES), "0.9*fkl+0.1*ce"])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("size", SIZES)
def test_losses_and_gradients_are_the_plain_ones(name: str, temperature: float, chunk: int, size: int) -> None:
    hidden, draft, teaching, target, tokens = problem(size)
    objective, weights = parse_objective(name, temperature), torch.rand(N, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    draft_NV, target_NW = draft(leaf), target(teaching).detach()
    seen_NV, _, alpha_N, missing_N = plain_distributions(draft_NV.detach(), target_NW)
    plain = (objective.loss(draft_NV, seen_NV.log(), tokens) * weights).sum()
    wanted = torch.autograd.grad(plain, [leaf, draft.weight, draft.bias])

    leaf = hidden.clone().requires_grad_()
    teacher = teacher_for_draft(LiveTeacher(teaching, OutputProjection(target)), TARGET, size)
    sums = projected(leaf, draft.weight, draft.bias, teacher, tokens, weights, objective, chunk)
    torch.testing.assert_close(sums.loss, plain)
    torch.testing.assert_close(sums.alpha, alpha_N.sum())
    found = torch.autograd.grad(sums.loss, [leaf, draft.weight, draft.bias])
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
    if size < TARGET:
        assert missing_N.sum() > 0.1
        torch.testing.assert_close(sums.missing, missing_N.sum())
    else:
        assert sums.missing is None


def test_any_tokens_in_any_order() -> None:
    """The same class serves a head that keeps some tokens of its target's."""
    hidden, draft, teaching, target, _ = problem(4)
    ids = torch.tensor([8, 0, 10, 3])
    teacher = ReducedTeacher(LiveTeacher(teaching, OutputProjection(target)), ids)
    p, q = target(teaching).softmax(-1)[:, ids], draft(hidden).softmax(-1)
    tokens = torch.zeros(N, dtype=torch.long)
    sums = projected(hidden, draft.weight, draft.bias, teacher, tokens, None, parse_objective("tvd"), 4)
    torch.testing.assert_close(sums.alpha, torch.minimum(p, q).sum().detach())
    torch.testing.assert_close(sums.missing, (1 - p.sum(-1)).sum().detach())
    torch.testing.assert_close(sums.loss, (1 - torch.minimum(p / p.sum(-1, keepdim=True), q).sum(-1)).sum())
    some = torch.tensor([5, 2])
    torch.testing.assert_close(teacher.select(some).logits(slice(None), q), teacher.logits(slice(None), q)[some])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [3, TARGET])
def test_stored_rows(size: int, k: int) -> None:
    hidden, draft, teaching, target, tokens = problem(size)
    p_NW, q_NV = target(teaching).detach().softmax(-1), draft(hidden).detach().softmax(-1)
    top_NK, ids_NK = p_NW.topk(k)
    teacher = StoredTeacher(ids_NK, top_NK.log(), 1 - top_NK.sum(-1))
    law_NV = teacher.logits(slice(None), q_NV.log()).double().exp()
    outside_N = (top_NK * (ids_NK >= size)).sum(-1)
    torch.testing.assert_close(law_NV.sum(-1), 1 - outside_N, atol=1e-6, rtol=1e-6)
    for row in range(N):
        for token, p in zip(ids_NK[row].tolist(), top_NK[row].tolist(), strict=True):
            if token < size:
                assert float(law_NV[row, token]) == pytest.approx(p, abs=1e-6)
    stored_NV = torch.zeros(N, max(size, TARGET), dtype=torch.bool).scatter(1, ids_NK, True)[:, :size]
    for name in LOSSES:
        leaf = hidden.clone().requires_grad_()
        sums = projected(leaf, draft.weight, draft.bias, teacher, tokens, None, parse_objective(name), 4)
        sums.loss.backward()
        assert sums.loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
        # What is known of alpha for certain: the stored tokens alone. The whole distribution can only have more.
        least = torch.minimum(law_NV, q_NV).masked_fill(~stored_NV, 0).sum()
        torch.testing.assert_close(sums.alpha, least, atol=1e-5, rtol=1e-5)
        shared = min(size, TARGET)
        assert float(sums.alpha) <= float(torch.minimum(p_NW[:, :shared], q_NV[:, :shared]).sum()) + 1e-5
        torch.testing.assert_close(sums.missing, outside_N.sum(), atol=1e-5, rtol=1e-5)
    if k == TARGET:
        live = teacher_for_draft(LiveTeacher(teaching, OutputProjection(target)), TARGET, size)
        objective = parse_objective("fkl")
        both = [
            token_measures(hidden, OutputProjection(draft), each, tokens, objective, 4)[0] for each in (teacher, live)
        ]
        torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=1e-5, check_dtype=False)


def test_a_row_wholly_outside_is_finite() -> None:
    """All that a row names, and all its mass, is beyond the draft: nothing to learn, and no NaN."""
    hidden, draft, _, _, tokens = problem(7)
    ids = torch.full((N, 2), 9) + torch.tensor([0, 1])
    teacher = StoredTeacher(ids, torch.tensor([0.75, 0.25]).log().expand(N, 2), torch.zeros(N))
    for name in LOSSES:
        leaf = hidden.clone().requires_grad_()
        sums = projected(leaf, draft.weight, draft.bias, teacher, tokens, None, parse_objective(name), 4)
        sums.loss.backward()
        assert sums.loss.isfinite(), name
        assert leaf.grad is not None and leaf.grad.isfinite().all(), name
        assert name != "fkl" or leaf.grad.abs().max() < 1e-5
        assert float(sums.alpha) < 1e-30
        assert float(sums.missing or 0) == pytest.approx(N)


def llama(size: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, num_attention_heads=2, **shape))
    return _spread(model)


def pythia(size: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=size, num_attention_heads=2, **shape))
    return _spread(model)


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.double().eval()
    return model


def batch_of(size: int) -> Batch:
    torch.manual_seed(5)
    ids = torch.randint(2, size, (3, 10))
    labels = ids.roll(-1, 1)
    labels[:, :3] = IGNORE
    labels[1, 6:] = IGNORE
    labels[:, -1] = IGNORE
    return Batch(ids, labels)


@pytest.mark.parametrize("sizes", [(40, 53), (53, 40)])
@pytest.mark.parametrize("make", [llama, pythia])
def test_a_trainee_across_padding(make: Any, sizes: tuple[int, int]) -> None:
    draft, target, batch = make(sizes[0], 1), make(sizes[1], 2), batch_of(40)
    valid = batch.labels_BT != IGNORE
    draft_NV = draft(input_ids=batch.ids_BT).logits[valid].double()
    target_NW = target(input_ids=batch.ids_BT).logits[valid].detach().double()
    seen_NV, _, alpha_N, missing_N = plain_distributions(draft_NV.detach(), target_NW)
    plain = LOSSES["fkl"](draft_NV, seen_NV.log(), batch.labels_BT[valid]).sum()
    plain.backward()
    wanted = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    trainee = LMTrainee(draft, parse_objective("fkl"), target, chunk=4)
    sums = trainee(batch)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, plain)
    torch.testing.assert_close(sums.alpha, alpha_N.sum())
    if sizes[0] < sizes[1]:
        torch.testing.assert_close(sums.missing, missing_N.sum())
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-9, rtol=1e-6)
    assert int(trainee.count(batch)) == int(sums.tokens) == int(valid.sum())
    assert trainee.count(batch).dtype == torch.int64


@pytest.mark.parametrize("sizes", [(40, 53), (53, 40)])
def test_adaspec_across_padding(sizes: tuple[int, int]) -> None:
    draft, target, reference, batch = llama(sizes[0], 1), llama(sizes[1], 2), llama(sizes[0], 3), batch_of(40)
    trainee = LMTrainee(draft, parse_objective("adaspec:keep=0.5"), target, reference, chunk=4)
    sums, whole = trainee(batch), LMTrainee(draft, parse_objective("fkl"), target)(batch)
    sums.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in draft.parameters())
    # Of what is measured, the choice of tokens changes the loss only.
    assert float(sums.loss.detach()) != pytest.approx(float(whole.loss.detach()))
    torch.testing.assert_close(sums.alpha, whole.alpha)
    torch.testing.assert_close(sums.missing, whole.missing)
    assert int(trainee.count(batch)) == int(sums.tokens) == int(whole.tokens)
    with pytest.raises(InputError, match="reference: its vocabulary is not the draft's"):
        LMTrainee(draft, parse_objective("adaspec"), target, llama(47, 3))


def test_a_trainee_reads_stored_rows_of_a_larger_target() -> None:
    draft, target, batch = llama(40, 1), llama(53, 2), batch_of(40)
    with torch.no_grad():
        logprobs, ids = target(input_ids=batch.ids_BT).logits[batch.labels_BT != IGNORE].log_softmax(-1).topk(53)
    stored = replace(batch, stored=StoredTeacher(ids, logprobs, torch.zeros(len(ids))))
    offline = LMTrainee(draft, parse_objective("fkl"))(stored)
    live = LMTrainee(draft, parse_objective("fkl"), target)(batch)
    for name in ("loss", "alpha", "missing"):
        torch.testing.assert_close(getattr(offline, name), getattr(live, name), atol=1e-4, rtol=1e-5, check_dtype=False)


def test_no_token_measures_nothing() -> None:
    draft, target = llama(40, 1), llama(53, 2)
    batch = Batch(torch.full((1, 4), 3), torch.full((1, 4), IGNORE))
    trainee = LMTrainee(draft, parse_objective("fkl"), target)
    sums = trainee(batch)
    sums.loss.backward()
    assert int(trainee.count(batch)) == int(sums.tokens) == 0
    assert float(sums.loss.detach()) == float(sums.missing) == 0
    measures = token_measures(
        torch.zeros(0, 16), trainee.projection, None, torch.zeros(0).long(), parse_objective("ce")
    )
    assert [len(each) for each in measures] == [0, 0, 0]


@pytest.mark.parametrize("sizes", [(43, 43), (40, 53)])
def test_three_steps_of_a_plain_loop(sizes: tuple[int, int]) -> None:
    """SGD as it is usually written, with padding masked and all logits at once, ends at the same weights."""
    target, batches = llama(sizes[1], 2), [batch_of(size) for size in (40, 30, 20)]
    plain, ours = llama(sizes[0], 1), llama(sizes[0], 1)
    before = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in batches:
        mask = torch.ones_like(batch.ids_BT)
        mask[1, 7:] = 0
        with torch.no_grad():
            teacher = target(input_ids=batch.ids_BT, attention_mask=mask).logits[..., : sizes[0]]
        student = plain(input_ids=batch.ids_BT, attention_mask=mask).logits
        kl = nn.functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none")
        valid = (batch.labels_BT != IGNORE).double()
        loss = (kl.sum(-1) * valid).sum() / valid.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trainee = LMTrainee(ours, parse_objective("fkl"), target, chunk=5)
    optimizer = torch.optim.SGD(trainee.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        (trainee(batch).loss / trainee.count(batch)).backward()
        optimizer.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, atol=1e-9, rtol=1e-9)
    moved = [(plain.state_dict()[name] - weight).abs().max() for name, weight in before.items()]
    assert max(moved) > 1e-3
