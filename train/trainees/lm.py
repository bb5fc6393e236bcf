"""A draft language model, trained on data or on its target's distributions.

Legend: B rows, T tokens, N valid response tokens, M selected ones of them, H hidden size, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.draft_vocabulary import draft_rows, draft_vocabulary, drafted_rows
from drafts.heads.borrowed import OutputProjection
from draftsmith_core.errors import InputError
from draftsmith_core.models import vocabulary_size
from train.batch import IGNORE, Batch, LossSums, forward_options, packing_method
from train.chunked import projected
from train.features import FeatureCache, FrozenTarget, StateMemory
from train.losses import adaspec_weights, draft_losses
from train.objective import Objective, Term
from train.teacher import LiveTeacher, Teacher, find_projection, teacher_for_draft


class LMTrainee(nn.Module):
    """Owns the draft as `.draft`; target and reference draft stay outside its parameters.

    target: the live teacher; None if the objective needs none or batches bring stored rows. reference: the distilled
    draft that AdaSPEC's selection compares with. packing: whether batches will be packed. anchor: the draft before
    training, and the weight of KL(anchor || draft) per valid token. chunk: tokens whose logits are held at once; by
    default what suits the device. cache: hidden states of the target on disk. memory: of all frozen models in memory.

    With a draft vocabulary, the draft trains on the target's distribution renormalised to it, as EAGLE-3 heads do, and
    `ce` skips tokens outside it. Raise InputError if a model cannot be trained this way.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        objective: Objective,
        target: PreTrainedModel | None = None,
        reference: PreTrainedModel | None = None,
        packing: bool = False,
        chunk: int | None = None,
        anchor: tuple[PreTrainedModel, float] | None = None,
        cache: FeatureCache | None = None,
        memory: StateMemory | None = None,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.objective = objective
        self.chunk = chunk
        self.ids_D = draft_vocabulary(draft)
        self.projection = replace(find_projection(draft, "draft"), rows_D=self.ids_D)
        self.packing = packing_method(draft, "draft") if packing else None
        last = partial(FrozenTarget, layers=(-1,), packing=packing, memory=memory)
        self.target = None if target is None else last(target, cache=cache)
        self.reference = None if reference is None else last(reference, name="reference")
        self.anchor = None if anchor is None else last(anchor[0], name="anchor")
        self.anchor_objective = None if anchor is None else Objective("anchor_kl", (Term(anchor[1], "fkl"),))
        self.size = vocabulary_size(draft)
        assert (reference is None) == (objective.keep is None), "a reference draft comes with adaspec, and only there"
        if reference is not None and (self.ids_D is not None or vocabulary_size(reference) != self.size):
            raise InputError("reference: its vocabulary is not the draft's; @adaspec compares their losses")

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` will be a sum over, a scalar, without the forward."""
        return (batch.labels_BT != IGNORE).sum()

    def forward(self, batch: Batch) -> LossSums:
        """Sums over the valid tokens of a batch. A live target is preferred to stored rows."""
        labels = batch.labels_BT.reshape(-1)
        rows_N = (labels != IGNORE).nonzero().squeeze(1)
        tokens_N = labels[rows_N]
        teacher = self._teacher(batch, rows_N)
        assert teacher is not None or not self.objective.needs_target, "this objective needs a target or stored rows"
        options = forward_options(batch, self.packing, self.draft.dtype)
        # Inlined to keep the stack from the command to the draft's forward short.
        out = self.draft.base_model(input_ids=batch.ids_BT, use_cache=False, **options)
        hidden_NH = _at(out.last_hidden_state, rows_N)
        weights_N = None
        if self.ids_D is not None:
            tokens_N, drafted_N = drafted_rows(self.ids_D, tokens_N)
            weights_N = drafted_N.float() if self.objective.reads_tokens else None
        valid = _ValidTokens(tokens_N, hidden_NH, teacher, weights_N)
        if self.reference is not None or self.objective.depth is not None:
            sums = self._selected(valid, batch, rows_N)
        else:
            sums = self._projected(valid, self.objective)
        if self.anchor is None or self.anchor_objective is None:
            return sums
        before = replace(self.anchor.projection, rows_D=self.ids_D)
        base = LiveTeacher(self._states(self.anchor, batch, rows_N), before)
        pull = self._projected(replace(valid, teacher=base, weights_N=None), self.anchor_objective, alpha=False)
        return sums._replace(loss=sums.loss + pull.loss)

    def _states(self, frozen: FrozenTarget, batch: Batch, rows_N: Tensor) -> Tensor:
        return _at(frozen.read(batch, self.training)[1], rows_N)

    def _projected(self, valid: "_ValidTokens", objective: Objective, alpha: bool = True) -> LossSums:
        projection, chunk = self.projection, self.chunk
        given = valid.teacher, valid.tokens_N, valid.weights_N, objective, chunk, projection, alpha
        return projected(valid.hidden_NH, projection.weight_VH, projection.bias_V, *given)

    def _selected(self, valid: "_ValidTokens", batch: Batch, rows_N: Tensor) -> LossSums:
        """Sums in which tokens have weights that their losses decide (AdaSPEC, `@e2e`); alpha is over all tokens."""

        @torch.no_grad()
        def measures(hidden_NH: Tensor, projection: OutputProjection) -> tuple[LossSums, Tensor]:
            wide = torch.promote_types(hidden_NH.dtype, torch.float32)
            per_token_3N = torch.zeros(3, len(hidden_NH), dtype=wide, device=hidden_NH.device)
            given = valid.teacher, valid.tokens_N, None, self.objective, self.chunk, projection
            weight, bias = projection.weight_VH, projection.bias_V
            return projected(hidden_NH, weight, bias, *given, per_token_3N=per_token_3N), per_token_3N[0]

        sums, losses_N = measures(valid.hidden_NH, self.projection)
        # Numbers of the sequences, ascending.
        rows, width = batch.ids_BT.shape
        sequence_BT = torch.arange(rows, device=rows_N.device)[:, None].expand(rows, width)
        if batch.documents_BT is not None:
            sequence_BT = sequence_BT * width + batch.documents_BT.clamp_min(0)
        sequence_N, constant = sequence_BT.reshape(-1)[rows_N], losses_N.new_zeros(())
        if self.reference is not None:
            assert self.objective.keep is not None
            _, reference_N = measures(self._states(self.reference, batch, rows_N), self.reference.projection)
            weights_N = adaspec_weights(losses_N - reference_N, sequence_N, self.objective.keep)
        else:
            # The gradient is that of each token's `tvd`, weighted by the acceptance of the neighbouring tokens.
            assert self.objective.depth is not None
            whole_N, weights_N = draft_losses(1 - losses_N, sequence_N, self.objective.depth)
            constant = whole_N.sum() - (weights_N * losses_N).sum()
        kept_M = weights_N.nonzero().squeeze(1)
        teacher = None if valid.teacher is None else valid.teacher.select(kept_M)
        selected = _ValidTokens(valid.tokens_N[kept_M], valid.hidden_NH[kept_M], teacher, weights_N[kept_M])
        return sums._replace(loss=self._projected(selected, self.objective, alpha=False).loss + constant)

    def _teacher(self, batch: Batch, rows_N: Tensor) -> Teacher | None:
        if self.training and not self.objective.needs_target:
            return None  # only alpha needs it, which evaluation measures; a teacher would double the step time
        if self.target is not None:
            live = LiveTeacher(self._states(self.target, batch, rows_N), self.target.projection)
            if self.ids_D is not None:
                return replace(live, ids=self.ids_D)
            return teacher_for_draft(live, vocabulary_size(self.target.model), self.size)
        if batch.stored is None or self.ids_D is None:
            return batch.stored
        # Index len(ids_D) marks a token outside the draft vocabulary.
        return replace(batch.stored, top_ids_NK=draft_rows(self.ids_D, batch.stored.top_ids_NK))


@dataclass(frozen=True, eq=False)
class _ValidTokens:
    """Valid tokens of a batch: the draft's states there, the teacher, the weights of their losses (None for 1)."""

    tokens_N: Tensor
    hidden_NH: Tensor
    teacher: Teacher | None
    weights_N: Tensor | None


def _at(states_BTH: Tensor, rows_N: Tensor) -> Tensor:
    return states_BTH.flatten(0, 1).index_select(0, rows_N)
