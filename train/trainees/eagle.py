"""EAGLE-1, a head that predicts the target's next feature; EAGLE-3, a head on three of its layers.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, H hidden size, D depths.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafts.heads.borrowed import OutputProjection
from drafts.heads.eagle import EagleHead
from drafts.heads.eagle3 import Eagle3Head
from train.batch import Batch, LossSums
from train.trainees.head import HeadTrainee, Pairs, join, pairs_at, unroll

# Of the objective, beside the regression of features.
TOKEN_WEIGHT = 0.1


class EagleTrainee(HeadTrainee):
    """Feature regression (smooth L1, mean over H) plus 0.1 times the objective (arXiv 2401.15077, section 4.2).

    Pair t, the feature at t with the token at t + 1, must give the feature at t + 1, whose projection is the
    distribution of the token at t + 2. The objective `fkl` is the paper's soft cross-entropy less the target's own
    entropy: another value, the same gradient.

    noise: while training, each value of an input feature is shifted by a uniform draw from [-noise, noise], from
    torch's global generator. depths: how deep acceptance is measured in evaluation, on the head's own features after
    true tokens; in training it is measured at depth 1 only.
    """

    draft: EagleHead

    def __init__(self, *arguments: Any, noise: float = 0.1, depths: int = 5, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise, self.depths = noise, depths

    def forward(self, batch: Batch) -> LossSums:
        """Sums over the pairs that count."""
        (features_BTH,), last_BTH = self.target.read(batch)
        drafts = [(depth, *part) for depth, part in enumerate(self.drafts(batch, [features_BTH]))]
        _, pairs, hidden_NH = drafts[0]
        apart_NH = F.smooth_l1_loss(hidden_NH.float(), pairs.of_targets(features_BTH).float(), reduction="none")
        joined = join(drafts, batch)
        weights_N = TOKEN_WEIGHT * (joined.depth_N == 0)
        sums, _ = self.sums(joined, batch, last_BTH, weights_N, self.depths)
        return sums._replace(loss=apart_NH.mean(-1).sum() + sums.loss)

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[tuple[Pairs, Tensor]]:
        """For every depth the pairs that count and the features `[N, H]` that the head predicts there."""
        inputs_BWH = states[0][:, :-1].to(self.draft.fc.weight.dtype)
        if self.training and self.noise:
            inputs_BWH = inputs_BWH + (torch.rand_like(inputs_BWH) * 2 - 1) * self.noise
        depths = 1 if self.training else self.depths
        for depth, states_BWH in enumerate(unroll(self.draft.states, batch, inputs_BWH, depths), start=1):
            pairs = pairs_at(batch, depth)
            yield pairs, pairs.of_pairs(states_BWH)


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
