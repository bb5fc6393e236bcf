"""Medusa and Hydra: heads that guess the tokens two, three, ... places ahead of one feature.

Legend: B rows, T tokens, N pairs that count, K heads, d a head's number from 0, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafts.heads.borrowed import OutputProjection
from drafts.heads.medusa import HydraHeads, MedusaHeads
from train.batch import Batch
from train.trainees.head import HeadTrainee, Pairs, pairs_at


class MedusaTrainee(HeadTrainee):
    """Head d guesses on its own; it weighs step_decay ** d (Medusa-1, arXiv 2401.10774, section 2.2.1).

    From the feature at t it must give the token at t + 2 + d: with `ce` the data's, with other objectives the target's
    distribution at position t + 1 + d, after the true tokens between. The feature counts where the token at t + 1 may
    be the root of a draft, as in `train.trainees.head`. Every head trains an output projection of its own.
    """

    draft: MedusaHeads

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.one_projection = False

    def _layers(self, d: int) -> nn.Sequential:
        head = self.draft[d]
        assert isinstance(head, nn.Sequential)
        return head

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[tuple[Pairs, Tensor]]:
        """For every head the features that count, and what its projection reads there, `[N, H]`."""
        for d in range(len(self.draft)):
            pairs, head = pairs_at(batch, d + 1), self._layers(d)
            yield pairs, head[:-1](pairs.of_pairs(states[0]).to(next(head.parameters()).dtype))

    def projection_at(self, depth: int) -> tuple[OutputProjection, Tensor, Tensor | None]:
        """The head's own weight; scale, soft cap and bias are the target's."""
        linear = self._layers(depth)[-1]
        assert isinstance(linear, nn.Linear)
        return replace(self.draft.borrowed.projection, module=linear), linear.weight, self.draft.borrowed.bias_V


class HydraTrainee(HeadTrainee):
    """Head d also reads the tokens between the feature and its own; it weighs step_decay ** d (arXiv 2402.05109, 3).

    From the feature at t and the true tokens at t + 1 .. t + 1 + d it must give the token at t + 2 + d. The paper's
    teacher cross-entropy is `fkl` plus the target's own entropy: another value, the same gradient. The projection is
    the target's and is not trained, unless the heads came with projections of their own.
    """

    draft: HydraHeads

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.one_projection = not self.draft.config.own_projection

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[tuple[Pairs, Tensor]]:
        """For every head the features that count, and what the projection reads there, `[N, H]`."""
        dtype = next(self.draft.parameters()).dtype
        for d, head in enumerate(self.draft.heads):
            pairs = pairs_at(batch, d + 1)
            between_N = pairs.at_N[:, None] + torch.arange(1, d + 2, device=pairs.at_N.device)
            tokens_Nd = batch.ids_BT[pairs.row_N[:, None], between_N]
            embedded_NX = self.draft.borrowed.embed(tokens_Nd, dtype).flatten(-2)
            yield pairs, head(torch.cat([pairs.of_pairs(states[0]).to(dtype), embedded_NX], dim=-1))

    def projection_at(self, depth: int) -> tuple[OutputProjection, Tensor, Tensor | None]:
        """The target's, or the head's own in checkpoints of Hydra's authors."""
        if not self.draft.config.own_projection:
            return super().projection_at(depth)
        linear = self.draft.projections[depth]
        assert isinstance(linear, nn.Linear)
        return replace(self.draft.borrowed.projection, module=linear), linear.weight, linear.bias
