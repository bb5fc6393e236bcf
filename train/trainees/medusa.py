"""Medusa: heads that guess the tokens two, three, ... places ahead of one feature, each on its own.

Legend: B rows, T tokens, N pairs that count, K heads, H hidden size.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.medusa import MedusaHeads
from train.chunked import projected
from train.data import Batch
from train.features import FeatureCache, freeze
from train.loss_sums import Sums
from train.objective import Objective
from train.teacher import Head, LiveTeacher
from train.trainees.head_training import DECAY, Pairs, add_up, check_objective, count_pairs, pairs_at


class MedusaTrainee(nn.Module):
    """Head k, from 0, weighs step_decay ** k (Medusa-1, arXiv 2401.10774, section 2.2.1).

    From the feature at t it must give the token at t + 2 + k: with `ce` the data's, with other objectives the
    target's law at position t + 1 + k, behind the true tokens between. The feature counts where the token at t + 1
    may be the root of a draft, as in `head_training`. Raises InputError, one line.
    """

    def __init__(
        self,
        draft: MedusaHeads,
        objective: Objective,
        target: PreTrainedModel,
        packing: bool = False,
        cache: FeatureCache | None = None,
        chunk: int | None = None,
        step_decay: float = DECAY,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.objective = check_objective(objective, draft.kind)
        self.chunk, self.decay = chunk, step_decay
        self.target = freeze(target, draft.hidden_layers, packing, cache)

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` is a sum over, the `tokens` of `forward`, told without it."""
        return count_pairs(batch)

    def forward(self, batch: Batch) -> Sums:
        """Sums over the features that count."""
        (features_BTH,), last_BTH = self.target.read(batch)
        parts = []
        for (pairs, hidden_NH), blocks in zip(self.drafts(batch, features_BTH), self.draft, strict=True):
            projection = blocks[-1]  # type: ignore[index]
            parts.append(
                projected(
                    hidden_NH,
                    projection.weight,
                    self.draft.borrowed.lm_head_bias,
                    LiveTeacher(pairs.laws(last_BTH), self.target.head),
                    pairs.laws(batch.labels_BT),
                    None,
                    self.objective,
                    self.chunk,
                    Head(projection, self.draft.borrowed.scale, self.draft.borrowed.softcap),
                )
            )
        return add_up(parts, [self.decay**k for k in range(len(parts))])

    def drafts(self, batch: Batch, features_BTH: Tensor) -> Iterator[tuple[Pairs, Tensor]]:
        """For every head the features that count, and what its projection reads there, `[N, H]`."""
        for k, head in enumerate(self.draft):
            assert isinstance(head, nn.Sequential)
            projection = head[-1]
            assert isinstance(projection, nn.Linear)
            pairs = pairs_at(batch, k + 1)
            states_NH = pairs.states(features_BTH).to(projection.weight.dtype)
            for block in list(head)[:-1]:
                states_NH = block(states_NH)
            yield pairs, states_NH
