"""Logits to probabilities, and probabilities to tokens: the only place where either happens (law
2).

Legend: B rows, N nodes, K draws, V vocabulary; `...` any leading shape.

Every random decision of the project is one float64 uniform from the CPU `torch.Generator` of its
row (law 4). Drawing by inverse CDF from such uniforms makes a row independent of the other rows of
its batch and of the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.core.io import hash_64
from draftsmith.core.settings import Sampling as Sampling

# Of SplitMix64 (Steele et al. 2014), as int64.
_STEP = -0x61C8864680B583EB
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15
# A row of at least `_LONG` values is searched in blocks of `_BLOCK`.
_LONG = 4096
_BLOCK = 128


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, fp32 `[..., V]`, for logits `[..., V]` of any float
    type.

    Greedy is one-hot at the argmax. top-p keeps the smallest set of most probable tokens whose mass
    reaches `top_p`; ties are broken by token id. min-p keeps tokens of at least `min_p` times the
    greatest probability (Nguyen et al., ICLR 2025).
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, largest(logits, 1).indices, 1.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    vocab = logits.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab else 0
    if not top_k and sampling.top_p == 1:
        p = logits.softmax(-1)
        if not sampling.min_p:
            return p
        greatest = p.amax(-1, keepdim=True)
        return _drop_below(p, greatest * sampling.min_p)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[..., top_k:] = -torch.inf
    p_ordered = ordered.softmax(-1)
    if sampling.top_p < 1:
        reached = p_ordered.double().cumsum(-1)
        before = reached - p_ordered
        p_ordered = p_ordered.masked_fill(before >= sampling.top_p, 0.0)
        p_ordered = p_ordered / p_ordered.sum(-1, keepdim=True)
    if sampling.min_p:
        greatest = p_ordered[..., :1]
        p_ordered = _drop_below(p_ordered, greatest * sampling.min_p)
    return torch.zeros_like(p_ordered).scatter_(-1, index, p_ordered)


def _drop_below(p: Tensor, least: Tensor) -> Tensor:
    """`p` without the tokens of less probability than `least` `[..., 1]`, renormalised."""
    p = p.masked_fill(p < least, 0.0)
    return p / p.sum(-1, keepdim=True)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """sum_x min(p, q) = 1 - TV(p, q) over the last axis: the chance that a token drawn from q is
    accepted against p.
    """
    return torch.minimum(p, q).sum(-1)


def row_seed(seed: int, key: str) -> int:
    """A 63-bit seed for one row: a hash of the run's seed and the row's key, not of its index in a
    batch.
    """
    name = f"{seed}\0{key}"
    return hash_64(name.encode()) >> 1


def generator(seed: int) -> torch.Generator:
    """A CPU generator for one row."""
    return torch.Generator().manual_seed(seed)


def uniforms(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """float64 uniforms in [0, 1), `[B, count]` on the CPU: row b comes from `generators[b]`
    alone.
    """
    rows = [torch.rand(count, generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(rows)


def gumbel(seed: Tensor, place: Tensor, vocab: int) -> Tensor:
    """Gumbel noise, fp32 `[..., V]`, that depends on int64 seed and place `[...]` alone."""
    key = _mixed(seed + place * _STEP).unsqueeze(-1)
    steps = torch.arange(1, vocab + 1, device=key.device) * _STEP
    # Of 63 bits, because the tokens that matter have u next to 0.
    u = _mixed(key + steps).float() * 2.0**-63
    u.clamp_(min=2.0**-63, max=1 - 2.0**-24)
    exponential = u.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mixed(bits: Tensor) -> Tensor:
    """63 random bits for each int64."""
    bits = bits ^ (bits >> 30)
    bits = bits * _FIRST
    bits = bits ^ (bits >> 27)
    bits = bits * _SECOND
    return bits ^ (bits >> 31)


def noised(logits: Tensor, sampling: Sampling, noise: Tensor) -> Tensor:
    """log p and Gumbel noise `[..., V]`, whose sum is largest at a token drawn from p."""
    return probs(logits, sampling).log_().add_(noise)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """One token per distribution `p` `[..., V]` (any mass above 0) from a uniform `u` `[...]`;
    int64 `[...]`.
    """
    cdf = p.cumsum(-1, dtype=torch.double)
    token = _inverse(cdf, u.unsqueeze(-1))
    return token.squeeze(-1)


def draw_with_replacement(p: Tensor, u: Tensor) -> Tensor:
    """K independent tokens: `p` `[..., V]`, `u` `[..., K]` -> int64 `[..., K]`; -1 where `p` has no
    mass.
    """
    return _inverse_or_none(p.cumsum(-1, dtype=torch.double), u)


def draw_without_replacement(p: Tensor, u: Tensor) -> Tensor:
    """K distinct tokens, in drawing order: `p` `[..., V]`, `u` `[..., K]` -> int64 `[..., K]`.

    Each draw is from `p` without the tokens drawn before it. Draws beyond the support are -1.
    """
    # Summed anew for each draw. Subtracting from one running sum would round a mass of 1e-30 to
    # nothing, and tokens that small must keep their shares once the large ones are drawn.
    left = p
    cdf = p.cumsum(-1, dtype=torch.double)
    picks = []
    for k in range(u.shape[-1]):
        u_k = u[..., k : k + 1]
        token = _inverse(cdf, u_k)
        no_mass = cdf[..., -1:] <= 0
        picks.append(token.masked_fill(no_mass, -1))
        if k + 1 < u.shape[-1]:
            left = left.scatter(-1, token, 0.0) if k == 0 else left.scatter_(-1, token, 0.0)
            cdf = left.cumsum(-1, dtype=torch.double)
    return torch.cat(picks, dim=-1)


def draw_top_and_one(p: Tensor, u: Tensor, k: int) -> Tensor:
    """The k - 1 most probable tokens, best first, and one drawn from what `p` leaves on the others
    (Hu et al., ICLR 2025): `p` `[..., V]`, `u` `[...]` -> int64 `[..., k]`.

    Top tokens without mass are -1, and so is the last when the top ones hold all the mass: nothing
    was drawn then.
    """
    best = largest(p, min(k - 1, p.shape[-1]))
    others = p.scatter(-1, best.indices, 0.0)
    drawn = _inverse_or_none(others.cumsum(-1, dtype=torch.double), u.unsqueeze(-1))
    top = best.indices.masked_fill(best.values <= 0, -1)
    missing = k - 1 - top.shape[-1]
    padded = torch.nn.functional.pad(top, (0, missing), value=-1)
    return torch.cat([padded, drawn], dim=-1)


class Largest(NamedTuple):
    """The K largest values `[..., K]`, largest first, and their indices."""

    values: Tensor
    indices: Tensor


def largest(values: Tensor, count: int) -> Largest:
    """The `count` largest of values `[..., V]`. Of one, the first of equal values.

    On a CPU, torch is slow at finding indices in a long row. There a row is cut into blocks, and
    only the `count` blocks of the largest maxima are searched.
    """
    size = values.shape[-1]
    if values.device.type != "cpu" or size < _LONG:
        return _largest(values, count)
    padded = values
    if size % _BLOCK:
        padded = torch.nn.functional.pad(values, (0, -size % _BLOCK), value=-torch.inf)
    blocks = padded.unflatten(-1, (-1, _BLOCK))
    chosen = _largest(blocks.amax(-1), min(count, blocks.shape[-2])).indices
    index = chosen.unsqueeze(-1).expand(*chosen.shape, _BLOCK)
    found = _largest(blocks.gather(-2, index).flatten(-2), count)
    block = chosen.gather(-1, found.indices // _BLOCK)
    indices = block * _BLOCK + found.indices % _BLOCK
    return Largest(found.values, indices.clamp_(max=size - 1))


def _largest(values: Tensor, count: int) -> Largest:
    # On a CPU, max is faster than argmax and topk, and gives the first of equal values.
    found = values.max(-1, keepdim=True) if count == 1 else values.topk(count, dim=-1)
    return Largest(found.values, found.indices)


def _inverse_or_none(cdf: Tensor, u: Tensor) -> Tensor:
    """As `_inverse`, but -1 where there is no mass."""
    no_mass = cdf[..., -1:] <= 0
    return _inverse(cdf, u).masked_fill(no_mass, -1)


def _inverse(cdf: Tensor, u: Tensor) -> Tensor:
    """The token at height `u` of running sums `cdf`: `[..., V]`, `[..., K]` -> int64 `[..., K]`."""
    total = cdf[..., -1:]
    # u * total can round up to total, above which there is no token; the largest float below it has
    # one.
    point = torch.minimum(u.to(cdf.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    # Without any mass the search gives V; callers mask these, but the index must be valid until
    # then.
    last = cdf.shape[-1] - 1
    return torch.searchsorted(cdf, point, right=True).clamp_(max=last)
