"""Output projection and loss together, a chunk of tokens at a time: no logits of the whole batch, neither law's.

The gradient of a chunk is taken as soon as its loss is known, in the forward, and its logits are dropped; what stays is
the gradient with respect to the hidden states and the projection. So nothing is computed twice, and of the matrices
`[tokens, vocabulary]` only a chunk's are ever held (the idea is that of the fused linear cross-entropy of Liger Kernel,
Hsu et al. 2024, here for any loss, with a teacher).

Legend: N valid tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.loss_sums import Sums
from train.losses import InPlaceFn, overlap
from train.objective import Objective
from train.teacher import Head, LiveTeacher, StoredTeacher, Teacher, Widened, compute_dtype, is_partial, vocabulary

# Logits of a chunk. On a CPU they should stay near the caches, on a GPU they should be enough to fill it.
_CHUNK_LOGITS = {"cpu": 2**23}
_CHUNK_LOGITS_ELSEWHERE = 2**25


def chunk_size(weight_VH: Tensor, teacher: Teacher | None, chunk: int | None) -> int:
    """Tokens of a chunk: as told, or as many as the wider of the two laws lets fit the device."""
    if chunk is not None:
        return chunk
    widest = max(weight_VH.shape[0], vocabulary(teacher))
    return max(16, _CHUNK_LOGITS.get(weight_VH.device.type, _CHUNK_LOGITS_ELSEWHERE) // widest)


@dataclass(frozen=True, eq=False)
class _Work:
    head: Head | None
    teacher: Teacher | None
    tokens_N: Tensor
    weights_N: Tensor | None
    objective: Objective
    chunk: int
    wants_gradient: bool
    wants_alpha: bool

    def chunks(self) -> list[slice]:
        count = len(self.tokens_N)
        return [slice(start, min(start + self.chunk, count)) for start in range(0, count, self.chunk)]

    def laws(self, logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Logits of draft and target as their models give them."""
        draft_CV = logits_CV if self.head is None else self.head.finish(logits_CV)
        return draft_CV, None if self.teacher is None else self.teacher.logits(rows, draft_CV.detach())

    @torch.no_grad()
    def measure(self, draft_CV: Tensor, target_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """alpha and the target's mass outside the draft's vocabulary, `[C]` each."""
        if isinstance(self.teacher, Widened):
            draft_CV, target_CV = draft_CV[:, : self.teacher.size], target_CV[:, : self.teacher.size]
        if not is_partial(self.teacher):
            alpha_C = overlap(draft_CV, target_CV)
            return alpha_C, torch.zeros_like(alpha_C)
        p_CV = target_CV.exp()
        if isinstance(self.teacher, StoredTeacher):
            alpha_C = self.teacher.overlap(rows, draft_CV)
        else:
            wide_CV = draft_CV if draft_CV.dtype == torch.float64 else draft_CV.float()
            alpha_C = torch.minimum(p_CV, wide_CV.softmax(-1)).sum(-1)
        return alpha_C, (1 - p_CV.sum(-1)).clamp_min(0)


# A chunk's logits -> its summed loss, its summed alpha and mass outside the draft's vocabulary, and the slope of the
# loss (None when nobody wants it).
ChunkFn = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor, Tensor | None]]


def _by_autograd(work: _Work, wants_slope: bool) -> ChunkFn:
    """Any objective."""

    def chunk(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        slope_CV = None
        with torch.set_grad_enabled(wants_slope):
            logits_CV.requires_grad_(wants_slope)
            draft_CV, target_CV = work.laws(logits_CV, rows)
            loss_C = work.objective.loss(draft_CV, target_CV, work.tokens_N[rows])
            total = loss_C.sum() if work.weights_N is None else (loss_C * work.weights_N[rows]).sum()
            if wants_slope:
                (slope_CV,) = torch.autograd.grad(total, logits_CV)
        alpha = missing = total.new_zeros(())
        if work.wants_alpha and target_CV is not None:
            alpha, missing = (each_C.sum() for each_C in work.measure(draft_CV.detach(), target_CV, rows))
        return total.detach(), alpha, missing, slope_CV

    return chunk


def _by_hand(work: _Work, teacher: LiveTeacher, measure: InPlaceFn, like: Tensor, vocabulary: int) -> ChunkFn:
    """An objective that is to be had in place, of finite logits: several times fewer passes over memory."""
    room = [like.new_empty(min(work.chunk, len(work.tokens_N)), vocabulary) for _ in range(2)]
    nothing = torch.zeros_like(like)

    def chunk(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        target_CV = teacher.logits(rows, logits_CV).to(logits_CV.dtype)
        used = room[0][: len(logits_CV)], room[1][: len(logits_CV)]
        loss_C, alpha_C = measure(logits_CV, target_CV, used)
        if work.weights_N is not None:
            weights_C = work.weights_N[rows].to(loss_C.dtype)
            loss_C, logits_CV = loss_C * weights_C, logits_CV.mul_(weights_C[:, None])
        return loss_C.sum(), alpha_C.sum(), nothing, logits_CV

    return chunk


class _Projected(torch.autograd.Function):
    """(hidden, weight, bias) -> (loss, alpha, missing), with the gradients of the loss made on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, work: _Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = compute_dtype(weight_VH)
        weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        needs = [work.wants_gradient and need for need in ctx.needs_input_grad[:3]]
        grad_hidden = torch.zeros_like(hidden_NH) if needs[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=wide) if needs[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if needs[2] and bias_V is not None else None
        loss = torch.zeros((), dtype=wide, device=hidden_NH.device)
        alpha, missing = torch.zeros_like(loss), torch.zeros_like(loss)
        plain = work.head is None or work.head.is_plain
        in_place = work.objective.in_place
        if plain and in_place is not None and isinstance(work.teacher, LiveTeacher):
            chunk = _by_hand(work, work.teacher, in_place, loss, len(weight))
        else:
            chunk = _by_autograd(work, any(needs))
        for rows in work.chunks():
            hidden_CH = hidden_NH[rows].to(dtype)
            chunk_loss, chunk_alpha, chunk_missing, slope_CV = chunk(F.linear(hidden_CH, weight, bias).to(wide), rows)
            loss += chunk_loss
            alpha += chunk_alpha
            missing += chunk_missing
            if slope_CV is None:
                continue
            if grad_bias is not None:
                grad_bias += slope_CV.sum(0)
            slope_CV = slope_CV.to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope_CV @ weight
            if grad_weight is not None:
                if dtype == wide:
                    grad_weight.addmm_(slope_CV.T, hidden_CH)
                else:
                    grad_weight += slope_CV.T @ hidden_CH
            del slope_CV
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden_NH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(alpha, missing)
        return loss, alpha, missing

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of a chunked loss was taken already; it can be taken once")
        # In place: a second copy of the weight's gradient would be the largest tensor of all.
        hidden, weight, bias = (
            None if gradient is None else gradient.mul_(slopes[0].to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return hidden, weight, bias, None


def projected(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    teacher: Teacher | None,
    tokens_N: Tensor,
    weights_N: Tensor | None,
    objective: Objective,
    chunk: int | None = None,
    head: Head | None = None,
    alpha: bool = True,
) -> Sums:
    """Sum over tokens of weight times loss of the logits `hidden @ weight.T + bias`.

    teacher: None only when the objective needs no target; then alpha is not measured. weights_N: None is one each.
    chunk: tokens at a time, by default what suits the device. head: for a draft that scales or bounds its logits.
    alpha=False leaves alpha out, and `missing`, which is measured beside it where the teacher `is_partial`. Runs in
    autocast's dtype where that is on; losses and the gradient of the weight are accumulated in fp32. `backward` may be
    called once.
    """
    work = _Work(
        head=head,
        teacher=teacher,
        tokens_N=tokens_N,
        weights_N=weights_N,
        objective=objective,
        chunk=chunk_size(weight_VH, teacher, chunk),
        wants_gradient=torch.is_grad_enabled(),
        wants_alpha=alpha,
    )
    loss, overlaps, missing = _Projected.apply(hidden_NH, weight_VH, bias_V, work)  # type: ignore[no-untyped-call]
    count = torch.tensor(len(tokens_N), device=hidden_NH.device)
    measured = count if alpha and teacher is not None else torch.zeros_like(count)
    wants_missing = alpha and is_partial(teacher)
    return Sums(loss, count, overlaps, overlaps[None], measured[None], missing if wants_missing else None)


@torch.no_grad()
def token_measures(
    hidden_NH: Tensor,
    head: Head,
    teacher: Teacher | None,
    tokens_N: Tensor,
    objective: Objective,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, alpha and the target's mass outside the draft's vocabulary, `[N]` a token, a chunk at a time.

    Without gradients; the last two are 0 without a teacher.
    """
    weight_VH, bias_V = head.weight_VH, head.bias_V
    dtype = compute_dtype(weight_VH)
    weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
    work = _Work(head, teacher, tokens_N, None, objective, chunk_size(weight_VH, teacher, chunk), False, True)
    none = torch.zeros(0, device=hidden_NH.device)
    found = [(none, none, none)]
    for rows in work.chunks():
        logits_CV = F.linear(hidden_NH[rows].to(dtype), weight, bias)
        draft_CV, target_CV = work.laws(logits_CV, rows)
        loss_C = objective.loss(draft_CV, target_CV, tokens_N[rows])
        zero_C = torch.zeros_like(loss_C)
        found.append((loss_C, *((zero_C, zero_C) if target_CV is None else work.measure(draft_CV, target_CV, rows))))
    loss_N, alpha_N, missing_N = map(torch.cat, zip(*found, strict=True))
    return loss_N, alpha_N, missing_N


def token_losses(
    hidden_NH: Tensor,
    head: Head,
    teacher: Teacher | None,
    tokens_N: Tensor,
    objective: Objective,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The first two of `token_measures`, loss and alpha `[N]` a token."""
    return token_measures(hidden_NH, head, teacher, tokens_N, objective, chunk)[:2]
