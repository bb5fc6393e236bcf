"""The trainees of EAGLE-1, EAGLE-3, MTP, Medusa and Hydra, and what they share with block drafters:
which drafts count, how a head runs on its own features, the sums over depths.

A pair t is the input of an EAGLE head: the target's feature at position t and the token at t + 1.

    pair t   ->   depth d   ->   drafts token t + 1 + d   <-   target's logits at t + d

Pair t counts at depth d if the tokens at t + 2 and t + 1 + d are response tokens of one document:
in decoding, too, drafts start from a token of the response or the last of the prompt.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, H hidden size, D depths; in
`ids_D`, D tokens of the draft vocabulary; d the number of a Medusa or Hydra head, from 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.drafts.draft_vocabulary import DraftVocabulary, drafted_rows
from draftsmith.drafts.heads import Head
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.mtp import MtpHead
from draftsmith.train.batch import IGNORE, Batch, LossSums
from draftsmith.train.chunked import LowRank, Output
from draftsmith.train.features import FeatureCache, FrozenTarget
from draftsmith.train.objective import Objective
from draftsmith.train.teacher import LiveTeacher
from draftsmith.train.trainee import Trainee

# Weight of the loss of each further depth, as a share of the one before (Medusa, section 2.2.1;
# EAGLE-3's code).
STEP_DECAY = 0.8
# Of the objective of EAGLE-1, beside the regression of features.
TOKEN_WEIGHT = 0.1


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that count at a depth: their row and position, and the position of the target's
    distribution.
    """

    row_N: Tensor
    at_N: Tensor
    target_at_N: Tensor

    def at(self, index_N: Tensor) -> "Pairs":
        """The pairs at an index or mask."""
        return Pairs(self.row_N[index_N], self.at_N[index_N], self.target_at_N[index_N])

    def of_pairs(self, values_BT: Tensor) -> Tensor:
        """`[N, ...]` at the pairs."""
        return values_BT[self.row_N, self.at_N]

    def of_targets(self, values_BT: Tensor) -> Tensor:
        """`[N, ...]` at the positions of the target's distributions."""
        return values_BT[self.row_N, self.target_at_N]

    def pair_index_N(self, batch: Batch) -> Tensor:
        """Where the pairs are in the flattened batch."""
        return self.row_N * batch.ids_BT.shape[1] + self.at_N

    def target_index_N(self, batch: Batch) -> Tensor:
        """Where the target's distributions are in the flattened batch."""
        return self.row_N * batch.ids_BT.shape[1] + self.target_at_N


# What is drafted at one depth: the pairs that count, and `[N, H]` of each.
Part = tuple[Pairs, Tensor]


def pairs_at(batch: Batch, depth: int) -> Pairs:
    """The pairs that count at this depth, from 1."""
    valid_BT = batch.labels_BT != IGNORE
    counts_BW = valid_BT[:, 1:].clone()
    later_BW = torch.zeros_like(counts_BW)
    width = counts_BW.shape[1] + 1 - depth
    if width > 0:
        later_BW[:, :width] = valid_BT[:, depth:]
    counts_BW &= later_BW
    if batch.documents_BT is not None and batch.positions_BT is not None:
        # The pair before a document's first position belongs to the document before it.
        counts_BW &= batch.positions_BT[:, 1:] > 0
        if width > 0:
            counts_BW[:, :width] &= (
                batch.documents_BT[:, depth:] == batch.documents_BT[:, 1 : 1 + width]
            )
    row_N, at_N = counts_BW.nonzero(as_tuple=True)
    return Pairs(row_N, at_N, at_N + depth)


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts of several depths; those of one target distribution follow each other.

    depth_N: from 0. first: the lowest depth, whose output projection is that of all.
    """

    pairs: Pairs
    hidden_NH: Tensor
    depth_N: Tensor
    first: int


def join(parts: Sequence[Part], batch: Batch, first: int = 0) -> Drafts:
    """Sort the drafts of several depths, from `first`, by the target's distribution."""
    by_depth = [pairs for pairs, _ in parts]
    depths = [torch.full_like(pairs.row_N, d) for d, pairs in enumerate(by_depth, first)]
    row_N = torch.cat([pairs.row_N for pairs in by_depth])
    at_N = torch.cat([pairs.at_N for pairs in by_depth])
    target_at_N = torch.cat([pairs.target_at_N for pairs in by_depth])
    pairs = Pairs(row_N, at_N, target_at_N)
    hidden_NH = torch.cat([hidden_NH for _, hidden_NH in parts])
    order_N = pairs.target_index_N(batch).argsort(stable=True)
    return Drafts(
        pairs=pairs.at(order_N),
        hidden_NH=hidden_NH[order_N],
        depth_N=torch.cat(depths)[order_N],
        first=first,
    )


def total(groups: Sequence[LossSums]) -> LossSums:
    """The sums of several groups of depths as one."""
    fields = zip(*groups, strict=True)
    return LossSums._make(
        None if parts[0] is None else torch.stack(parts).sum(0) for parts in fields
    )


class HeadSums(NamedTuple):
    """The sums of a batch, and alpha of each draft."""

    sums: LossSums
    alpha_N: Tensor


class HeadTrainee(Trainee):
    """Base of the head trainees: sums the objective over the depths of a head.

    A kind of head defines `drafts`, and overrides `output_at` or `forward` where it differs.
    packing: whether batches will be packed. cache: of the target's states. step_decay: weight of a
    depth relative to the depth before.
    """

    # Whether all depths share an output projection, and with it the passes over the target's
    # distributions.
    one_projection = True
    draft: Head
    target: FrozenTarget

    def __init__(
        self,
        draft: Head,
        objective: Objective,
        target: PreTrainedModel,
        packing: bool = False,
        cache: FeatureCache | None = None,
        chunk: int | None = None,
        step_decay: float = STEP_DECAY,
    ) -> None:
        super().__init__(draft, objective, chunk)
        self.step_decay = step_decay
        self.target = FrozenTarget(target, draft.hidden_layers, packing, cache)

    def count(self, batch: Batch) -> Tensor:
        """Count the pairs at depth 1, by which the loss is divided, without a forward."""
        return torch.tensor(len(pairs_at(batch, 1).row_N), device=batch.ids_BT.device)

    def forward(self, batch: Batch) -> LossSums:
        states, last_BTH = self.target.read(batch)
        parts = list(self.drafts(batch, states))
        if self.one_projection:
            groups = [join(parts, batch)]
        else:
            groups = [join([part], batch, depth) for depth, part in enumerate(parts)]
        sums = []
        for drafts in groups:
            weights_N = self.step_decay**drafts.depth_N
            sums.append(self.sums(drafts, batch, last_BTH, weights_N, depths=len(parts)).sums)
        return total(sums)

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Part]:
        """Yield, for every depth, the pairs that count and what the output projection reads there,
        `[N, H]`.

        states: of the target, `[B, T, H]` each, at the head's `hidden_layers`.
        """
        raise NotImplementedError

    def output_at(self, depth: int) -> Output:
        """How logits are made at a depth, from 0: here by the target's projection, not trained."""
        borrowed = self.draft.borrowed
        projection = borrowed.projection
        return Output(projection.weight_VH.detach(), borrowed.bias_V, projection)

    def sums(
        self,
        drafts: Drafts,
        batch: Batch,
        last_BTH: Tensor,
        weights_N: Tensor,
        *,
        depths: int,
        low_rank: LowRank | None = None,
    ) -> HeadSums:
        """The objective with these weights, and acceptance. low_rank: as in `TokenLoss.sums`."""
        pairs = drafts.pairs
        places, row_N = pairs.target_index_N(batch).unique_consecutive(return_inverse=True)
        last_NH = last_BTH.flatten(0, 1)[places]
        teacher = LiveTeacher(last_NH, self.target.projection, row_N=row_N)
        tokens_N = pairs.of_targets(batch.labels_BT)
        if isinstance(self.draft, DraftVocabulary) and self.draft.reduced:
            teacher = replace(teacher, ids=self.draft.target_ids_D)
            tokens_N, drafted_N = drafted_rows(self.draft.target_ids_D, tokens_N)
            if self.objective.reads_tokens:
                # Leave out tokens that the draft lacks.
                weights_N = weights_N * drafted_N
        wide = torch.promote_types(drafts.hidden_NH.dtype, torch.float32)
        per_token_3N = torch.zeros(3, len(tokens_N), dtype=wide, device=tokens_N.device)
        sums = self.loss.sums(
            self.output_at(drafts.first),
            drafts.hidden_NH,
            tokens_N,
            teacher=teacher,
            weights_N=weights_N,
            low_rank=low_rank,
            per_token_3N=per_token_3N,
        )
        _, alpha_N, missing_N = per_token_3N
        of_depth_ND = drafts.depth_N[:, None] == torch.arange(depths, device=tokens_N.device)
        tokens_D = of_depth_ND.sum(0)
        alpha_D = (alpha_N[:, None] * of_depth_ND).sum(0)
        missing = None if sums.missing is None else missing_N[of_depth_ND[:, 0]].sum()
        of_depths = LossSums(
            loss=sums.loss,
            tokens=tokens_D[0],
            depth_alpha_D=alpha_D,
            depth_tokens_D=tokens_D,
            missing=missing,
        )
        return HeadSums(of_depths, alpha_N)


class _UnrolledTrainee(HeadTrainee):
    """A head that is trained at `test_steps` depths, each but the first on its own features."""

    draft: EagleHead | Eagle3Head | MtpHead
    usual_steps: ClassVar[int]

    def __init__(self, *arguments: Any, test_steps: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.test_steps = test_steps or self.usual_steps

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Part]:
        features_BWH = self.draft.fuse([state_BTH[:, :-1] for state_BTH in states])
        return self.unrolled(batch, features_BWH, self.test_steps)

    def unrolled(self, batch: Batch, features_BWH: Tensor, depths: int) -> Iterator[Part]:
        """Yield `drafts`, from the features of depth 1."""
        positions_BW = documents_BW = None
        if batch.documents_BT is not None and batch.positions_BT is not None:
            places_BW = batch.positions_BT[:, 1:]
            positions_BW = (places_BW - 1).clamp_min(0)
            # Pairs that straddle two packed documents attend only to each other and carry no loss.
            documents_BW = batch.documents_BT[:, 1:].masked_fill(places_BW == 0, -1)
        unrolled = self.draft.unroll(
            batch.ids_BT[:, 1:], features_BWH, depths, positions_BW, documents_BW
        )
        for depth, states_BWH in enumerate(unrolled, 1):
            pairs = pairs_at(batch, depth)
            yield pairs, self.draft.normed(pairs.of_pairs(states_BWH))


class EagleTrainee(_UnrolledTrainee):
    """Feature regression (smooth L1, mean over H) plus 0.1 times the objective (arXiv 2401.15077,
    section 4.2).

    Pair t, the feature at t with the token at t + 1, must give the feature at t + 1, whose
    projection is the distribution of the token at t + 2. The objective `fkl` is the paper's soft
    cross-entropy less the target's own entropy: another value, the same gradient.

    noise: while training, each value of an input feature is shifted by a uniform draw from [-noise,
    noise], from torch's global generator. test_steps: above 1 as in HASS (arXiv 2408.15766, section
    3.2); depth d weighs step_decay ** d. depths: how deep acceptance is measured in evaluation, on
    the head's own features after true tokens; in training it is measured at the trained depths
    only.
    """

    draft: EagleHead
    usual_steps = 1

    def __init__(
        self, *arguments: Any, noise: float = 0.1, depths: int = 5, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.noise = noise
        self.depths = max(depths, self.test_steps)

    def forward(self, batch: Batch) -> LossSums:
        (features_BTH,), last_BTH = self.target.read(batch)
        parts = list(self.drafts(batch, [features_BTH]))
        regression = torch.zeros((), device=batch.ids_BT.device)
        for depth, (pairs, hidden_NH) in enumerate(parts[: self.test_steps]):
            wanted_NH = pairs.of_targets(features_BTH).float()
            apart_NH = F.smooth_l1_loss(hidden_NH.float(), wanted_NH, reduction="none")
            regression = regression + self.step_decay**depth * apart_NH.mean(-1).sum()
        drafts = join(parts, batch)
        trained_N = drafts.depth_N < self.test_steps
        weights_N = TOKEN_WEIGHT * self.step_decay**drafts.depth_N * trained_N
        sums = self.sums(drafts, batch, last_BTH, weights_N, depths=self.depths).sums
        return sums._replace(loss=regression + sums.loss)

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Part]:
        inputs_BWH = states[0][:, :-1].to(self.draft.fc.weight.dtype)
        if self.training and self.noise:
            shift_BWH = torch.rand_like(inputs_BWH) * 2 - 1
            inputs_BWH = inputs_BWH + shift_BWH * self.noise
        depths = self.test_steps if self.training else self.depths
        return self.unrolled(batch, inputs_BWH, depths)


class Eagle3Trainee(_UnrolledTrainee):
    """The training-time test (arXiv 2503.01840, section 3.2): `test_steps` depths on the head's own
    features.

    The objective compares the distributions on the draft vocabulary, the target's renormalised
    there; `fkl` is the paper's soft cross-entropy less the target's own entropy: another value, the
    same gradient. An objective that reads the tokens of the data (`ce`) leaves out those that the
    draft vocabulary lacks. Acceptance is against the target's whole distribution, and `missing` is
    what of it lies outside the draft vocabulary.
    """

    draft: Eagle3Head
    usual_steps = 7

    def output_at(self, depth: int) -> Output:
        """The head's own, at every depth."""
        lm_head = self.draft.lm_head
        projection = replace(self.draft.borrowed.projection, module=lm_head, before=None)
        return Output(lm_head.weight, None, projection)


class MtpTrainee(_UnrolledTrainee):
    """One module at all depths, on the target's output projection, which is not trained.

    DeepSeek-V3 trains a module of its own for each depth (arXiv 2412.19437, section 2.2); engines
    draft several tokens with one.
    """

    draft: MtpHead
    usual_steps = 3


class MedusaTrainee(HeadTrainee):
    """Head d guesses on its own; it weighs step_decay ** d (Medusa-1, arXiv 2401.10774, section
    2.2.1).

    From the feature at t it must give the token at t + 2 + d: with `ce` the data's, with other
    objectives the target's distribution at position t + 1 + d, after the true tokens between. The
    feature counts where the token at t + 1 may be the root of a draft, as above. Every head trains
    an output projection of its own.
    """

    draft: MedusaHeads
    one_projection = False

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Part]:
        for d in range(len(self.draft)):
            pairs = pairs_at(batch, d + 1)
            head = cast(nn.Sequential, self.draft[d])
            features_NH = pairs.of_pairs(states[0]).to(next(head.parameters()).dtype)
            yield pairs, head[:-1](features_NH)

    def output_at(self, depth: int) -> Output:
        """The head's own weight; scale, soft cap and bias are the target's."""
        linear = cast(nn.Sequential, self.draft[depth])[-1]
        assert isinstance(linear, nn.Linear)
        borrowed = self.draft.borrowed
        projection = replace(borrowed.projection, module=linear, before=None)
        return Output(linear.weight, borrowed.bias_V, projection)


class HydraTrainee(HeadTrainee):
    """Head d also reads the tokens between the feature and its own; it weighs step_decay ** d
    (arXiv 2402.05109, 3).

    From the feature at t and the true tokens at t + 1 .. t + 1 + d it must give the token at t + 2
    + d. The paper's teacher cross-entropy is `fkl` plus the target's own entropy: another value,
    the same gradient. The projection is the target's and is not trained, unless the heads came with
    projections of their own.
    """

    draft: HydraHeads

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.one_projection = not self.draft.config.own_projection

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Part]:
        dtype = next(self.draft.parameters()).dtype
        for d, head in enumerate(self.draft.heads):
            pairs = pairs_at(batch, d + 1)
            between_N = pairs.at_N[:, None] + torch.arange(1, d + 2, device=pairs.at_N.device)
            tokens_Nd = batch.ids_BT[pairs.row_N[:, None], between_N]
            embedded_NX = self.draft.borrowed.embed(tokens_Nd, dtype).flatten(-2)
            features_NH = pairs.of_pairs(states[0]).to(dtype)
            inputs_NX = torch.cat([features_NH, embedded_NX], dim=-1)
            yield pairs, head(inputs_NX)

    def output_at(self, depth: int) -> Output:
        """The target's, or the head's own in checkpoints of Hydra's authors."""
        if not self.draft.config.own_projection:
            return super().output_at(depth)
        linear = self.draft.projections[depth]
        assert isinstance(linear, nn.Linear)
        projection = replace(self.draft.borrowed.projection, module=linear, before=None)
        return Output(linear.weight, linear.bias, projection)
