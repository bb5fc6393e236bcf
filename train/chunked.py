"""Output projection and loss together, a chunk of tokens at a time: the logits of a whole batch are
never held.

The forward takes the gradient of each chunk at once and drops its logits, as Liger Kernel's fused
linear cross-entropy does (Hsu et al. 2024); here for any loss, with a teacher.

Legend: N valid tokens, C tokens of a chunk, H hidden size, R Markov rank, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafts.heads.borrowed import OutputProjection
from draftsmith.train.batch import LossSums
from draftsmith.train.losses import InPlaceFn, at_least_fp32, overlap
from draftsmith.train.objective import Objective
from draftsmith.train.teacher import LiveTeacher, StoredTeacher, Teacher, compute_dtype

# Logits per chunk. On a GPU enough to occupy it. On a CPU few enough to stay near the caches, and
# at most so many rows that the allocator reuses the memory of the chunk before (measured: 256 rows
# take two thirds of the time of 4,096).
_CHUNK_LOGITS = 2**25
_CPU_CHUNK_LOGITS = 2**23
_CPU_CHUNK_ROWS = 256


def chunk_size(
    weight_VH: Tensor, teacher: Teacher | None, chunk: int | None, device: str | None = None
) -> int:
    """Tokens of a chunk: `chunk` if given, else as many as suit the device for the wider of the two
    vocabularies. device: where it will be, of a weight without values.
    """
    on_cpu = (device or weight_VH.device.type) == "cpu"
    widest = len(weight_VH)
    if isinstance(teacher, LiveTeacher):
        widest = max(widest, len(teacher.projection.weight_VH))
    suits = max(16, (_CPU_CHUNK_LOGITS if on_cpu else _CHUNK_LOGITS) // widest)
    return chunk or (min(_CPU_CHUNK_ROWS, suits) if on_cpu else suits)


@dataclass(eq=False)
class _Sums:
    """Sums of weighted loss, alpha, and the target's mass outside the draft's vocabulary."""

    loss: Tensor
    alpha: Tensor
    missing: Tensor


@dataclass(frozen=True, eq=False)
class _Task:
    """What is to be computed for all tokens, `chunk` of them at a time."""

    projection: OutputProjection | None
    teacher: Teacher | None
    tokens_N: Tensor
    weights_N: Tensor | None
    objective: Objective
    chunk: int
    wants_gradient: bool
    per_token_3N: Tensor | None

    def weighted(self, values_C: Tensor, rows: slice) -> Tensor:
        """Values of a chunk's tokens times the tokens' weights."""
        if self.weights_N is None:
            return values_C
        return values_C * self.weights_N[rows].to(values_C.dtype)

    def add(
        self, sums: _Sums, rows: slice, loss_C: Tensor, alpha_C: Tensor, missing_C: Tensor
    ) -> None:
        """Add the figures of a chunk's tokens to the sums, and list them if the caller asked."""
        sums.loss += self.weighted(loss_C, rows).sum()
        sums.alpha += alpha_C.sum()
        sums.missing += missing_C.sum()
        if self.per_token_3N is not None:
            self.per_token_3N[:, rows] = torch.stack([loss_C, alpha_C, missing_C])

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
            alpha_C = torch.minimum(p_CV, at_least_fp32(draft_CV).softmax(-1)).sum(-1)
        return alpha_C, (1 - p_CV.sum(-1)).clamp_min(0)


class LowRank(NamedTuple):
    """Factors whose product is added to the logits: of each token, and of the vocabulary."""

    tokens_NR: Tensor
    weight_VR: Tensor


# A chunk's logits and rows -> the gradient of the weighted loss with respect to the logits, None if
# it is not needed. The chunk's figures are added to sums.
ChunkFn = Callable[[Tensor, slice], Tensor | None]


def _chunk_function(task: _Task, sums: _Sums, vocabulary: int, gradient: bool) -> ChunkFn:
    """The in-place form where the objective has one and the teacher's logits are plain."""
    teacher = task.teacher
    in_place = task.objective.in_place
    linear = task.projection is None or task.projection.is_linear
    plain = linear and isinstance(teacher, LiveTeacher) and not teacher.further
    if plain and in_place is not None and teacher is not None:
        return _in_place(task, sums, teacher, in_place, vocabulary)
    return _by_autograd(task, sums, gradient)


def _by_autograd(task: _Task, sums: _Sums, wants_gradient: bool) -> ChunkFn:
    def chunk(logits_CV: Tensor, rows: slice) -> Tensor | None:
        gradient_CV = None
        target_CV = None
        with torch.set_grad_enabled(wants_gradient):
            logits_CV.requires_grad_(wants_gradient)
            draft_CV = logits_CV if task.projection is None else task.projection.finish(logits_CV)
            if task.teacher is not None:
                target_CV = task.teacher.logits(rows, draft_CV.detach())
            loss_C = task.objective.loss(draft_CV, target_CV, task.tokens_N[rows])
            if wants_gradient:
                total = task.weighted(loss_C, rows).sum()
                (gradient_CV,) = torch.autograd.grad(total, logits_CV)
        alpha_C = missing_C = torch.zeros_like(loss_C)
        if target_CV is not None:
            alpha_C, missing_C = task.measure(draft_CV.detach(), target_CV, rows)
        task.add(sums, rows, loss_C.detach(), alpha_C, missing_C)
        return gradient_CV

    return chunk


def _in_place(
    task: _Task, sums: _Sums, teacher: Teacher, measure: InPlaceFn, vocabulary: int
) -> ChunkFn:
    """For an objective with an in-place form, on finite logits: several times fewer passes over
    memory.
    """
    rows_held = min(task.chunk, len(task.tokens_N))
    scratch = [sums.loss.new_empty(rows_held, vocabulary) for _ in range(2)]

    def chunk(logits_CV: Tensor, rows: slice) -> Tensor:
        target_CV = teacher.logits(rows, logits_CV).to(logits_CV.dtype)
        used = scratch[0][: len(logits_CV)], scratch[1][: len(logits_CV)]
        mass_C = target_CV.logsumexp(-1).exp() if teacher.is_partial else None
        loss_C, alpha_C = measure(logits_CV, target_CV, used, mass_C)
        missing_C = torch.zeros_like(alpha_C) if mass_C is None else (1 - mass_C).clamp_min(0)
        task.add(sums, rows, loss_C, alpha_C, missing_C)
        if task.weights_N is not None:
            logits_CV.mul_(task.weights_N[rows, None].to(loss_C.dtype))
        return logits_CV

    return chunk


class _Projected(torch.autograd.Function):
    """(task, bias, hidden, weight, low-rank hidden, low-rank weight) -> (loss, alpha, missing),
    with the gradients of the loss made on the way.

    The logits are the sum of `hidden @ weight.T`, each of a width of its own; the second pair may
    be None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        task: _Task,
        bias_V: Tensor | None,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        low_rank_NR: Tensor | None,
        low_rank_VR: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = compute_dtype(weight_VH)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given = [bias_V, hidden_NH, weight_VH, low_rank_NR, low_rank_VR]
        # Gradients of bias and weights add up over all tokens, so they are wide.
        add_up = [True, False, True, False, True]
        gradients: list[Tensor | None] = []
        needs = ctx.needs_input_grad[1:]
        for tensor, needed, is_sum in zip(given, needs, add_up, strict=True):
            if tensor is None or not needed or not task.wants_gradient:
                gradients.append(None)
            else:
                gradients.append(torch.zeros_like(tensor, dtype=wide if is_sum else tensor.dtype))
        grad_bias = gradients[0]
        products = [_Product(hidden_NH, weight_VH.to(dtype), gradients[1], gradients[2])]
        if low_rank_NR is not None and low_rank_VR is not None:
            low_rank = _Product(low_rank_NR, low_rank_VR.to(dtype), gradients[3], gradients[4])
            products.append(low_rank)
        bias = None if bias_V is None else bias_V.to(dtype)
        zero = torch.zeros((), dtype=wide, device=hidden_NH.device)
        sums = _Sums(zero, zero.clone(), zero.clone())
        wants_gradient = any(gradient is not None for gradient in gradients)
        chunk = _chunk_function(task, sums, len(weight_VH), wants_gradient)
        for start in range(0, len(task.tokens_N), task.chunk):
            rows = slice(start, min(start + task.chunk, len(task.tokens_N)))
            parts = [product.hidden[rows].to(dtype) for product in products]
            # The logits get no name here, so that they are freed when `chunk` returns.
            gradient_CV = chunk(_logits(parts, products, bias).to(wide), rows)
            if gradient_CV is None:
                continue
            if grad_bias is not None:
                grad_bias += gradient_CV.sum(0)
            gradient_CV = gradient_CV.to(dtype)
            for part, product in zip(parts, products, strict=True):
                product.add_gradients(gradient_CV, part, rows)
            del gradient_CV
        ctx.gradients = gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        ctx.mark_non_differentiable(sums.alpha, sums.missing)
        return sums.loss, sums.alpha, sums.missing

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        assert gradients is not None, "the gradient of a chunked loss can be taken once"
        scaled: list[Tensor | None] = [None]
        for gradient, dtype in zip(gradients, ctx.dtypes, strict=True):
            if gradient is None:
                scaled.append(None)
                continue
            # In place: a second copy of the weight's gradient would be the largest tensor of the
            # step.
            scaled.append(gradient.mul_(slopes[0].to(gradient.dtype)).to(dtype))
        return tuple(scaled)


@dataclass(frozen=True, eq=False)
class _Product:
    """One `hidden @ weight.T` of the logits, with the gradients that are accumulated for it."""

    hidden: Tensor
    weight: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None

    def add_gradients(self, gradient_CV: Tensor, part_CH: Tensor, rows: slice) -> None:
        """Add the gradients of a chunk, from that of its logits."""
        if self.grad_hidden is not None:
            self.grad_hidden[rows] = gradient_CV @ self.weight
        if self.grad_weight is None:
            return
        if gradient_CV.dtype == self.grad_weight.dtype:
            self.grad_weight.addmm_(gradient_CV.T, part_CH)
        else:
            self.grad_weight.add_(gradient_CV.T @ part_CH)


def _logits(parts: Sequence[Tensor], products: Sequence[_Product], bias: Tensor | None) -> Tensor:
    logits_CV = F.linear(parts[0], products[0].weight, bias)
    for part, product in zip(parts[1:], products[1:], strict=True):
        logits_CV = logits_CV.addmm_(part, product.weight.T)
    return logits_CV


@dataclass(frozen=True, eq=False)
class Output:
    """How logits follow from hidden states: weight and bias; `projection` scales or caps them."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    projection: OutputProjection | None = None


@dataclass(frozen=True)
class TokenLoss:
    """The loss of tokens from hidden states, `chunk` of them at a time.

    chunk: None takes as many as suit the device.
    """

    objective: Objective
    chunk: int | None = None

    def sums(
        self,
        output: Output,
        hidden_NH: Tensor,
        tokens_N: Tensor,
        *,
        teacher: Teacher | None,
        weights_N: Tensor | None = None,
        low_rank: LowRank | None = None,
        per_token_3N: Tensor | None = None,
    ) -> LossSums:
        """Sum over tokens of weight times loss.

        teacher: None only when the objective needs no target; then alpha is not measured.
        weights_N: None for all 1. low_rank: is added to the logits. per_token_3N: is filled with
        loss, not weighted, alpha and missing mass of each token. Runs in autocast's dtype; losses
        and the gradient of the weight are accumulated in fp32. `backward` may be called once.
        """
        if output.projection is not None:
            hidden_NH = output.projection.prepare(hidden_NH)
        task = _Task(
            projection=output.projection,
            teacher=teacher,
            tokens_N=tokens_N,
            weights_N=weights_N,
            objective=self.objective,
            chunk=chunk_size(output.weight_VH, teacher, self.chunk),
            wants_gradient=torch.is_grad_enabled(),
            per_token_3N=per_token_3N,
        )
        loss, overlaps, missing = _Projected.apply(  # type: ignore[no-untyped-call]
            task,
            output.bias_V,
            hidden_NH,
            output.weight_VH,
            None if low_rank is None else low_rank.tokens_NR,
            None if low_rank is None else low_rank.weight_VR,
        )
        count = torch.tensor(len(tokens_N), device=hidden_NH.device)
        measured = count if teacher is not None else torch.zeros_like(count)
        partial = teacher is not None and teacher.is_partial
        return LossSums(
            loss=loss,
            tokens=count,
            depth_alpha_D=overlaps[None],
            depth_tokens_D=measured[None],
            missing=missing if partial else None,
        )
