"""Block drafters: many random blocks of a row in one forward, each slot against the target behind
it.

A block counts at depth d as a draft from its anchor does in `train.trainees.head`: its pair is the
position before the anchor. In evaluation, and wherever a row has no seed, every such anchor is
used.

Legend: B rows, T tokens, A anchors of a row, D depths, N blocks that count at a depth, M blocks in
all, H hidden size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.core.sampling import generator
from draftsmith.drafts.draft_vocabulary import drafted_rows
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.train.batch import Batch, LossSums
from draftsmith.train.chunked import LowRank, Output, TokenLoss
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees.head import Drafts, HeadTrainee, Pairs, join, pairs_at

# Candidates for a slot's temperature, and the bins of the calibration error.
_TEMPERATURES = tuple(2.0 ** (step / 10) for step in range(-30, 31))
_BINS = 10
_CROSS_ENTROPY = parse_objective("ce")


def decay(block_size: int) -> float:
    """exp(-1 / gamma), gamma as DFlash has it for blocks of 16, 10 and 8; DSpark takes 4 for 7."""
    gamma = 7 if block_size >= 16 else 5 if block_size >= 10 else 4
    return math.exp(-1 / gamma)


class Slots(NamedTuple):
    """The sums of a batch; the slots that count, their alphas and the logits of confidence."""

    sums: LossSums
    drafts: Drafts
    alpha_N: Tensor
    confidence_N: Tensor | None


class BlockTrainee(HeadTrainee):
    """The objective at every slot; slot weights fall by `step_decay`, or follow D-PACE (arXiv
    2605.18810).

    anchors: blocks per document and pass, drawn at random (DFlash, arXiv 2602.06036). With D-PACE
    (`@dpace`) slot j of a block weighs sum_{m >= j} prod_{i <= m} s_i, s = (1 + q(token)) / 2,
    without gradient. A Markov head reads the data's token before each slot. A confidence learns
    alpha by binary cross-entropy, beside the objective and weighted like it (DSpark, arXiv
    2607.05147); its loss reaches the network too. DSpark's L1 distance is twice `tvd`.
    """

    draft: BlockHead

    def __init__(
        self, draft: BlockHead, *arguments: Any, anchors: int = 512, **options: Any
    ) -> None:
        options.setdefault("step_decay", decay(draft.config.block_size))
        super().__init__(draft, *arguments, **options)
        self.anchors = anchors

    def blocks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Columns of the anchors `[B, A]`, padded with 0, and each column's place among them `[B,
        T]`, -1 for none.
        """
        pairs = pairs_at(batch, 1)
        rows: list[Tensor] = []
        for row in range(len(batch.ids_BT)):
            columns = pairs.at_N[pairs.row_N == row] + 1
            if self.training and batch.seeds_B is not None and len(columns) > self.anchors:
                columns = self._drawn(columns, batch, row)
            rows.append(columns)
        anchors_BA = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        place_BT = torch.full_like(batch.ids_BT, -1)
        for row, columns in enumerate(rows):
            place_BT[row, columns] = torch.arange(len(columns), device=columns.device)
        if not anchors_BA.shape[1]:
            # One at least: a batch without a block has gradients too, all zero.
            anchors_BA = F.pad(anchors_BA, (0, 1))
        return anchors_BA, place_BT

    def _drawn(self, columns: Tensor, batch: Batch, row: int) -> Tensor:
        """At most `anchors` of the columns in each document of a row, at random."""
        assert batch.seeds_B is not None
        seeded = generator(int(batch.seeds_B[row]))
        parts = [columns]
        if batch.documents_BT is not None:
            documents = batch.documents_BT[row, columns]
            _, lengths = documents.unique_consecutive(return_counts=True)
            parts = list(columns.split(lengths.tolist()))
        for number, part in enumerate(parts):
            if len(part) > self.anchors:
                drawn = torch.randperm(len(part), generator=seeded)[: self.anchors]
                parts[number] = part[drawn.sort().values.to(part.device)]
        return torch.cat(parts)

    def count(self, batch: Batch) -> Tensor:
        _, place_BT = self.blocks(batch)
        return (place_BT >= 0).sum()

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Drafts]:
        """For every depth the pairs before the anchors that count, and the normed states `[N, H]`
        of their slots.
        """
        anchors_BA, place_BT = self.blocks(batch)
        drafted_BADH = self.draft.drafted(
            batch.ids_BT, states, anchors_BA, batch.positions_BT, batch.documents_BT
        )
        for depth in range(1, self.draft.depths + 1):
            pairs = pairs_at(batch, depth)
            place_N = place_BT[pairs.row_N, pairs.at_N + 1]
            kept = place_N >= 0
            pairs = pairs.at(kept)
            yield Drafts(pairs, drafted_BADH[pairs.row_N, place_N[kept], depth - 1])

    def output_at(self, depth: int) -> Output:
        """The target's, not trained; of a part of the vocabulary its rows."""
        projection = self.draft.borrowed.projection
        reduced = self.draft.reduced
        weight_DH = self.draft.rows_DH if reduced else projection.weight_VH.detach()
        return Output(weight_DH, self.draft.bias_D, projection)

    def forward(self, batch: Batch) -> LossSums:
        return self.slots(batch).sums

    def slots(self, batch: Batch) -> Slots:
        """The sums of a batch, and what each slot that counts gives."""
        states, last_BTH = self.target.read(batch)
        drafts = join(list(self.drafts(batch, states)), batch)
        paced = self.objective.paced
        weights_N = self.paces(drafts, batch) if paced else self.step_decay**drafts.pairs.depth_N
        low_rank = self.markov(drafts.pairs, batch)
        sums, alpha_N = self.sums(
            drafts, batch, last_BTH, weights_N, depths=self.draft.depths, low_rank=low_rank
        )
        if not self.draft.config.confidence:
            return Slots(sums, drafts, alpha_N, None)
        tokens_N = drafts.pairs.of_targets(batch.ids_BT)
        logits_N = self.draft.confidence_logits(drafts.hidden_NH, tokens_N)
        accepted_N = alpha_N.to(logits_N)
        loss = F.binary_cross_entropy_with_logits(logits_N, accepted_N, weights_N, reduction="sum")
        sums = sums._replace(loss=sums.loss + loss)
        return Slots(sums, drafts, alpha_N, logits_N)

    def markov(self, pairs: Pairs, batch: Batch) -> LowRank | None:
        """What the Markov head adds to the logits: W1 of the tokens before the slots, and W2."""
        if not self.draft.config.markov_rank:
            return None
        head: Any = self.draft.markov_head
        before_NR = head["markov_w1"](pairs.of_targets(batch.ids_BT))
        return LowRank(before_NR, head["markov_w2"].weight)

    @torch.no_grad()
    def paces(self, drafts: Drafts, batch: Batch) -> Tensor:
        """D-PACE's weights `[N]`."""
        tokens_N = drafts.pairs.of_targets(batch.labels_BT)
        rows_N, drafted_N = drafted_rows(self.draft.target_ids_D, tokens_N)
        per_token_3N = torch.zeros(3, len(tokens_N), device=tokens_N.device)
        TokenLoss(_CROSS_ENTROPY, self.loss.chunk).sums(
            self.output_at(0),
            drafts.hidden_NH,
            rows_N,
            teacher=None,
            low_rank=self.markov(drafts.pairs, batch),
            per_token_3N=per_token_3N,
        )
        q_N = (-per_token_3N[0]).exp() * drafted_N
        slots = drafts.pairs.pair_index_N(batch), drafts.pairs.depth_N
        steps_MD = torch.zeros(batch.ids_BT.numel(), self.draft.depths, device=tokens_N.device)
        steps_MD[slots] = (1 + q_N) / 2
        reached_MD = steps_MD.cumprod(1)
        return reached_MD.flip(1).cumsum(1).flip(1)[slots]


@torch.no_grad()
def calibrate(trainee: BlockTrainee, batches: Iterable[Batch]) -> dict[str, float]:
    """Fit the temperatures of the confidence, slot by slot; return its calibration error before and
    after.

    Sequential temperature scaling (DSpark, arXiv 2607.05147, section 3.2.1): each slot takes the
    temperature that minimises the expected calibration error of the product of confidences up to
    it, which predicts that all these tokens are accepted. Fitted on every other batch, the errors
    are those of the others, the mean over slots.
    """
    head = trainee.eval().draft
    parts = []
    for batch in batches:
        slots = trainee.slots(batch)
        assert slots.confidence_N is not None
        figures_2N = torch.stack([slots.confidence_N.float(), slots.alpha_N.float()])
        blocks_N = slots.drafts.pairs.pair_index_N(batch).cpu()
        # Confidence logits and alphas of every block, `[2, M, D]`; NaN in slots that do not count.
        part_2MD = torch.full((2, batch.ids_BT.numel(), head.depths), math.nan)
        depth_N = slots.drafts.pairs.depth_N.cpu()
        part_2MD[:, blocks_N, depth_N] = figures_2N.cpu()
        counts_M = part_2MD[1, :, 0].isfinite()
        parts.append(part_2MD[:, counts_M])
    fitted = torch.cat(parts[::2], dim=1)
    judged = torch.cat(parts[1::2] or parts, dim=1)
    temperatures: list[float] = []
    for _ in range(head.depths):
        temperatures.append(_next_temperature(fitted, temperatures))
    head.config = replace(head.config, confidence_temperatures=tuple(temperatures))
    return {
        "confidence_error_raw": _mean_error(judged, [1.0] * head.depths),
        "confidence_error": _mean_error(judged, temperatures),
    }


def _next_temperature(found_2MD: Tensor, temperatures: Sequence[float]) -> float:
    """The temperature of the next slot with the least error; of equal ones the nearest to 1."""
    errors = {t: _error(found_2MD, [*temperatures, t]) for t in _TEMPERATURES}
    return min(errors, key=lambda t: (errors[t], abs(math.log(t))))


def _mean_error(found_2MD: Tensor, temperatures: Sequence[float]) -> float:
    """The mean over slots of the error of the product up to each."""
    errors = [_error(found_2MD, temperatures[: slot + 1]) for slot in range(len(temperatures))]
    return sum(errors) / len(errors)


def _error(found_2MD: Tensor, temperatures: Sequence[float]) -> float:
    """Expected calibration error of the product of confidences over the first slots, in bins of
    equal width.
    """
    logits_Md, alphas_Md = found_2MD[:, :, : len(temperatures)]
    said_M = (logits_Md / torch.tensor(temperatures)).sigmoid().prod(1)
    is_M = alphas_Md.prod(1)
    counts_M = is_M.isfinite()
    said_M = said_M[counts_M]
    apart_M = (said_M - is_M[counts_M]).double()
    bins_M = (said_M * _BINS).long().clamp_max(_BINS - 1)
    sums = torch.bincount(bins_M, weights=apart_M)
    error = float(sums.abs().sum())
    return error / max(len(apart_M), 1)
