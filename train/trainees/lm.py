"""A draft that is a language model of its own, fitted to data or to its target's laws.

Legend: B rows, T tokens, N valid response tokens, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith_core.errors import InputError
from draftsmith_core.models import vocabulary_size
from train.chunked import projected, token_losses, token_measures
from train.data import IGNORE, Batch
from train.loss_sums import Sums
from train.losses import adaspec_weights
from train.objective import Objective
from train.packing import attention, packing_way
from train.teacher import Head, LiveTeacher, StoredTeacher, Teacher, find_head, fitted, is_partial


@dataclass(frozen=True, eq=False)
class _Frozen:
    """A model that is read and never trained, in a plain object so that the trainee does not register its weights."""

    model: PreTrainedModel
    head: Head
    packing: str | None

    @torch.no_grad()
    def hidden(self, batch: Batch, rows_N: Tensor) -> Tensor:
        return _hidden(self.model, batch, rows_N, self.packing)


class LMTrainee(nn.Module):
    """Owns the draft as `.draft`; target and reference draft stay outside its parameters.

    target: the live teacher; None with an objective that needs none, or when the batches bring stored rows.
    reference: the distilled draft that AdaSPEC's selection compares with. packing: whether batches will be packed.
    chunk: tokens whose logits are held at once, by default what suits the device. The target's vocabulary may be padded
    to another size than the draft's; what it has no token for is then in `missing`. Raises InputError, one line, when a
    model cannot be trained this way.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        objective: Objective,
        target: PreTrainedModel | None = None,
        reference: PreTrainedModel | None = None,
        packing: bool = False,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.objective = objective
        self.chunk = chunk
        self.head = find_head(draft, "draft")
        self.packing = packing_way(draft, "draft") if packing else None
        self.target = _freeze(target, "target", packing)
        self.reference = _freeze(reference, "reference", packing)
        self.size = vocabulary_size(draft)
        assert (reference is None) != objective.needs_reference, "a reference draft comes with adaspec, and only there"
        if reference is not None and vocabulary_size(reference) != self.size:
            raise InputError(
                f"reference: its vocabulary has {vocabulary_size(reference)} tokens and the draft's has {self.size}; "
                f"adaspec compares their losses, use a reference of the draft's size"
            )

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` is a sum over, the `tokens` of `forward`, told without it."""
        return (batch.labels_BT != IGNORE).sum()

    def forward(self, batch: Batch) -> Sums:
        """Sums over the valid tokens of a batch. A live target is preferred to stored rows."""
        labels = batch.labels_BT.reshape(-1)
        rows_N = (labels != IGNORE).nonzero().squeeze(1)
        tokens_N = labels[rows_N]
        teacher = self._teacher(batch, rows_N)
        assert teacher is not None or not self.objective.needs_target, "this objective needs a target or stored rows"
        hidden_NH = _hidden(self.draft, batch, rows_N, self.packing)
        if self.reference is None:
            weight_VH, bias_V = self.head.weight_VH, self.head.bias_V
            return projected(
                hidden_NH, weight_VH, bias_V, teacher, tokens_N, None, self.objective, self.chunk, self.head
            )
        return self._selected(batch, hidden_NH, teacher, rows_N, tokens_N)

    def _selected(
        self, batch: Batch, hidden_NH: Tensor, teacher: Teacher | None, rows_N: Tensor, tokens_N: Tensor
    ) -> Sums:
        """The same on the tokens that AdaSPEC keeps; alpha is over all valid tokens."""
        assert self.reference is not None
        losses_N, alpha_N, missing_N = token_measures(
            hidden_NH, self.head, teacher, tokens_N, self.objective, self.chunk
        )
        there_NH = self.reference.hidden(batch, rows_N)
        reference_N, _ = token_losses(there_NH, self.reference.head, teacher, tokens_N, self.objective, self.chunk)
        weights_N = adaspec_weights(losses_N - reference_N, _sequences(batch)[rows_N], _keep(self.objective))
        kept_M = weights_N.nonzero().squeeze(1)
        sums = projected(
            hidden_NH[kept_M],
            self.head.weight_VH,
            self.head.bias_V,
            None if teacher is None else teacher.select(kept_M),
            tokens_N[kept_M],
            weights_N[kept_M],
            self.objective,
            self.chunk,
            self.head,
            alpha=False,
        )
        count = torch.tensor(len(tokens_N), device=hidden_NH.device)
        alpha = alpha_N.sum()
        measured = count if teacher is not None else torch.zeros_like(count)
        missing = missing_N.sum() if is_partial(teacher) else None
        return Sums(sums.loss, count, alpha, alpha[None], measured[None], missing)

    def _teacher(self, batch: Batch, rows_N: Tensor) -> Teacher | None:
        if self.target is not None:
            live = LiveTeacher(self.target.hidden(batch, rows_N), self.target.head)
            return fitted(live, vocabulary_size(self.target.model), self.size)
        if batch.stored is not None:
            return StoredTeacher(batch.stored.top_ids_NK, batch.stored.top_logprobs_NK, batch.stored.tail_N)
        return None


def _keep(objective: Objective) -> float:
    assert objective.keep is not None
    return objective.keep


def _freeze(model: PreTrainedModel | None, name: str, packing: bool) -> _Frozen | None:
    if model is None:
        return None
    model.eval()
    return _Frozen(model, find_head(model, name), packing_way(model, name) if packing else None)


def _hidden(model: PreTrainedModel, batch: Batch, rows_N: Tensor, packing: str | None) -> Tensor:
    """Last hidden states `[N, H]` at these places of the flattened batch."""
    options = {}
    if batch.positions_BT is not None and batch.documents_BT is not None:
        assert packing is not None, "this trainee was not built for packed batches"
        options = attention(packing, batch.positions_BT, batch.documents_BT, model.dtype)
    states_BTH: Tensor = model.base_model(input_ids=batch.ids_BT, use_cache=False, **options).last_hidden_state
    return states_BTH.flatten(0, 1).index_select(0, rows_N)


def _sequences(batch: Batch) -> Tensor:
    """The sequence `[B * T]` of each place of a flattened batch, ascending."""
    rows, width = batch.ids_BT.shape
    row_B1 = torch.arange(rows, device=batch.ids_BT.device)[:, None]
    if batch.documents_BT is None:
        return row_B1.expand(rows, width).reshape(-1)
    return (row_B1 * width + batch.documents_BT.clamp_min(0)).reshape(-1)
