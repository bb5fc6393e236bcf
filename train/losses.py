"""The losses per token that a draft can be trained on.

A loss takes the draft's logits, the target's logits (None only for `ce`) and the tokens of the
data, and returns one fp32 value per token (float64 for float64); the caller sums them and divides
by the number of valid tokens.

Legend: N tokens, V vocabulary, S sequences, L tokens of the longest; p the target's distribution, q
the draft's.

A logit of minus infinity means that the model cannot give a token. No loss turns that into NaN;
where a divergence would be infinite, its docstring says what is taken instead.
"""

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

# Draft's logits [N, V], target's logits [N, V], tokens of the data [N] (and options by name) ->
# loss [N].
LossFn = Callable[..., Tensor]
# Draft's and target's logits [N, V], two scratch tensors, and the target's mass on these tokens
# [N], None for all of it -> loss and alpha [N]. The draft's logits become the gradient.
InPlaceFn = Callable[..., tuple[Tensor, Tensor]]

# exp(-100) underflows in fp32: a log-probability below this is treated as zero probability.
_FLOOR = -100.0
# Below this the standard deviation of the reward is rounding noise, which dividing by it would
# amplify.
_LEAST_SPREAD = 1e-2


def at_least_fp32(logits: Tensor) -> Tensor:
    """Logits in fp32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_probs(logits_NV: Tensor) -> Tensor:
    return at_least_fp32(logits_NV).log_softmax(-1)


def _of_logits(loss: LossFn) -> LossFn:
    """The loss of two distributions, from the logits of both."""

    @wraps(loss)
    def of_logits(
        draft_NV: Tensor, target_NV: Tensor | None, tokens_N: Tensor, **options: float
    ) -> Tensor:
        assert target_NV is not None, "this loss needs the target's logits"
        return loss(_log_probs(draft_NV), _log_probs(target_NV), **options)

    del of_logits.__wrapped__  # its arguments are others
    return of_logits


def _kl(log_a_NV: Tensor, log_b_NV: Tensor) -> Tensor:
    """KL(a || b) over the tokens that both can give."""
    both = (log_a_NV > -math.inf) & (log_b_NV > -math.inf)
    # Masking the product instead would give 0 * inf = NaN in the gradient.
    ratio_NV = torch.where(both, log_a_NV - log_b_NV, 0.0)
    return (log_a_NV.exp() * ratio_NV).sum(-1)


def _rejected(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """The total variation of two distributions."""
    return 1 - torch.minimum(p_NV, q_NV).sum(-1)


def cross_entropy(draft_NV: Tensor, target_NV: Tensor | None, tokens_N: Tensor) -> Tensor:
    """-log q(token): on the target's own outputs this is sequence-level KD (Kim & Rush 2016,
    section 3.2).

    A token that the draft cannot give costs 100 nats and has no gradient.
    """
    log_q_N = _log_probs(draft_NV).gather(-1, tokens_N[:, None]).squeeze(-1)
    return -log_q_N.masked_fill(log_q_N == -math.inf, _FLOOR)


@_of_logits
def forward_kl(log_q_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    """KL(p || q) over the whole vocabulary (Hinton et al. 2015; DistillSpec, section 4).

    By Pinsker's inequality it bounds the rejected share: 1 - alpha = TV(p, q) <= sqrt(KL / 2).
    Tokens that the draft cannot give are left out: they would add an infinite constant, which has
    no gradient.
    """
    return _kl(log_p_NV, log_q_NV)


@_of_logits
def reverse_kl(log_q_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    """KL(q || p): seeks the target's modes (MiniLLM, Gu et al. 2024, section 2; DistillSpec,
    section 4).

    The target's log-probability is clamped at -100, so that draft mass on an impossible token costs
    much, not infinity.
    """
    return _kl(log_q_NV, log_p_NV.clamp_min(_FLOOR))


@_of_logits
def jensen_shannon(log_q_NV: Tensor, log_p_NV: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (GKD, Agarwal et al. 2024,
    section 2).

    beta in (0, 1): near 0 it is beta KL(p || q), near 1 it is (1 - beta) KL(q || p). At most log 2.
    """
    m_NV = beta * log_p_NV.exp() + (1 - beta) * log_q_NV.exp()
    log_m_NV = m_NV.clamp_min(torch.finfo(m_NV.dtype).tiny).log()
    kl_p_N = _kl(log_p_NV, log_m_NV)
    kl_q_N = _kl(log_q_NV, log_m_NV)
    return beta * kl_p_N + (1 - beta) * kl_q_N


@_of_logits
def total_variation(log_q_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    """1 - sum_x min(p(x), q(x)): the probability that a draft token is rejected (Leviathan et al.
    2023, cor. 3.6).
    """
    return _rejected(log_p_NV.exp(), log_q_NV.exp())


@_of_logits
def total_variation_plus(log_q_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    """TVD++: the value of `tvd`, with the normalised policy gradient of Goel et al. (2024, section
    3).

    The gradient of TV is that of a policy q with reward r(x) = 1 where q(x) <= p(x), else 0. TVD++
    replaces the reward by (r - mean) / std, taken under q exactly over the vocabulary (the paper
    samples). The result is the gradient of TV divided by sqrt(m (1 - m)), m = q(r = 1), a divisor
    of at least 0.01.
    """
    p_NV = log_p_NV.exp()
    q_NV = log_q_NV.exp()
    with torch.no_grad():
        reward_NV = (q_NV <= p_NV).to(q_NV.dtype)
        mean_N1 = (q_NV * reward_NV).sum(-1, keepdim=True).clamp(0, 1)
        variance_N1 = mean_N1 * (1 - mean_N1)
        spread_N1 = variance_N1.sqrt().clamp_min(_LEAST_SPREAD)
        advantage_NV = (reward_NV - mean_N1) / spread_N1
        value_N = _rejected(p_NV, q_NV)
    surrogate_N = -(q_NV * advantage_NV).sum(-1)
    return value_N + surrogate_N - surrogate_N.detach()


@_of_logits
def negative_log_alpha(log_q_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    """-log sum_x min(p(x), q(x)) (LK losses, arXiv 2602.23881, section 4).

    Its gradient is that of TV divided by alpha, so a draft that hardly overlaps still learns.
    """
    return -torch.minimum(log_p_NV, log_q_NV).clamp_min(10 * _FLOOR).logsumexp(-1)


@_of_logits
def hybrid(log_q_NV: Tensor, log_p_NV: Tensor, eta: float = 3.0) -> Tensor:
    """w KL(p || q) + (1 - w) TV, w = exp(-eta alpha), alpha without gradient (LK losses, arXiv
    2602.23881, section 4).

    KL dominates while p and q hardly overlap, TV once they do. The paper takes eta 3, and 10 for
    Medusa heads.
    """
    tv_N = _rejected(log_p_NV.exp(), log_q_NV.exp())
    alpha_N = 1 - tv_N.detach()
    w_N = (-eta * alpha_N).exp()
    return w_N * _kl(log_p_NV, log_q_NV) + (1 - w_N) * tv_N


@torch.no_grad()
def overlap(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    """alpha `[N]` = sum_x min(p(x), q(x)) at temperature 1: the probability that a draft token is
    accepted.
    """
    q_NV = at_least_fp32(draft_NV).softmax(-1)
    p_NV = at_least_fp32(target_NV).softmax(-1)
    return torch.minimum(q_NV, p_NV).sum(-1)


@torch.no_grad()
def forward_kl_in_place(
    draft_NV: Tensor,
    target_NV: Tensor,
    scratch: tuple[Tensor, Tensor],
    mass_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward_kl` and `overlap`, `[N]` each, of finite logits; `draft_NV` becomes the gradient q -
    p.

    All arguments have one dtype, fp32 or wider, and are overwritten; `scratch` are two more tensors
    `[N, V]`. mass_N: what the target gives to these tokens, if it has others; the overlap is with
    that part of its distribution.
    """
    log_q_NV, log_p_NV = scratch
    torch.log_softmax(draft_NV, -1, out=log_q_NV)
    torch.log_softmax(target_NV, -1, out=log_p_NV)
    slope_NV = torch.exp(log_q_NV, out=draft_NV)
    p_NV = torch.exp(log_p_NV, out=target_NV)
    loss_N: Tensor = torch.linalg.vecdot(p_NV, log_p_NV.sub_(log_q_NV))
    # sum min(p, q) = (sum p + sum q - sum |p - q|) / 2.
    if mass_N is None:
        apart_N = torch.linalg.vector_norm(slope_NV.sub_(p_NV), 1, -1)
        return loss_N, 1 - apart_N / 2
    known_NV = torch.mul(p_NV, mass_N[:, None], out=log_p_NV)
    apart_N = torch.linalg.vector_norm(known_NV.sub_(slope_NV), 1, -1)
    slope_NV.sub_(p_NV)
    return loss_N, (mass_N + 1 - apart_N) / 2


@torch.no_grad()
def jensen_shannon_in_place(
    draft_NV: Tensor,
    target_NV: Tensor,
    scratch: tuple[Tensor, Tensor],
    mass_N: Tensor | None = None,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """`jensen_shannon` and `overlap` as `forward_kl_in_place` gives them.

    `draft_NV` becomes the gradient (1 - beta) q (log(q / m) - KL(q || m)).
    """
    log_q_NV, log_p_NV = scratch
    torch.log_softmax(draft_NV, -1, out=log_q_NV)
    torch.log_softmax(target_NV, -1, out=log_p_NV)
    q_NV = torch.exp(log_q_NV, out=draft_NV)
    p_NV = torch.exp(log_p_NV, out=target_NV)
    known_NV = p_NV if mass_N is None else p_NV * mass_N[:, None]
    alpha_N = torch.minimum(known_NV, q_NV).sum(-1)
    del known_NV
    log_m_NV = torch.lerp(q_NV, p_NV, beta).clamp_min_(torch.finfo(q_NV.dtype).tiny).log_()
    kl_p_N: Tensor = torch.linalg.vecdot(p_NV, log_p_NV.sub_(log_m_NV))
    kl_q_N: Tensor = torch.linalg.vecdot(q_NV, log_q_NV.sub_(log_m_NV))
    draft_NV.mul_(log_q_NV.sub_(kl_q_N[:, None])).mul_(1 - beta)
    return beta * kl_p_N + (1 - beta) * kl_q_N, alpha_N


LOSSES: dict[str, LossFn] = {
    "ce": cross_entropy,
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
    "tvd_pp": total_variation_plus,
    "lk_alpha": negative_log_alpha,
    "lk_hybrid": hybrid,
}
# Those that can also be computed in place, for finite logits.
IN_PLACE: dict[str, InPlaceFn] = {"fkl": forward_kl_in_place, "jsd": jensen_shannon_in_place}
