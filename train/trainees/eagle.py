"""EAGLE-1: a head that predicts the target's next feature, and through the target's projection the token after it.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, H hidden size, D depths.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.eagle import EagleHead
from train.chunked import projected
from train.data import Batch
from train.features import FeatureCache, freeze
from train.loss_sums import Sums
from train.objective import Objective
from train.teacher import Head, LiveTeacher
from train.trainees.head_training import Pairs, add_up, check_objective, count_pairs, pairs_at, unroll

FEATURE_WEIGHT = 1.0
TOKEN_WEIGHT = 0.1


class EagleTrainee(nn.Module):
    """Feature regression (smooth L1, mean over H) plus 0.1 times the objective (arXiv 2401.15077, section 4.2).

    Pair t, the feature at t with the token at t + 1, must give the feature at t + 1, whose projection is the law of
    the token at t + 2; the pairs that count are those of `head_training`. The objective `fkl` is the paper's
    soft cross-entropy less the target's own entropy: another value, the same gradient. Embedding and output projection
    are the target's and stay as they are.

    noise: each value of a feature that goes in is moved by up to this much either way while training, drawn from
    torch's own generator; 0 for none. depths: how deep acceptance is measured in evaluation, on the head's own
    features behind true tokens; in training it is measured at depth 1 only. Raises InputError, one line.
    """

    def __init__(
        self,
        draft: EagleHead,
        objective: Objective,
        target: PreTrainedModel,
        packing: bool = False,
        cache: FeatureCache | None = None,
        chunk: int | None = None,
        noise: float = 0.1,
        depths: int = 5,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.objective = check_objective(objective, draft.kind)
        self.chunk, self.noise, self.depths = chunk, noise, depths
        self.target = freeze(target, draft.hidden_layers, packing, cache)
        self.head = Head(draft.borrowed.lm_head, draft.borrowed.scale, draft.borrowed.softcap)

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` is a sum over, the `tokens` of `forward`, told without it."""
        return count_pairs(batch)

    def forward(self, batch: Batch) -> Sums:
        """Sums over the pairs that count."""
        (features_BTH,), last_BTH = self.target.read(batch)
        parts: list[Sums] = []
        regression = torch.zeros(())
        bias = self.draft.borrowed.lm_head_bias
        for pairs, hidden_NH in self.drafts(batch, features_BTH):
            sums = projected(
                hidden_NH,
                self.head.weight_VH.detach(),
                bias,
                LiveTeacher(pairs.laws(last_BTH), self.target.head),
                pairs.laws(batch.labels_BT),
                None,
                self.objective,
                self.chunk,
                self.head,
            )
            if not parts:
                wanted_NH = pairs.laws(features_BTH)
                apart_NH = F.smooth_l1_loss(hidden_NH.float(), wanted_NH.float(), reduction="none")
                regression = apart_NH.mean(-1).sum()
            parts.append(sums)
        added = add_up(parts, [TOKEN_WEIGHT] + [0.0] * (len(parts) - 1))
        unmeasured = self.depths - len(parts)
        return Sums(
            loss=FEATURE_WEIGHT * regression + added.loss,
            tokens=added.tokens,
            alpha=added.alpha,
            depth_alpha_D=F.pad(added.depth_alpha_D, (0, unmeasured)),
            depth_tokens_D=F.pad(added.depth_tokens_D, (0, unmeasured)),
        )

    def drafts(self, batch: Batch, features_BTH: Tensor) -> Iterator[tuple[Pairs, Tensor]]:
        """For every depth the pairs that count and the features `[N, H]` that the head predicts there."""
        inputs_BWH = features_BTH[:, :-1].to(self.draft.fc.weight.dtype)
        if self.training and self.noise:
            inputs_BWH = inputs_BWH + (torch.rand_like(inputs_BWH) * 2 - 1) * self.noise
        depths = 1 if self.training else self.depths
        for depth, states_BWH in enumerate(unroll(self.draft.states, batch, inputs_BWH, depths), start=1):
            pairs = pairs_at(batch, depth)
            yield pairs, pairs.states(states_BWH)
