"""The objectives: what they are, what they tend to, and what their gradients are."""

import math

import pytest
import torch
import torch.nn.functional as F

from draftsmith.train.losses import LOSSES, jensen_shannon, overlap
from draftsmith.train.objective import LOSS_OPTIONS, parse_objective

TARGETED = sorted(set(LOSSES) - {"ce"})


def pair(seed, rows=6, vocabulary=9, spread=2.0):
    source = torch.Generator().manual_seed(seed)
    draft, target = (
        spread * torch.randn(2, rows, vocabulary, generator=source, dtype=torch.float64)
    ).unbind()
    return draft, target, torch.randint(vocabulary, (rows,), generator=source)


def slope(loss, draft, target, tokens):
    leaf = draft.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf, target, tokens).sum(), leaf)
    return found


def test_values_against_their_definitions():
    draft, target, tokens = pair(0)
    p, q = target.softmax(-1), draft.softmax(-1)
    m = (p + q) / 2
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (p / q).log()).sum(-1)
    weight = (-3 * alpha).exp()
    wanted = {
        "ce": F.cross_entropy(draft, tokens, reduction="none"),
        "fkl": kl,
        "rkl": (q * (q / p).log()).sum(-1),
        "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "tvd": (p - q).abs().sum(-1) / 2,
        "tvd_pp": (p - q).abs().sum(-1) / 2,
        "lk_alpha": -alpha.log(),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - alpha),
    }
    assert set(wanted) == set(LOSSES) == set(LOSS_OPTIONS)
    for name, loss in LOSSES.items():
        torch.testing.assert_close(loss(draft, target, tokens), wanted[name])
    torch.testing.assert_close(overlap(draft, target), alpha)
    torch.testing.assert_close(LOSSES["tvd"](draft, target, tokens), 1 - overlap(draft, target))


@pytest.mark.parametrize("name", TARGETED)
def test_equal_laws_cost_nothing_and_others_something(name):
    draft, target, tokens = pair(1)
    # A shift of all logits is the same distribution.
    assert LOSSES[name](draft + 3, draft, tokens).abs().max() < 1e-12
    assert (LOSSES[name](draft, target, tokens) > 0).all()


# lk_hybrid's weight and tvd_pp's advantage are constants to the gradient, so they are checked
# apart.
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"tvd_pp", "lk_hybrid"}))
def test_gradients_against_differences(name):
    draft, target, tokens = pair(4, rows=3, vocabulary=6)

    def value(logits):
        return LOSSES[name](logits, target, tokens)

    assert torch.autograd.gradcheck(value, (draft.requires_grad_(),))


def test_gradients_in_closed_form_where_a_part_counts_as_constant():
    draft, target, tokens = pair(5)
    p, q = target.softmax(-1), draft.softmax(-1)
    tv = slope(LOSSES["tvd"], draft, target, tokens)
    alpha = overlap(draft, target)[:, None]
    weight = (-3 * alpha).exp()
    torch.testing.assert_close(
        slope(LOSSES["lk_hybrid"], draft, target, tokens), weight * (q - p) + (1 - weight) * tv
    )
    rewarded = (q * (q <= p)).sum(-1, keepdim=True)
    spread = (rewarded * (1 - rewarded)).sqrt()
    assert spread.min() > 0.01
    torch.testing.assert_close(slope(LOSSES["tvd_pp"], draft, target, tokens), tv / spread)


@pytest.mark.parametrize("spec", ["fkl", "jsd", "jsd:beta=0.1", "jsd:beta=0.9"])
def test_what_is_made_in_place_is_the_same(spec):
    draft, target, tokens = pair(12)
    objective = parse_objective(spec)
    assert objective.in_place is not None
    wanted = objective.loss(draft, target, tokens), overlap(draft, target)
    gradient = slope(objective.loss, draft, target, tokens)
    found = objective.in_place(draft, target, (torch.empty_like(draft), torch.empty_like(draft)))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(draft, gradient)


def test_jsd_between_its_limits():
    draft, target, tokens = pair(6, spread=1.0)
    small = 1e-6
    for limit, name in ((small, "fkl"), (1 - small, "rkl")):
        found = jensen_shannon(draft, target, tokens, beta=limit) / small
        torch.testing.assert_close(found, LOSSES[name](draft, target, tokens), rtol=1e-4, atol=0)
    forth, back = jensen_shannon(draft, target, tokens), jensen_shannon(target, draft, tokens)
    torch.testing.assert_close(forth, back)
    for beta in (0.1, 0.7):
        torch.testing.assert_close(
            jensen_shannon(draft, target, tokens, beta=beta),
            jensen_shannon(target, draft, tokens, beta=1 - beta),
        )
    assert (forth < math.log(2)).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_without_mass_make_no_nan(name, dtype):
    draft, target, tokens = (x.to(dtype) if x.is_floating_point() else x for x in pair(8))
    # Of the data's tokens the draft can give some and not others.
    tokens[:3], tokens[3:] = 4, 7
    draft[:, 5:] = -math.inf
    target[:, :2] = -math.inf
    # The last row: distributions that share no token at all.
    target[-1, :5] = -math.inf
    value, gradient = (
        LOSSES[name](draft, target, tokens),
        slope(LOSSES[name], draft, target, tokens),
    )
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient[:, 5:] == 0).all()
    assert gradient[:-1, :5].abs().max() > 0


def test_sums_of_terms_and_options():
    draft, target, tokens = pair(9)
    objective = parse_objective(" 0.9*jsd:beta=0.25 + 0.1*ce+lk_hybrid:eta=10")
    wanted = (
        0.9 * jensen_shannon(draft, target, tokens, beta=0.25)
        + 0.1 * LOSSES["ce"](draft, None, tokens)
        + LOSSES["lk_hybrid"](draft, target, tokens, eta=10.0)
    )
    torch.testing.assert_close(objective.loss(draft, target, tokens), wanted)
    assert objective.needs_target
    assert objective.spec == "0.9*jsd:beta=0.25+0.1*ce+lk_hybrid:eta=10"
    plain = parse_objective("ce")
    assert not plain.needs_target
    torch.testing.assert_close(plain.loss(draft, None, tokens), LOSSES["ce"](draft, None, tokens))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_temperature(name):
    draft, target, tokens = pair(10)
    value = parse_objective(name, temperature=2.0).loss(draft, target, tokens)
    if name == "ce":
        wanted = LOSSES[name](draft, None, tokens)
    else:
        wanted = LOSSES[name](draft / 2, target / 2, tokens) * (
            4 if name in ("fkl", "rkl", "jsd") else 1
        )
    torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize(
    "spec", ["kl", "jsd:beta=1", "jsd:alpha=0.5", "x*fkl", "0.5*fkl+-1*ce", "0*ce", "fkl@topk"]
)
def test_a_wrong_name_is_answered_in_one_line(spec, golden):
    with golden.raises():
        parse_objective(spec)
