"""Chunked equals unchunked, in values and gradients, with every teacher and vocabularies padded to
different sizes.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.drafts.heads.borrowed import OutputProjection
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.chunked import Output, TokenLoss
from draftsmith.train.losses import LOSSES, overlap
from draftsmith.train.objective import parse_objective
from draftsmith.train.teacher import (
    LiveTeacher,
    StoredTeacher,
    find_projection,
    teacher_for_draft,
)
from draftsmith.train.trainees.lm import LMTrainee
from tests.train_laws import FAMILIES, tiny_family

# Tokens, hidden size, and the target's vocabulary; the draft's is padded to fewer or more.
N, H, TARGET = 13, 6, 11
SIZES = [7, TARGET, 15]


def problem(size=TARGET):
    torch.manual_seed(size)
    draft, target = (
        nn.Linear(H, size, dtype=torch.float64),
        nn.Linear(4, TARGET, dtype=torch.float64),
    )
    hidden, teaching = (
        torch.randn(N, H, dtype=torch.float64),
        3 * torch.randn(N, 4, dtype=torch.float64),
    )
    return hidden, draft, teaching, target, torch.randint(min(size, TARGET), (N,))


def plain_distributions(draft_NV, target_NW):
    """Of plain models: the target's distribution on the draft's tokens, alpha, and the mass that
    the draft lacks.
    """
    size, other = draft_NV.shape[-1], target_NW.shape[-1]
    shared = min(size, other)
    p_NW = target_NW.softmax(-1)
    seen_NV = torch.zeros_like(draft_NV)
    seen_NV[:, :shared] = p_NW[:, :shared] / p_NW[:, :shared].sum(-1, keepdim=True)
    # Decoding cuts the draft's padding off and makes the rest add up to one.
    q_N = draft_NV[:, :shared].softmax(-1)
    return seen_NV, torch.minimum(p_NW[:, :shared], q_N).sum(-1), p_NW[:, shared:].sum(-1)


@pytest.mark.parametrize("name", [*sorted(LOSSES), "0.9*fkl+0.1*ce"])
@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.5), (5, 1.0), (100, 1.5)])
@pytest.mark.parametrize("size", SIZES)
def test_chunked_is_unchunked(name, chunk, temperature, size):
    hidden, draft, teaching, target, tokens = problem(size)
    objective, weights = parse_objective(name, temperature), torch.rand(N, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    draft_NV, target_NW = draft(leaf), target(teaching).detach()
    seen_NV, alpha_N, missing_N = plain_distributions(draft_NV.detach(), target_NW)
    plain = (objective.loss(draft_NV, seen_NV.log(), tokens) * weights).sum()
    wanted = torch.autograd.grad(3 * plain, [leaf, draft.weight, draft.bias])

    leaf = hidden.clone().requires_grad_()
    teacher = teacher_for_draft(
        LiveTeacher(teaching, OutputProjection(lambda: target)), TARGET, size
    )
    output = Output(draft.weight, draft.bias)
    loss = TokenLoss(objective, chunk)
    sums = loss.sums(output, leaf, tokens, teacher=teacher, weights_N=weights)
    torch.testing.assert_close(sums.loss, plain)
    torch.testing.assert_close(sums.alpha, alpha_N.sum())
    assert int(sums.tokens) == int(sums.depth_tokens_D) == N
    found = torch.autograd.grad(3 * sums.loss, [leaf, draft.weight, draft.bias])
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
    if size < TARGET:
        assert missing_N.sum() > 0.1
        torch.testing.assert_close(sums.missing, missing_N.sum())
    else:
        assert sums.missing is None


def test_the_tail_of_a_stored_row_is_in_proportion_to_the_draft():
    """So nothing pulls inside the tail: a stored row says of it how much it is, and no more."""
    torch.manual_seed(1)
    draft, target = torch.randn(2, 5, TARGET, dtype=torch.float64).unbind()
    logprobs, ids = target.log_softmax(-1).topk(3)
    stored = StoredTeacher(ids, logprobs, 1 - logprobs.exp().sum(-1))
    ratio = stored.logits(slice(None), draft).double().exp() / draft.softmax(-1)
    tail = ratio.scatter(1, ids, math.nan)
    assert (tail - tail.nanmean(-1, keepdim=True)).nan_to_num().abs().max() < 1e-5


@pytest.mark.parametrize("size", [7, 15])
@pytest.mark.parametrize("k", [3, TARGET])
def test_stored_rows(size, k):
    hidden, draft, teaching, target, tokens = problem(size)
    p_NW, q_NV = target(teaching).detach().softmax(-1), draft(hidden).detach().softmax(-1)
    top_NK, ids_NK = p_NW.topk(k)
    stored = StoredTeacher(ids_NK, top_NK.log(), 1 - top_NK.sum(-1))
    law_NV = stored.logits(slice(None), q_NV.log()).double().exp()
    outside_N = (top_NK * (ids_NK >= size)).sum(-1)
    torch.testing.assert_close(law_NV.sum(-1), 1 - outside_N, atol=1e-6, rtol=1e-6)
    is_stored_NW = torch.zeros_like(p_NW, dtype=torch.bool).scatter(1, ids_NK, True)
    shared = min(size, TARGET)
    is_stored_NV, p_NV = is_stored_NW[:, :shared], p_NW[:, :shared]
    least_NV = law_NV[:, :shared]
    torch.testing.assert_close(least_NV[is_stored_NV], p_NV[is_stored_NV], atol=1e-6, rtol=1e-6)

    def sums_of(teacher):
        output = Output(draft.weight, draft.bias)
        loss = TokenLoss(parse_objective("fkl"), 4)
        return loss.sums(output, hidden, tokens, teacher=teacher)

    sums = sums_of(stored)
    # What is known of alpha for certain: the stored tokens alone.
    least = torch.minimum(least_NV, q_NV[:, :shared])[is_stored_NV].sum()
    torch.testing.assert_close(sums.alpha, least, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums.missing, outside_N.sum(), atol=1e-5, rtol=1e-5)
    if k == TARGET:
        live = LiveTeacher(teaching, OutputProjection(lambda: target))
        wanted = sums_of(teacher_for_draft(live, TARGET, size))
        torch.testing.assert_close(sums.loss, wanted.loss, atol=1e-5, rtol=1e-5)


def test_a_row_wholly_outside_is_finite():
    """All that a row names, and all its mass, is beyond the draft: nothing to learn, and no NaN."""
    hidden, draft, _, _, tokens = problem(7)
    ids = torch.full((N, 2), 9) + torch.tensor([0, 1])
    teacher = StoredTeacher(ids, torch.tensor([0.75, 0.25]).log().expand(N, 2), torch.zeros(N))
    for name in LOSSES:
        leaf = hidden.clone().requires_grad_()
        output = Output(draft.weight, draft.bias)
        sums = TokenLoss(parse_objective(name), 4).sums(output, leaf, tokens, teacher=teacher)
        sums.loss.backward()
        assert sums.loss.isfinite(), name
        assert leaf.grad is not None and leaf.grad.isfinite().all(), name
        assert name != "fkl" or leaf.grad.abs().max() < 1e-5
        assert float(sums.alpha) < 1e-30
        assert float(sums.missing or 0) == pytest.approx(N)


@pytest.mark.parametrize("kind", [*FAMILIES, "tied"])
def test_a_models_own_loss_is_the_trainees(kind):
    """Every architecture as draft and as target: values and all gradients against the plain
    whole-batch way.
    """
    changes = (
        {"tie_word_embeddings": True}
        if kind == "tied"
        else {"word_embed_proj_dim": 8}
        if kind == "opt"
        else {}
    )
    draft, target = (
        tiny_family("llama" if kind == "tied" else kind, seed, **changes) for seed in (1, 2)
    )
    torch.manual_seed(3)
    ids = torch.randint(2, 61, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.6, torch.randint(61, (2, 9)), IGNORE)
    batch, valid = Batch(ids, labels), labels != IGNORE
    draft_NV, target_NV = (
        draft(input_ids=ids).logits[valid],
        target(input_ids=ids).logits[valid].detach(),
    )
    plain = LOSSES["fkl"](draft_NV, target_NV, labels[valid]).sum()
    plain.backward()
    wanted = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    trainee = LMTrainee(draft, parse_objective("fkl"), target, chunk=4)
    assert len(list(trainee.parameters())) == len(list(draft.parameters()))
    sums = trainee(batch)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss, plain)
    torch.testing.assert_close(sums.alpha, overlap(draft_NV, target_NV).sum())
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in target.parameters())


def test_a_model_whose_logits_are_made_otherwise_is_refused(golden):
    model: Any = tiny_family("llama")
    # Llama does not bound its logits, whatever its configuration says.
    model.config.final_logit_softcapping = 0.1
    with golden.raises():
        find_projection(model, "draft")
    with golden.raises():
        find_projection(model.base_model, "target")
