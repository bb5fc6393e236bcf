"""Hydra: like Medusa, but a head also reads the tokens between the feature and its own.

Legend: B rows, T tokens, N pairs that count, d a head's number from 0, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.hydra import HydraHeads
from train.chunked import projected
from train.data import Batch
from train.features import FeatureCache, freeze
from train.loss_sums import Sums
from train.objective import Objective
from train.teacher import Head, LiveTeacher
from train.trainees.head_training import DECAY, Pairs, add_up, check_objective, count_pairs, pairs_at


class HydraTrainee(nn.Module):
    """Head d, from 0, weighs step_decay ** d (Hydra, arXiv 2402.05109, section 3, with Medusa's weights).

    From the feature at t and the true tokens at t + 1 .. t + 1 + d it must give the token at t + 2 + d. The objective
    is the paper's teacher cross-entropy as `fkl`, which is that less the target's own entropy, or any other. The
    projection is the target's and stays as it is. Raises InputError, one line.
    """

    def __init__(
        self,
        draft: HydraHeads,
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
        self.head = Head(draft.borrowed.lm_head, draft.borrowed.scale, draft.borrowed.softcap)

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` is a sum over, the `tokens` of `forward`, told without it."""
        return count_pairs(batch)

    def forward(self, batch: Batch) -> Sums:
        """Sums over the features that count."""
        (features_BTH,), last_BTH = self.target.read(batch)
        parts = [
            projected(
                hidden_NH,
                self.head.weight_VH.detach(),
                self.draft.borrowed.lm_head_bias,
                LiveTeacher(pairs.laws(last_BTH), self.target.head),
                pairs.laws(batch.labels_BT),
                None,
                self.objective,
                self.chunk,
                self.head,
            )
            for pairs, hidden_NH in self.drafts(batch, features_BTH)
        ]
        return add_up(parts, [self.decay**d for d in range(len(parts))])

    def drafts(self, batch: Batch, features_BTH: Tensor) -> Iterator[tuple[Pairs, Tensor]]:
        """For every head the features that count, and what the projection reads there, `[N, H]`."""
        dtype = next(self.draft.parameters()).dtype
        for d, head in enumerate(self.draft.heads):
            pairs = pairs_at(batch, d + 1)
            between_N = pairs.at_N[:, None] + torch.arange(1, d + 2, device=pairs.at_N.device)
            tokens_Nd = batch.ids_BT[pairs.row_N[:, None], between_N]
            embedded_NX = self.draft.borrowed.embed(tokens_Nd, dtype).flatten(-2)
            yield pairs, head(torch.cat([pairs.states(features_BTH).to(dtype), embedded_NX], dim=-1))
