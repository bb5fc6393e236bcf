"""Logits to probabilities, and probabilities to tokens: the only place where either happens (law 2).

Legend: B rows, N nodes, K draws, V vocabulary; `...` any leading shape.

Every random decision of the project is one float64 uniform from a CPU `torch.Generator` that belongs to a row
(law 4). Drawing by inverse CDF from such uniforms makes a row independent of its batch mates and of the device.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The law tokens are drawn from: temperature, then top-k, then top-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature} is not a finite number >= 0")
        if 0 < self.temperature < MIN_TEMPERATURE:
            # Logits divided by less would leave the range of fp32, and the law would be NaN.
            raise ValueError(f"temperature: {self.temperature} is below {MIN_TEMPERATURE}; use 0 for greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative; use 0 to keep the whole vocabulary")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]; use 1 to keep everything")

    @property
    def greedy(self) -> bool:
        """True when the law is a point mass on the most probable token."""
        return self.temperature == 0


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, fp32 `[..., V]`, for logits `[..., V]` of any float type.

    Greedy is one-hot at the argmax. top-p keeps the smallest set of most probable tokens whose mass reaches
    `top_p` (the token that crosses it included); ties are broken by token id, so that the support is a function
    of the logits alone.
    """
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    vocab = logits.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocab else 0
    if not top_k and sampling.top_p == 1:
        return logits.softmax(-1)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[..., top_k:] = -torch.inf
    p_ordered = ordered.softmax(-1)
    if sampling.top_p < 1:
        before = p_ordered.double().cumsum(-1) - p_ordered
        p_ordered = p_ordered.masked_fill(before >= sampling.top_p, 0.0)
        p_ordered = p_ordered / p_ordered.sum(-1, keepdim=True)
    return torch.zeros_like(p_ordered).scatter_(-1, index, p_ordered)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """sum_x min(p, q) over the last axis: the chance that one draft token drawn from q is accepted against p.

    Equals 1 - TV(p, q) (Leviathan et al. 2023, section 3). Both are `probs(...)` under the same sampling.
    """
    return torch.minimum(p, q).sum(-1)


def row_seed(seed: int, key: str) -> int:
    """A 63-bit seed for one row: a hash of the run's seed and the row's own key, never of its place in a batch."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int) -> torch.Generator:
    """A CPU generator for one row."""
    return torch.Generator().manual_seed(seed)


def uniforms(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """float64 uniforms in [0, 1), `[B, count]` on the CPU: row b comes from `generators[b]` alone."""
    return torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators])


def draw(p: Tensor, u: Tensor) -> Tensor:
    """One token per distribution `p` `[..., V]` from a uniform `u` `[...]`; int64 `[...]`.

    `p` need not sum to one (a residual may be passed as it is) but must have mass. A token of probability zero
    is never drawn.
    """
    cdf = p.double().cumsum(-1)
    point = (u.to(cdf.device) * cdf[..., -1]).unsqueeze(-1)
    index = torch.searchsorted(cdf, point, right=True).squeeze(-1)
    # u * total can round up to total; the last token with mass is then the right answer.
    last = torch.searchsorted(cdf, cdf[..., -1:].contiguous(), right=False).squeeze(-1)
    return torch.minimum(index, last)


def draw_without_replacement(p: Tensor, u: Tensor) -> Tensor:
    """K distinct tokens per distribution, in drawing order: `p` `[..., V]`, `u` `[..., K]` -> int64 `[..., K]`.

    Each draw is from `p` with the tokens drawn before it removed and the rest renormalised. When the support is
    smaller than K the missing draws are -1.
    """
    left = p.double().clone()
    picks = []
    for k in range(u.shape[-1]):
        alive = left.sum(-1) > 0
        token = draw(torch.where(alive.unsqueeze(-1), left, torch.ones_like(left)), u[..., k])
        left.scatter_(-1, token.unsqueeze(-1), 0.0)
        picks.append(torch.where(alive, token, torch.full_like(token, -1)))
    return torch.stack(picks, dim=-1)
