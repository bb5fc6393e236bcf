"""Output projection and loss together, a chunk of tokens at a time: the logits of a whole batch are
never held.

The forward takes the gradient of each chunk at once and drops its logits, as Liger Kernel's fused
linear cross-entropy does (Hsu et al. 2024); here for any loss, with a teacher.

Legend: N valid tokens, C tokens of a chunk, H hidden size, R Markov rank, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.heads.borrowed import OutputProjection
from train.batch import LossSums
from train.losses import InPlaceFn, overlap
from train.objective import Objective
from train.teacher import LiveTeacher, StoredTeacher, Teacher, compute_dtype

# Logits per chunk. On a GPU enough to occupy it. On a CPU few enough to stay near the caches, and
# at most so many rows that the allocator reuses the memory of the chunk before (measured: 256 rows
# take two thirds of the time of 4,096).
_CHUNK_LOGITS = 2**25
_CPU_CHUNK_LOGITS = 2**23
_CPU_CHUNK_ROWS = 256


def chunk_size(weight_VH: Tensor, teacher: Teacher | None, chunk: int | None) -> int:
    """Tokens of a chunk: `chunk` if given, else as many as suit the device for the wider of the two
    vocabularies.
    """
    on_cpu, widest = weight_VH.device.type == "cpu", len(weight_VH)
    if isinstance(teacher, LiveTeacher):
        widest = max(widest, len(teacher.projection.weight_VH))
    suits = max(16, (_CPU_CHUNK_LOGITS if on_cpu else _CHUNK_LOGITS) // widest)
    return chunk or (min(_CPU_CHUNK_ROWS, suits) if on_cpu else suits)


@dataclass(frozen=True, eq=False)
class _Task:
    """What is to be computed for all tokens, `chunk` of them at a time."""

    projection: OutputProjection | None
    teacher: Teacher | None
    tokens_N: Tensor
    weights_N: Tensor | None
    objective: Objective
    chunk: int
    wants_gradient: bool = False
    per_token_3N: Tensor | None = None

    def note(self, rows: slice, *measures: Tensor | None) -> None:
        """Write down loss, alpha and missing mass of each token, for a caller that asked for
        them.
        """
        if self.per_token_3N is not None:
            for place, measure_C in enumerate(measures):
                if measure_C is not None:
                    self.per_token_3N[place, rows] = measure_C.detach().to(self.per_token_3N.dtype)

    @torch.no_grad()
    def measure(self, draft_CV: Tensor, target_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """alpha and the target's mass outside the draft's vocabulary, `[C]` each."""
        if isinstance(self.teacher, LiveTeacher) and not self.teacher.is_partial:
            # Decoding cuts tokens that the target lacks off the draft's distribution.
            size = draft_CV.shape[-1] - self.teacher.further
            alpha_C = overlap(draft_CV[:, :size], target_CV[:, :size])
            return alpha_C, torch.zeros_like(alpha_C)
        p_CV = target_CV.exp()
        if isinstance(self.teacher, StoredTeacher):
            alpha_C = self.teacher.overlap(rows, draft_CV)
        else:
            wide_CV = draft_CV if draft_CV.dtype == torch.float64 else draft_CV.float()
            alpha_C = torch.minimum(p_CV, wide_CV.softmax(-1)).sum(-1)
        return alpha_C, (1 - p_CV.sum(-1)).clamp_min(0)


# A chunk's logits and rows -> its summed loss, summed alpha, summed mass outside the draft's
# vocabulary, and the gradient of the loss with respect to the logits (None when it is not needed).
ChunkFn = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor, Tensor | None]]


def _by_autograd(task: _Task, wants_gradient: bool) -> ChunkFn:
    def chunk(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        gradient_CV = None
        with torch.set_grad_enabled(wants_gradient):
            logits_CV.requires_grad_(wants_gradient)
            draft_CV = logits_CV if task.projection is None else task.projection.finish(logits_CV)
            target_CV = (
                None if task.teacher is None else task.teacher.logits(rows, draft_CV.detach())
            )
            loss_C = task.objective.loss(draft_CV, target_CV, task.tokens_N[rows])
            total = (
                loss_C.sum() if task.weights_N is None else (loss_C * task.weights_N[rows]).sum()
            )
            if wants_gradient:
                (gradient_CV,) = torch.autograd.grad(total, logits_CV)
        alpha = missing = total.new_zeros(())
        alpha_C = missing_C = None
        if target_CV is not None:
            alpha_C, missing_C = task.measure(draft_CV.detach(), target_CV, rows)
            alpha, missing = alpha_C.sum(), missing_C.sum()
        task.note(rows, loss_C, alpha_C, missing_C)
        return total.detach(), alpha, missing, gradient_CV

    return chunk


def _in_place(
    task: _Task, teacher: Teacher, measure: InPlaceFn, like: Tensor, vocabulary: int
) -> ChunkFn:
    """For an objective with an in-place form, on finite logits: several times fewer passes over
    memory.
    """
    scratch = [like.new_empty(min(task.chunk, len(task.tokens_N)), vocabulary) for _ in range(2)]

    def chunk(logits_CV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        target_CV = teacher.logits(rows, logits_CV).to(logits_CV.dtype)
        used = scratch[0][: len(logits_CV)], scratch[1][: len(logits_CV)]
        mass_C = target_CV.logsumexp(-1).exp() if teacher.is_partial else None
        loss_C, alpha_C = measure(logits_CV, target_CV, used, mass_C)
        missing_C = torch.zeros_like(alpha_C) if mass_C is None else (1 - mass_C).clamp_min(0)
        task.note(rows, loss_C, alpha_C, missing_C)
        if task.weights_N is not None:
            weights_C = task.weights_N[rows].to(loss_C.dtype)
            loss_C, logits_CV = loss_C * weights_C, logits_CV.mul_(weights_C[:, None])
        return loss_C.sum(), alpha_C.sum(), missing_C.sum(), logits_CV

    return chunk


class _Projected(torch.autograd.Function):
    """(task, bias, hidden, weight, ...) -> (loss, alpha, missing), with the gradients of the loss
    made on the way.

    The logits are the sum of all `hidden @ weight.T`, each of a width of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, task: _Task, bias_V: Tensor | None, *factors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weights_given = factors[::2], factors[1::2]
        hidden_NH = hidden[0]
        dtype = compute_dtype(weights_given[0])
        weights, bias = (
            [weight.to(dtype) for weight in weights_given],
            None if bias_V is None else bias_V.to(dtype),
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        needs = [task.wants_gradient and need for need in ctx.needs_input_grad[1:]]
        grad_bias = (
            torch.zeros_like(bias_V, dtype=wide) if needs[0] and bias_V is not None else None
        )
        grad_factors = [
            torch.zeros_like(factor, dtype=wide if place % 2 else factor.dtype) if need else None
            for place, (factor, need) in enumerate(zip(factors, needs[1:], strict=True))
        ]
        loss = torch.zeros((), dtype=wide, device=hidden_NH.device)
        alpha, missing = torch.zeros_like(loss), torch.zeros_like(loss)
        linear = task.projection is None or task.projection.is_linear
        in_place = task.objective.in_place
        teacher = task.teacher
        if (
            linear
            and in_place is not None
            and isinstance(teacher, LiveTeacher)
            and not teacher.further
        ):
            chunk = _in_place(task, teacher, in_place, loss, len(weights[0]))
        else:
            chunk = _by_autograd(task, any(needs))
        for start in range(0, len(task.tokens_N), task.chunk):
            rows = slice(start, min(start + task.chunk, len(task.tokens_N)))
            parts = [states[rows].to(dtype) for states in hidden]
            # The logits get no name here, so that they are freed when `chunk` returns.
            chunk_loss, chunk_alpha, chunk_missing, gradient_CV = chunk(
                _logits(parts, weights, bias).to(wide), rows
            )
            loss += chunk_loss
            alpha += chunk_alpha
            missing += chunk_missing
            if gradient_CV is None:
                continue
            if grad_bias is not None:
                grad_bias += gradient_CV.sum(0)
            gradient_CV = gradient_CV.to(dtype)
            grads = zip(parts, weights, grad_factors[::2], grad_factors[1::2], strict=True)
            for part_CH, weight, grad_hidden, grad_weight in grads:
                if grad_hidden is not None:
                    grad_hidden[rows] = gradient_CV @ weight
                if grad_weight is not None and dtype == wide:
                    grad_weight.addmm_(gradient_CV.T, part_CH)
                elif grad_weight is not None:
                    grad_weight += gradient_CV.T @ part_CH
            del gradient_CV
        ctx.gradients = (grad_bias, *grad_factors)
        ctx.dtypes = (
            None if bias_V is None else bias_V.dtype,
            *(factor.dtype for factor in factors),
        )
        ctx.mark_non_differentiable(alpha, missing)
        return loss, alpha, missing

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradient of a chunked loss can be taken once"
        # In place: a second copy of the weight's gradient would be the largest tensor of the step.
        scaled = (
            None if gradient is None else gradient.mul_(slopes[0].to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return None, *scaled


def _logits(parts: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    logits_CV = F.linear(parts[0], weights[0], bias)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        logits_CV = logits_CV.addmm_(part, weight.T)
    return logits_CV


def projected(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    teacher: Teacher | None,
    tokens_N: Tensor,
    weights_N: Tensor | None,
    objective: Objective,
    chunk: int | None = None,
    projection: OutputProjection | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    per_token_3N: Tensor | None = None,
) -> LossSums:
    """Sum over tokens of weight times loss of the logits `hidden @ weight.T + bias`.

    teacher: None only when the objective needs no target; then alpha is not measured. weights_N:
    None for all 1.
    chunk: tokens at a time, by default what suits the device. projection: scales or caps the
    draft's logits; its weight and bias are the arguments. low_rank: `[N, R]` and `[V, R]` whose
    product is added to the logits.
    per_token_3N: is filled with loss, not weighted, alpha and missing mass of each token. Runs in
    autocast's dtype; losses and the gradient of the weight are accumulated in fp32. `backward` may
    be called once.
    """
    size = chunk_size(weight_VH, teacher, chunk)
    gradient = torch.is_grad_enabled()
    task = _Task(projection, teacher, tokens_N, weights_N, objective, size, gradient, per_token_3N)
    factors = hidden_NH, weight_VH, *(low_rank or ())
    loss, overlaps, missing = _Projected.apply(task, bias_V, *factors)  # type: ignore[no-untyped-call]
    count = torch.tensor(len(tokens_N), device=hidden_NH.device)
    measured = count if teacher is not None else torch.zeros_like(count)
    wants_missing = teacher is not None and teacher.is_partial
    return LossSums(
        loss, count, overlaps, overlaps[None], measured[None], missing if wants_missing else None
    )
