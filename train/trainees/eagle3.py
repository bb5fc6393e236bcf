"""EAGLE-3: a head on three layers of the target, trained on its own features as it will be used.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, H hidden size, D draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from drafts.draft_vocabulary import draft_rows
from drafts.heads.borrowed import OutputProjection
from drafts.heads.eagle3 import Eagle3Head
from train.batch import Batch
from train.teacher import LiveTeacher, ReducedTeacher, Teacher
from train.trainees.head import HeadTrainee, Pairs, pairs_at, unroll


class Eagle3Trainee(HeadTrainee):
    """The training-time test (arXiv 2503.01840, section 3.2): `test_steps` depths on the head's own features.

    The objective compares the distributions on the draft vocabulary, the target's renormalised there; `fkl` is the
    paper's soft cross-entropy less the target's own entropy: another value, the same gradient. An objective that reads
    the tokens of the data (`ce`) leaves out those that the draft vocabulary lacks. Acceptance is against the target's
    whole distribution, and `missing` is what of it lies outside the draft vocabulary.
    """

    draft: Eagle3Head

    def __init__(self, *arguments: Any, test_steps: int = 7, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.test_steps = test_steps
        self.projection = OutputProjection(
            self.draft.lm_head, self.draft.borrowed.projection.scale, self.draft.borrowed.projection.softcap
        )

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[tuple[Pairs, Tensor]]:
        """For every depth the pairs that count and the normed features `[N, H]` that the projection reads there."""
        features_BWH = self.draft.fuse([state_BTH[:, :-1] for state_BTH in states])
        for depth, states_BWH in enumerate(unroll(self.draft.states, batch, features_BWH, self.test_steps), start=1):
            pairs = pairs_at(batch, depth)
            yield pairs, self.draft.normed(pairs.of_pairs(states_BWH))

    def projection_at(self, depth: int) -> tuple[OutputProjection, Tensor, Tensor | None]:
        """The head's own, at every depth."""
        return self.projection, self.draft.lm_head.weight, None

    def teaching(self, teacher: LiveTeacher, tokens_N: Tensor) -> tuple[Teacher, Tensor, Tensor | None]:
        """The teacher and the tokens on the draft vocabulary; a token that it lacks has weight 0 where it is read."""
        if not self.draft.reduced:
            return teacher, tokens_N, None
        ids_D = self.draft.target_ids_D
        rows_N = draft_rows(ids_D, tokens_N)
        weights_N = (rows_N < len(ids_D)).float() if self.objective.reads_tokens else None
        return ReducedTeacher(teacher, ids_D), rows_N.clamp_max(len(ids_D) - 1), weights_N
