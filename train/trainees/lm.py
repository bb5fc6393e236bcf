"""A draft language model, trained on data or on its target's distributions.

Legend: B rows, T tokens, N valid response tokens, H hidden size, V vocabulary, D draft vocabulary.
"""

from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.hidden_states import body
from draftsmith.core.models import vocabulary_size
from draftsmith.core.state_store import StateStore
from draftsmith.drafts.draft_vocabulary import draft_rows, draft_vocabulary, drafted_rows
from draftsmith.train.batch import IGNORE, Batch, LossSums, forward_options, packing_method
from draftsmith.train.chunked import Output
from draftsmith.train.frozen_target import FrozenTarget
from draftsmith.train.objective import Objective
from draftsmith.train.teacher import LiveTeacher, Teacher, find_projection, teacher_for_draft
from draftsmith.train.trainee import Trainee


class LMTrainee(Trainee):
    """A language model as the draft.

    target: the live teacher; None if the objective needs none or batches bring stored rows.
    packing: whether batches will be packed. states: where those of the target are
    kept.

    With a draft vocabulary, the draft trains on the target's distribution renormalised to it, as
    EAGLE-3 heads do, and `ce` skips tokens outside it. Raise InputError if a model cannot be
    trained this way.
    """

    draft: PreTrainedModel

    def __init__(
        self,
        draft: PreTrainedModel,
        objective: Objective,
        target: PreTrainedModel | None = None,
        packing: bool = False,
        chunk: int | None = None,
        states: StateStore | None = None,
    ) -> None:
        super().__init__(draft, objective, chunk)
        self.ids_D = draft_vocabulary(draft)
        self.projection = replace(find_projection(draft, "draft"), rows_D=self.ids_D)
        self.packing = packing_method(draft, "draft") if packing else None
        self.target = None
        if target is not None:
            self.target = FrozenTarget(target, (-1,), packing, states)

    def count(self, batch: Batch) -> Tensor:
        return (batch.labels_BT != IGNORE).sum()

    def forward(self, batch: Batch) -> LossSums:
        """Sums over the valid tokens of a batch. A live target is preferred to stored rows."""
        labels = batch.labels_BT.reshape(-1)
        rows_N = (labels != IGNORE).nonzero().squeeze(1)
        tokens_N = labels[rows_N]
        teacher = self._teacher(batch, rows_N)
        assert teacher is not None or not self.objective.needs_target, (
            "this objective needs a target or stored rows"
        )
        options = forward_options(batch, self.packing, self.draft.dtype)
        out = body(self.draft)(input_ids=batch.ids_BT, use_cache=False, **options)
        hidden_NH = _at(out.last_hidden_state, rows_N)
        weights_N = None
        if self.ids_D is not None:
            tokens_N, drafted_N = drafted_rows(self.ids_D, tokens_N)
            weights_N = drafted_N.float() if self.objective.reads_tokens else None
        output = Output(self.projection.weight_VH, self.projection.bias_V, self.projection)
        return self.loss.sums(output, hidden_NH, tokens_N, teacher=teacher, weights_N=weights_N)

    def _teacher(self, batch: Batch, rows_N: Tensor) -> Teacher | None:
        if self.training and not self.objective.needs_target:
            # only alpha needs it, which evaluation measures; a teacher would double the step time
            return None
        if self.target is not None:
            states_NH = _at(self.target.read(batch, self.training)[1], rows_N)
            live = LiveTeacher(states_NH, self.target.projection)
            if self.ids_D is not None:
                return replace(live, ids=self.ids_D)
            return teacher_for_draft(
                live, vocabulary_size(self.target.model), vocabulary_size(self.draft)
            )
        if batch.stored is None or self.ids_D is None:
            return batch.stored
        # Index len(ids_D) marks a token outside the draft vocabulary.
        return replace(batch.stored, top_ids_NK=draft_rows(self.ids_D, batch.stored.top_ids_NK))


def _at(states_BTH: Tensor, rows_N: Tensor) -> Tensor:
    return states_BTH.flatten(0, 1).index_select(0, rows_N)
