"""The target's distributions: projected from its hidden states when they are needed, or read from
stored rows.

A draft may know fewer tokens than its target, or more: vocabularies are padded to different sizes,
and an EAGLE-3 head keeps the commonest tokens only. Losses compare distributions over the draft's
tokens, the target's renormalised there; acceptance is against the target's whole distribution.

`logits(rows, draft_CV)` of a teacher returns its logits `[C, V]` for some rows, without gradient;
the caller may overwrite them. `draft_CV` are the draft's logits at the same rows. A teacher that
`is_partial` returns log-probabilities, which add up to less than one if the draft lacks tokens.

Legend: N valid tokens, M selected ones, C tokens of a chunk, H hidden size, V vocabulary of the
draft, W of the target, K stored tokens per position, T tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.drafts.heads.borrowed import OutputProjection, projection_of
from draftsmith.train.losses import at_least_fp32

# Logarithm of a negligible mass that does not underflow to zero in fp32.
_NEGLIGIBLE_LOG_MASS = -80.0


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that a matrix product with `weight` runs in here: autocast's, or its own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@dataclass(frozen=True, eq=False)
class LiveTeacher:
    """The target itself, as its last hidden states: `[N, H]` is kept, and logits are made per
    chunk.

    ids: the target's tokens that the draft has, in its order, if it lacks some. further: number of
    tokens that the draft has after the target's; the target never gives them. row_N: the row of
    each draft, ascending, where several share one; a chunk projects a row once.
    """

    hidden_NH: Tensor
    projection: OutputProjection
    ids: Tensor | slice | None = None
    further: int = 0
    row_N: Tensor | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the target's distributions may lie partly outside the draft's vocabulary."""
        return self.ids is not None

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """`[C, V]`, exactly as the target's own forward gives them; log-probabilities of `ids` if
        the draft lacks some, minus infinity for `further` tokens.
        """
        row_C = None
        if self.row_N is not None:
            used, row_C = self.row_N[rows].unique_consecutive(return_inverse=True)
            rows = slice(int(used[0]), int(used[-1]) + 1)
        weight_VH = self.projection.weight_VH
        bias_V = self.projection.bias_V
        dtype = compute_dtype(weight_VH)
        if bias_V is not None:
            bias_V = bias_V.to(dtype)
        states_CH = self.projection.prepare(self.hidden_NH[rows])
        projected_CV = F.linear(states_CH.to(dtype), weight_VH.to(dtype), bias_V)
        logits_CV = self.projection.finish(projected_CV)
        if self.ids is not None:
            whole_CW = at_least_fp32(logits_CV)
            logits_CV = whole_CW[:, self.ids] - whole_CW.logsumexp(-1, keepdim=True)
        elif self.further:
            logits_CV = F.pad(logits_CV, (0, self.further), value=-math.inf)
        return logits_CV if row_C is None else logits_CV[row_C]


@dataclass(frozen=True, eq=False)
class StoredTeacher:
    """Top-k rows of a distilled set: ids, their log-probabilities (-inf where a row has fewer), the
    mass of the rest.

    The rest (the tail) gets the draft's own shape, scaled to the stored tail mass and without
    gradient. Then every loss is that of the distributions over K + 1 outcomes (the K tokens and
    "any other"): nothing pulls on the draft inside the tail, and a KL is a lower bound of the true
    one. Alpha is measured by `overlap` and is a lower bound too.
    """

    top_ids_NK: Tensor
    top_logprobs_NK: Tensor
    tail_N: Tensor
    is_partial: ClassVar[bool] = True

    @torch.no_grad()
    def logits(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """Log-probabilities `[C, V]`; stored tokens that the draft does not have are left out."""
        draft_CV = draft_CV.float()
        ids_CK = self.top_ids_NK[rows]
        unknown_CK = ids_CK >= draft_CV.shape[-1]
        logprobs_CK = self.top_logprobs_NK[rows].float().masked_fill(unknown_CK, -math.inf)
        # amax and not an assignment, because padding repeats id 0 with -inf.
        top_CV = torch.full_like(draft_CV, -math.inf)
        top_CV = top_CV.scatter_reduce(1, ids_CK.masked_fill(unknown_CK, 0), logprobs_CK, "amax")
        rest_CV = draft_CV.masked_fill(top_CV > -math.inf, -math.inf)
        norm_C1 = rest_CV.logsumexp(-1, keepdim=True)
        mass_C1 = self.tail_N[rows, None].float()
        tail_C1 = mass_C1.clamp_min(0).log()
        # Without a stored token that the draft has, the tail must keep some mass: a log_softmax of
        # -inf alone is NaN.
        nothing_C1 = logprobs_CK.amax(-1, keepdim=True) == -math.inf
        tail_C1 = torch.where(nothing_C1, tail_C1.clamp_min(_NEGLIGIBLE_LOG_MASS), tail_C1)
        # A row may list every token, or the draft give zero mass to all others: then there is no
        # tail.
        tail_CV = torch.where(rest_CV > -math.inf, rest_CV - norm_C1 + tail_C1, -math.inf)
        return torch.maximum(top_CV, tail_CV)

    @torch.no_grad()
    def overlap(self, rows: slice, draft_CV: Tensor) -> Tensor:
        """A lower bound of alpha, `[C]`: sum of min(p, q) over the stored tokens, nothing for the
        tail.
        """
        wide_CV = at_least_fp32(draft_CV)
        ids_CK = self.top_ids_NK[rows]
        unknown_CK = ids_CK >= draft_CV.shape[-1]
        # Padding repeats id 0 with p = 0, so that it adds nothing.
        logprobs_CK = self.top_logprobs_NK[rows].to(wide_CV.dtype)
        p_CK = logprobs_CK.exp().masked_fill(unknown_CK, 0)
        ids_CK = ids_CK.masked_fill(unknown_CK, 0)
        q_CK = wide_CV.softmax(-1).gather(-1, ids_CK)
        return torch.minimum(p_CK, q_CK).sum(-1)

    def to(self, device: torch.device) -> "StoredTeacher":
        return StoredTeacher(
            self.top_ids_NK.to(device), self.top_logprobs_NK.to(device), self.tail_N.to(device)
        )


Teacher = LiveTeacher | StoredTeacher


def teacher_for_draft(teacher: LiveTeacher, size: int, draft_size: int) -> LiveTeacher:
    """The teacher, of a vocabulary of `size` tokens, for a draft with the same tokens padded to
    `draft_size`.
    """
    return replace(
        teacher,
        ids=slice(draft_size) if size > draft_size else None,
        further=max(0, draft_size - size),
    )


def find_projection(model: PreTrainedModel, name: str) -> OutputProjection:
    """The output projection of a causal LM. Raise InputError if it does not give the model's own
    logits.
    """
    try:
        return projection_of(model)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
