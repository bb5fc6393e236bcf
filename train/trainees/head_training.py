"""What the trainees of heads share: which drafts count, how a head is unrolled on its own features, how sums add up.

A pair t is what an EAGLE head is fed: the target's feature at position t and the token at t + 1. A draft that starts
from pair t guesses, at depth d, the token at t + 1 + d; the target's law for that token is at position t + d. In
decoding every draft starts from a token of the response or from the last one of the prompt, so only those pairs count
here: pair t counts at depth d when the tokens at t + 2 and t + 1 + d are tokens of the response of one document. The
first token of a response without a prompt has no pair and is not trained.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, H hidden size, D depths.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from draftsmith_core.errors import InputError
from train.data import IGNORE, Batch
from train.loss_sums import Sums
from train.objective import Objective

# What the loss of each further depth weighs, as a share of the one before (Medusa, section 2.2.1; EAGLE-3's code).
DECAY = 0.8

# tokens [B, W], features [B, W, H], boolean mask or None, positions [B or 1, W], cache -> the head's features [B, W, H]
Step = Callable[[Tensor, Tensor, Tensor | None, Tensor, Cache | None], Tensor]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that count at a depth: their row and column, and the position of the target's law."""

    row_N: Tensor
    at_N: Tensor
    law_N: Tensor

    def states(self, states_BWH: Tensor) -> Tensor:
        """`[N, H]` at the pairs, of states by pair or by position."""
        return states_BWH[self.row_N, self.at_N]

    def laws(self, states_BTH: Tensor) -> Tensor:
        """`[N, ...]` at the positions of the laws."""
        return states_BTH[self.row_N, self.law_N]


def pairs_at(batch: Batch, depth: int) -> Pairs:
    """The pairs that count at this depth, from 1."""
    valid_BT = batch.labels_BT != IGNORE
    counts_BW = valid_BT[:, 1:].clone()
    later_BW = torch.zeros_like(counts_BW)
    width = counts_BW.shape[1] + 1 - depth
    if width > 0:
        later_BW[:, :width] = valid_BT[:, depth:]
    counts_BW &= later_BW
    if batch.documents_BT is not None and batch.positions_BT is not None:
        # A document's first position has no pair of its own before it.
        counts_BW &= batch.positions_BT[:, 1:] > 0
        if width > 0:
            counts_BW[:, :width] &= batch.documents_BT[:, depth:] == batch.documents_BT[:, 1 : 1 + width]
    row_N, at_N = counts_BW.nonzero(as_tuple=True)
    return Pairs(row_N, at_N, at_N + depth)


def count_pairs(batch: Batch) -> Tensor:
    """How many pairs count at depth 1, a scalar: what a head's loss is a sum over."""
    return torch.tensor(len(pairs_at(batch, 1).row_N), device=batch.ids_BT.device)


def unroll(step: Step, batch: Batch, features_BWH: Tensor, depths: int) -> Iterator[Tensor]:
    """The head's own features `[B, W, H]` at depth 1, 2, ...: what decoding has when it drafts behind every pair.

    At depth 1 all pairs go in with the target's features, under causal attention. At depth d pair t goes in with the
    token at t + d, the feature that it gave at depth d - 1, and position t + d - 1; it sees what was there when its
    draft began (the first pass, up to t) and the steps of its own draft (EAGLE-3, arXiv 2503.01840, section 3.2).
    """
    cache = DynamicCache() if depths > 1 else None
    ids_BW = batch.ids_BT[:, 1:]
    width = ids_BW.shape[1]
    positions_BW = torch.arange(width, device=ids_BW.device)[None]
    mask = None
    sees = torch.ones(1, 1, width, width, dtype=torch.bool, device=ids_BW.device).tril()
    if batch.documents_BT is not None and batch.positions_BT is not None:
        positions_BW = (batch.positions_BT[:, 1:] - 1).clamp_min(0)
        # A pair of two documents is nobody's: it sees its like, and nothing that counts sees it.
        documents_BW = batch.documents_BT[:, 1:].masked_fill(batch.positions_BT[:, 1:] == 0, -1)
        sees = sees & (documents_BW[:, :, None] == documents_BW[:, None, :])[:, None]
        mask = sees
    itself = torch.eye(width, dtype=torch.bool, device=ids_BW.device).expand_as(sees)
    for depth in range(1, depths + 1):
        if depth > 1:
            sees = torch.cat([sees, itself], dim=-1)
            mask = sees
            ids_BW = torch.cat([ids_BW[:, 1:], torch.zeros_like(ids_BW[:, :1])], dim=1)
        features_BWH = step(ids_BW, features_BWH, mask, positions_BW + (depth - 1), cache)
        yield features_BWH


def add_up(parts: Sequence[Sums], weights: Sequence[float], missing: Tensor | None = None) -> Sums:
    """One `Sums` of those of the depths: losses weighted, tokens and alpha those of depth 1, the rest by depth."""
    losses = [part.loss * weight for part, weight in zip(parts, weights, strict=True) if weight]
    return Sums(
        loss=torch.stack(losses).sum(),
        tokens=parts[0].tokens,
        alpha=parts[0].alpha,
        depth_alpha_D=torch.stack([part.alpha for part in parts]),
        depth_tokens_D=torch.cat([part.depth_tokens_D for part in parts]),
        missing=missing,
    )


def check_objective(objective: Objective, kind: str) -> Objective:
    """The objective, unless it is one for draft language models only."""
    if objective.needs_reference:
        raise InputError(f"objective: @adaspec compares language models; leave it out to train {kind}")
    return objective
