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
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.state_store import StateStore
from draftsmith.drafts.draft_vocabulary import DraftVocabulary, drafted_rows
from draftsmith.drafts.heads import Head
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.mtp import MtpHead
from draftsmith.train.batch import IGNORE, Batch, LossSums
from draftsmith.train.chunked import LowRank, Output
from draftsmith.train.frozen_target import FrozenTarget
from draftsmith.train.objective import Objective
from draftsmith.train.teacher import LiveTeacher
from draftsmith.train.trainee import Trainee

# Weight of the loss of each further depth, as a share of the one before (Medusa, section 2.2.1;
# EAGLE-3's code).
STEP_DECAY = 0.8
# Of the objective of EAGLE-1, beside the regression of features.
TOKEN_WEIGHT = 0.1


class Pairs(NamedTuple):
    """The pairs that count at a depth, or at several: their row, position and depth (from 0)."""

    row_N: Tensor
    at_N: Tensor
    depth_N: Tensor

    @property
    def target_at_N(self) -> Tensor:
        """The position of the target's distribution."""
        return self.at_N + self.depth_N + 1

    def at(self, index_N: Tensor) -> "Pairs":
        """The pairs at an index or mask."""
        return Pairs._make(values_N[index_N] for values_N in self)

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


def pairs_at(batch: Batch, depth: int) -> Pairs:
    """The pairs that count at this depth, from 1."""
    width = batch.ids_BT.shape[1] - 1

    def ahead(values_BT: Tensor) -> Tensor:
        return F.pad(values_BT, (0, depth))[:, depth : depth + width]

    valid_BT = batch.labels_BT != IGNORE
    counts_BW = valid_BT[:, 1:] & ahead(valid_BT)
    if batch.documents_BT is not None and batch.positions_BT is not None:
        # The pair before a document's first position belongs to the document before it.
        counts_BW &= batch.positions_BT[:, 1:] > 0
        counts_BW &= batch.documents_BT[:, 1:] == ahead(batch.documents_BT)
    row_N, at_N = counts_BW.nonzero(as_tuple=True)
    return Pairs(row_N, at_N, torch.full_like(row_N, depth - 1))


class Drafts(NamedTuple):
    """What is drafted at one depth, or at several: the pairs that count, and `[N, H]` of each."""

    pairs: Pairs
    hidden_NH: Tensor


def join(parts: Sequence[Drafts], batch: Batch) -> Drafts:
    """The drafts of several depths, those of one target distribution after each other."""
    columns = zip(*[part.pairs for part in parts], strict=True)
    pairs = Pairs._make(torch.cat(values) for values in columns)
    order_N = pairs.target_index_N(batch).argsort(stable=True)
    hidden_NH = torch.cat([part.hidden_NH for part in parts])
    return Drafts(pairs.at(order_N), hidden_NH[order_N])


class HeadTrainee(Trainee):
    """Base of the head trainees: sums the objective over the depths of a head.

    A kind of head defines `drafts`, and overrides `output_at` or `forward` where it differs.
    packing: whether batches will be packed. states: where the target's are
    kept. step_decay: weight of a
    depth relative to the depth before.
    """

    draft: Head
    target: FrozenTarget

    def __init__(
        self,
        draft: Head,
        objective: Objective,
        target: PreTrainedModel,
        packing: bool = False,
        states: StateStore | None = None,
        chunk: int | None = None,
        step_decay: float = STEP_DECAY,
    ) -> None:
        super().__init__(draft, objective, chunk)
        self.step_decay = step_decay
        self.target = FrozenTarget(target, draft.hidden_layers, packing, states)

    def count(self, batch: Batch) -> Tensor:
        """Count the pairs at depth 1, by which the loss is divided, without a forward."""
        return torch.tensor(len(pairs_at(batch, 1).row_N), device=batch.ids_BT.device)

    def forward(self, batch: Batch) -> LossSums:
        states, last_BTH = self.target.read(batch)
        parts = list(self.drafts(batch, states))
        if len(self.draft.outputs()) < 2:
            # Depths that share an output projection share the passes over the target's
            # distributions.
            groups = [parts]
        else:
            groups = [[part] for part in parts]
        found: list[LossSums] = []
        for depth, group in enumerate(groups):
            drafts = join(group, batch)
            weights_N = self.step_decay**drafts.pairs.depth_N
            sums, _ = self.sums(
                drafts, batch, last_BTH, weights_N, depths=len(parts), projection=depth
            )
            found.append(sums)
        return LossSums._make(
            None if values[0] is None else torch.stack(values).sum(0)
            for values in zip(*found, strict=True)
        )

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Drafts]:
        """Yield, for every depth, the pairs that count and what the output projection reads there,
        `[N, H]`.

        states: of the target, `[B, T, H]` each, at the head's `hidden_layers`.
        """
        raise NotImplementedError

    def output_at(self, depth: int) -> Output:
        """How logits are made at a depth, from 0: by the head's own projection, which is trained,
        or by the target's. Scale and soft cap are the target's.
        """
        borrowed = self.draft.borrowed
        projection = borrowed.projection
        outputs = self.draft.outputs()
        if not outputs:
            return Output(projection.weight_VH.detach(), borrowed.bias_V, projection)
        linear = cast(nn.Linear, outputs[depth])
        bias_V = self.draft.extra_bias_V if isinstance(self.draft, MedusaHeads) else linear.bias
        own = replace(projection, get_module=lambda: linear, before=None)
        return Output(linear.weight, bias_V, own)

    def sums(
        self,
        drafts: Drafts,
        batch: Batch,
        last_BTH: Tensor,
        weights_N: Tensor,
        *,
        depths: int,
        projection: int = 0,
        low_rank: LowRank | None = None,
    ) -> tuple[LossSums, Tensor]:
        """The objective with these weights, and alpha `[N]` of each draft. projection: the depth
        whose output projection is that of all. low_rank: as in `TokenLoss.sums`.
        """
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
            self.output_at(projection),
            drafts.hidden_NH,
            tokens_N,
            teacher=teacher,
            weights_N=weights_N,
            low_rank=low_rank,
            per_token_3N=per_token_3N,
        )
        _, alpha_N, missing_N = per_token_3N
        of_depth_ND = pairs.depth_N[:, None] == torch.arange(depths, device=tokens_N.device)
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
        return of_depths, alpha_N


class _UnrolledTrainee(HeadTrainee):
    """A head that is trained at `test_steps` depths, each but the first on its own features."""

    draft: EagleHead | Eagle3Head | MtpHead
    usual_steps: ClassVar[int]

    def __init__(self, *arguments: Any, test_steps: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.test_steps = test_steps or self.usual_steps

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Drafts]:
        features_BWH = self.draft.fuse([state_BTH[:, :-1] for state_BTH in states])
        return self.unrolled(batch, features_BWH, self.test_steps)

    def unrolled(self, batch: Batch, features_BWH: Tensor, depths: int) -> Iterator[Drafts]:
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
            yield Drafts(pairs, self.draft.normed(pairs.of_pairs(states_BWH)))


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
        depth_N = drafts.pairs.depth_N
        weights_N = TOKEN_WEIGHT * self.step_decay**depth_N * (depth_N < self.test_steps)
        sums, _ = self.sums(drafts, batch, last_BTH, weights_N, depths=self.depths)
        return sums._replace(loss=regression + sums.loss)

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Drafts]:
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


class MtpTrainee(_UnrolledTrainee):
    """One module at all depths, on the target's output projection, which is not trained.

    DeepSeek-V3 trains a module of its own for each depth (arXiv 2412.19437, section 2.2); engines
    draft several tokens with one.
    """

    draft: MtpHead
    usual_steps = 3


class ParallelTrainee(HeadTrainee):
    """Medusa and Hydra: head d guesses on its own; it weighs step_decay ** d (Medusa-1, arXiv
    2401.10774, section 2.2.1; Hydra, arXiv 2402.05109, section 3).

    From the feature at t (Hydra: and the true tokens at t + 1 .. t + 1 + d) head d must give the
    token at t + 2 + d: with `ce` the data's, with other objectives the target's distribution at
    position t + 1 + d, after the true tokens between. The feature counts where the token at t + 1
    may be the root of a draft, as above. Hydra's teacher cross-entropy is `fkl` plus the target's
    own entropy: another value, the same gradient. Every Medusa head trains an output projection of
    its own; Hydra's is the target's and is not trained, unless the heads came with their own.
    """

    draft: MedusaHeads | HydraHeads

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Drafts]:
        for d in range(self.draft.config.num_heads):
            pairs = pairs_at(batch, d + 1)
            between_Nd = pairs.at_N[:, None] + torch.arange(1, d + 2, device=pairs.at_N.device)
            tokens_Nd = batch.ids_BT[pairs.row_N[:, None], between_Nd]
            inputs_NI = self.draft.inputs(pairs.of_pairs(states[0]), tokens_Nd)
            yield Drafts(pairs, self.draft.blocks(d)(inputs_NI))
