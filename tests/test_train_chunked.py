"""Chunked equals unchunked, in values and gradients, with either teacher, and the language model's trainee with it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
)

from drafts.heads.borrowed import OutputProjection
from draftsmith_core.errors import InputError
from train.batch import IGNORE, Batch
from train.chunked import chunk_size, projected, token_measures
from train.losses import LOSSES, adaspec_weights, overlap
from train.objective import parse_objective
from train.teacher import LiveTeacher, ReducedTeacher, StoredTeacher, WidenedTeacher, find_projection
from train.trainees.lm import LMTrainee

N, H, V = 13, 6, 11


def linear(seed: int, inputs: int = H, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, V, bias=bias, dtype=dtype)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=source, dtype=torch.float64).to(dtype)
    teaching = torch.randn(N, 4, generator=source, dtype=torch.float64).to(dtype)
    tokens = torch.randint(V, (N,), generator=source)
    return hidden, teaching, tokens, torch.rand(N, generator=source)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("name", [*sorted(LOSSES), "0.9*fkl+0.1*ce"])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunked_is_unchunked(name: str, chunk: int, temperature: float) -> None:
    hidden, teaching, tokens, weights = inputs()
    head, target = linear(1), linear(2, 4)
    teacher, objective = LiveTeacher(teaching, OutputProjection(target)), parse_objective(name, temperature)

    leaf = hidden.clone().requires_grad_()
    draft_NV, target_NV = head(leaf), target(teaching).detach()
    plain = (objective.loss(draft_NV, target_NV, tokens) * weights).sum()
    wanted = torch.autograd.grad(3 * plain, [leaf, head.weight, head.bias])

    leaf = hidden.clone().requires_grad_()
    sums = projected(leaf, head.weight, head.bias, teacher, tokens, weights, objective, chunk)
    torch.testing.assert_close(sums.loss, plain)
    torch.testing.assert_close(sums.alpha, overlap(draft_NV, target_NV).sum())
    assert int(sums.tokens) == int(sums.depth_tokens_D) == N
    found = torch.autograd.grad(3 * sums.loss, [leaf, head.weight, head.bias])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_against_differences() -> None:
    """In one random direction of all inputs together: the function gives its gradient once, so gradcheck cannot ask."""
    hidden, teaching, tokens, weights = inputs()
    head, objective = linear(1), parse_objective("lk_alpha")
    teacher = LiveTeacher(teaching, OutputProjection(linear(2, 4)))
    points = [hidden, head.weight.detach(), head.bias.detach()]
    torch.manual_seed(3)
    steps = [torch.randn_like(point) for point in points]

    def value(along: float) -> tuple[Tensor, list[Tensor]]:
        at = [(point + along * step).requires_grad_() for point, step in zip(points, steps, strict=True)]
        return projected(at[0], at[1], at[2], teacher, tokens, weights, objective, 4).loss, at

    loss, at = value(0.0)
    slopes = torch.autograd.grad(loss, at)
    wanted = torch.stack([(slope * step).sum() for slope, step in zip(slopes, steps, strict=True)]).sum()
    torch.testing.assert_close((value(1e-6)[0] - value(-1e-6)[0]) / 2e-6, wanted, rtol=1e-6, atol=1e-7)


def test_a_frozen_projection_and_no_gradient_at_all() -> None:
    hidden, teaching, tokens, _ = inputs()
    head, objective = linear(1), parse_objective("fkl")
    head.requires_grad_(False)
    teacher = LiveTeacher(teaching, OutputProjection(linear(2, 4)))
    leaf = hidden.clone().requires_grad_()
    sums = projected(leaf, head.weight, head.bias, teacher, tokens, None, objective, 4)
    sums.loss.backward()
    assert leaf.grad is not None
    assert head.weight.grad is None
    with pytest.raises(AssertionError, match="can be taken once"):
        projected_loss = projected(leaf, head.weight, head.bias, teacher, tokens, None, objective, 4).loss
        projected_loss.backward(retain_graph=True)
        projected_loss.backward()
    with torch.no_grad():
        quiet = projected(leaf, head.weight, head.bias, teacher, tokens, None, objective, 4)
    assert not quiet.loss.requires_grad
    torch.testing.assert_close(quiet.loss, sums.loss.detach())


def test_no_token_is_no_loss() -> None:
    head = linear(1)
    hidden = torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    sums = projected(hidden, head.weight, None, None, torch.zeros(0, dtype=torch.long), None, parse_objective("ce"))
    sums.loss.backward()
    assert float(sums.loss.detach()) == 0 == int(sums.tokens)
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_under_autocast_it_is_as_near_as_the_plain_way() -> None:
    torch.manual_seed(0)
    hidden, teaching = torch.randn(64, 32), torch.randn(64, 48)
    head, target, tokens = nn.Linear(32, 200), nn.Linear(48, 200), torch.randint(200, (64,))
    objective = parse_objective("fkl")

    def gradients(way: str) -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=way != "exact"):
            if way == "chunked":
                teacher = LiveTeacher(teaching, OutputProjection(target))
                loss = projected(leaf, head.weight, head.bias, teacher, tokens, None, objective, 10).loss
            else:
                loss = objective.loss(head(leaf), target(teaching).detach(), tokens).sum()
        assert loss.dtype == torch.float32
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, head.weight, head.bias])]

    exact = gradients("exact")
    errors = {
        way: [float((a - b).norm() / b.norm()) for a, b in zip(gradients(way), exact, strict=True)]
        for way in ("chunked", "plain")
    }
    for ours, theirs in zip(errors["chunked"], errors["plain"], strict=True):
        assert ours < max(1.5 * theirs, 1e-3)
    assert all(gradient.dtype == torch.float32 for gradient in gradients("chunked"))


def test_the_default_chunk_follows_the_vocabulary() -> None:
    assert chunk_size(torch.empty(32000, 1, device="meta"), None, 7) == 7
    on_cpu, big = torch.empty(32000, 1), torch.empty(10**6, 1)
    assert 64 <= chunk_size(on_cpu, None, None) <= 512
    assert 1 <= chunk_size(big, None, None) <= 64
    # A draft of few tokens does not make the target's logits fit.
    small, wide = torch.empty(16, 1), LiveTeacher(torch.empty(4, 1), OutputProjection(torch.nn.Linear(1, 32000)))
    for teacher in (wide, ReducedTeacher(wide, slice(16)), WidenedTeacher(wide, 16)):
        assert chunk_size(small, teacher, None) == chunk_size(on_cpu, None, None)


def full_rows(target_NV: Tensor, k: int) -> StoredTeacher:
    logprobs, ids = target_NV.log_softmax(-1).topk(k)
    return StoredTeacher(ids, logprobs, 1 - logprobs.exp().sum(-1))


def test_stored_rows_of_everything_are_the_live_teacher() -> None:
    torch.manual_seed(0)
    draft, target = torch.randn(2, 5, V, dtype=torch.float64).unbind()
    stored = full_rows(target, V)
    target_p = stored.logits(slice(1, 4), draft[1:4]).exp()
    torch.testing.assert_close(target_p, target[1:4].softmax(-1).float())


def test_stored_rows_are_laws_over_the_top_and_one_more() -> None:
    torch.manual_seed(1)
    draft, target = torch.randn(2, 5, V, dtype=torch.float64).unbind()
    stored = full_rows(target, 3)
    target_p = stored.logits(slice(None), draft).double().exp()
    torch.testing.assert_close(target_p.sum(-1), torch.ones(5, dtype=torch.float64))
    p, q = target.softmax(-1), draft.softmax(-1)
    top = stored.top_ids_NK

    def parts(target_p: Tensor) -> Tensor:
        named = target_p.gather(1, top)
        return torch.cat([named, 1 - named.sum(-1, keepdim=True)], -1)

    torch.testing.assert_close(target_p.gather(1, top), p.gather(1, top))
    tokens = torch.zeros(5, dtype=torch.long)
    for name in ("fkl", "rkl", "tvd", "jsd", "lk_alpha", "lk_hybrid"):
        found = LOSSES[name](draft, target_p.log(), tokens)
        torch.testing.assert_close(found, LOSSES[name](parts(q).log(), parts(p).log(), tokens), atol=1e-6, rtol=1e-5)
    assert (LOSSES["fkl"](draft, target_p.log(), tokens) <= LOSSES["fkl"](draft, target, tokens) + 1e-6).all()
    # Nothing pulls inside the tail: its gradient is in proportion to the draft's own distribution.
    leaf = draft.clone().requires_grad_()
    (slope,) = torch.autograd.grad(LOSSES["fkl"](leaf, target_p.log(), tokens).sum(), leaf)
    ratio = (slope / q).scatter(1, top, math.nan)
    assert (ratio - ratio.nanmean(-1, keepdim=True)).nan_to_num().abs().max() < 1e-5


def test_stored_rows_may_be_short_and_have_no_tail() -> None:
    stored = StoredTeacher(
        torch.tensor([[3, 1, 0], [2, 0, 0]]),
        torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]).log(),
        torch.tensor([0.0, 0.0]),
    )
    target_p = stored.logits(slice(None), torch.zeros(2, 5)).exp()
    torch.testing.assert_close(target_p, torch.tensor([[0.2, 0.3, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]]))
    assert LOSSES["fkl"](torch.zeros(2, 5), target_p.log(), torch.zeros(2, dtype=torch.long)).isfinite().all()


SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE: dict[str, Any] = SMALL | {"intermediate_size": 24}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**WIDE),
    "tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**WIDE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2),
    "opt": OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=8),
    "phi": PhiConfig(**WIDE),
    "cohere": CohereConfig(**WIDE, logit_scale=0.25),
    "granite": GraniteConfig(**WIDE, logits_scaling=4.0),
}


def tiny(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    # from_config writes into the configuration.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval()
    return model


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_models_own_loss_is_the_trainees(kind: str) -> None:
    """Every architecture as draft and as target: values and all gradients against the plain whole-batch way."""
    draft, target = tiny(kind, 1), tiny(kind, 2)
    torch.manual_seed(3)
    ids = torch.randint(2, 61, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.6, torch.randint(61, (2, 9)), IGNORE)
    batch, valid = Batch(ids, labels), labels != IGNORE
    draft_NV, target_NV = draft(input_ids=ids).logits[valid], target(input_ids=ids).logits[valid].detach()
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


def test_a_model_whose_logits_are_made_otherwise_is_refused() -> None:
    model: Any = tiny("llama")
    # Llama does not bound its logits, whatever its configuration says.
    model.config.final_logit_softcapping = 0.1
    with pytest.raises(InputError, match="draft: LlamaForCausalLM has no output projection that gives its logits"):
        find_projection(model, "draft")
    with pytest.raises(InputError, match="target: LlamaModel has no output projection"):
        find_projection(model.base_model, "target")


def labelled() -> Batch:
    torch.manual_seed(5)
    ids = torch.randint(2, 61, (3, 12))
    labels = ids.roll(-1, 1)
    labels[:, :3] = IGNORE
    labels[1, 6:] = IGNORE
    return Batch(ids, labels)


def test_adaspec_trains_on_the_chosen_tokens_only() -> None:
    batch, objective = labelled(), parse_objective("adaspec:keep=0.4")
    draft, target, reference = tiny("llama", 1), tiny("gpt2", 2), tiny("llama", 4)
    trainee = LMTrainee(draft, objective, target, reference, chunk=5)
    sums = trainee(batch)
    sums.loss.backward()
    grads = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    valid = batch.labels_BT != IGNORE
    tokens = batch.labels_BT[valid]
    logits = [model(input_ids=batch.ids_BT).logits[valid] for model in (draft, target, reference)]
    loss = LOSSES["fkl"](logits[0], logits[1].detach(), tokens)
    gain = loss.detach() - LOSSES["fkl"](logits[2], logits[1], tokens).detach()
    row = valid.nonzero()[:, 0]
    kept = []
    for b in range(3):
        mine = (row == b).nonzero()[:, 0]
        count = math.ceil(0.4 * len(mine))
        best = mine[gain[mine].argsort(descending=True)[:count]]
        kept.append(loss[best].mean() * len(mine))
    plain = torch.stack(kept).sum()
    plain.backward()
    torch.testing.assert_close(sums.loss, plain)
    assert int(sums.tokens) == len(tokens) == int(sums.depth_tokens_D)
    torch.testing.assert_close(sums.alpha, overlap(logits[0], logits[1]).sum())
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in reference.parameters())
    # Law 6: the rows one by one add up to the same.
    single = [trainee(Batch(batch.ids_BT[b : b + 1], batch.labels_BT[b : b + 1])).loss for b in range(3)]
    torch.testing.assert_close(torch.stack(single).sum(), sums.loss)


def test_token_losses_are_those_that_are_summed() -> None:
    hidden, teaching, tokens, _ = inputs()
    head = OutputProjection(linear(1))
    teacher, objective = LiveTeacher(teaching, OutputProjection(linear(2, 4))), parse_objective("jsd")
    sums = projected(hidden, head.weight_VH, head.bias_V, teacher, tokens, None, objective, 3)
    losses, alphas, _ = token_measures(hidden, head, teacher, tokens, objective, 4)
    assert losses.shape == alphas.shape == (N,)
    torch.testing.assert_close(losses.sum(), sums.loss.detach())
    torch.testing.assert_close(alphas.sum(), sums.alpha)
    weights = adaspec_weights(losses, torch.zeros(N), 0.3)
    assert int((weights > 0).sum()) == 4
