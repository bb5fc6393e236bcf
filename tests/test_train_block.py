"""Training of block drafters: which blocks are drawn, how slots are weighed, and how a confidence
is calibrated.

Legend: M blocks, D depths.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafts.heads.block import DSparkHead
from draftsmith.train.batch import Batch
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees import TRAINEES
from draftsmith.train.trainees.block import BlockTrainee, Slots, calibrate
from draftsmith.train.trainees.head import Drafts, Pairs, join
from tests.test_drafts_heads import make_target
from tests.test_train_heads import (
    ROWS,
    batch_of,
    packed_batch,
    trainee_of,
)

LONG = [([3, 7], list(range(1, 31))), ([9], list(range(30, 2, -1)))]


@pytest.fixture(scope="module")
def target():
    return make_target()


def seeded(batch, *seeds):
    return replace(batch, seeds_B=torch.tensor(seeds))


def anchors(trainee, batch):
    places = trainee.blocks(batch)[1]
    return [(row >= 0).nonzero().flatten().tolist() for row in places]


def test_blocks_are_drawn_by_row_whatever_the_batch(target):
    trainee = trainee_of("dflash", target, anchors=4).train()
    whole = anchors(trainee, seeded(batch_of(LONG), 5, 6))
    assert [len(row) for row in whole] == [4, 4]
    alone = [
        anchors(trainee, seeded(batch_of([row]), seed))[0]
        for row, seed in zip(LONG, (5, 6), strict=True)
    ]
    assert whole == alone
    assert (
        anchors(trainee, seeded(batch_of(LONG), 5, 7))[0]
        == whole[0]
        != anchors(trainee, seeded(batch_of(LONG), 8, 7))[0]
    )
    # The first block starts at the last token of the prompt; the last has a token to draft.
    drawn = {
        anchor
        for seed in range(40)
        for anchor in anchors(trainee, seeded(batch_of(LONG[:1]), seed))[0]
    }
    assert drawn == set(range(1, 31))
    assert anchors(trainee.eval(), seeded(batch_of(LONG), 5, 6)) == [
        list(range(1, 31)),
        list(range(1, 28)),
    ]


def test_packed_documents_have_as_many_blocks_as_alone(target):
    """Sixteen documents in four rows, of which four anchors each are drawn: 64 and not 16."""
    trainee = trainee_of("dflash", target, anchors=4).train()
    batch = packed_batch([[0, 0, 1, 0]] * 4)
    drawn = anchors(trainee, seeded(batch, 1, 2, 3, 4))
    assert batch.documents_BT is not None
    for row, columns in zip(batch.documents_BT, drawn, strict=True):
        assert row[columns].bincount().tolist() == [4, 4, 4, 4]
    alone = [anchors(trainee, seeded(batch_of([ROWS[i]]), 1))[0] for i in (0, 0, 1, 0)]
    assert sum(map(len, drawn)) == 4 * sum(map(len, alone)) == 64


@pytest.mark.parametrize("kind", ["dflash", "dflash-part", "dspark"])
def test_d_pace_weighs_slots_by_the_chance_to_get_there(kind, target):
    trainee = trainee_of(kind, target, "ce@dpace").eval()
    plain = trainee_of(kind, target, "ce", step_decay=1.0).eval()
    plain.draft.load_state_dict(trainee.draft.state_dict())
    batch = batch_of(LONG[:1])
    states, _ = trainee.target.read(batch)
    drafts = join(list(trainee.drafts(batch, states)), batch)
    paces_N = trainee.paces(drafts, batch)
    # Block by block, from the probabilities of its tokens.
    for anchor in (4, 27, 29):
        of_block = (drafts.pairs.at_N == anchor - 1).nonzero()[:, 0]
        ordered = of_block[drafts.pairs.depth_N[of_block].argsort()].tolist()
        assert len(ordered) == min(trainee.draft.depths, 31 - anchor)
        chances = []
        for slot in ordered:
            place = int(drafts.pairs.target_at_N[slot])
            raw = trainee.draft.raw_logits(drafts.hidden_NH[slot])
            q_V = trainee.draft.logits(raw, batch.ids_BT[0, place]).softmax(-1)
            chances.append(float(q_V[batch.labels_BT[0, place]].detach()))
        steps = torch.cumprod((1 + torch.tensor(chances)) / 2, 0)
        for depth, slot in enumerate(ordered):
            assert float(paces_N[slot]) == pytest.approx(float(steps[depth:].sum()), rel=1e-4)
    assert not torch.allclose(trainee(batch).loss, plain(batch).loss, rtol=1e-2)


def test_calibration_finds_the_temperatures_that_a_confidence_lacks(target):
    """A confidence whose logits are too large by 4 and 1/2 gets these divisors back, and its error
    falls.
    """
    head = DSparkHead.fresh(target, num_layers=1, block_size=2)
    trainee = TRAINEES["dspark"](head, parse_objective("ce"), target)
    assert isinstance(trainee, BlockTrainee)
    random = torch.Generator().manual_seed(1)

    def slots(batch):
        logits_2N = 1.5 * torch.randn(2, 400, generator=random)
        at = torch.arange(400).repeat(2)
        depth_N = torch.arange(2).repeat_interleave(400)
        pairs = Pairs(torch.zeros_like(at), at, depth_N)
        drafts = Drafts(pairs, torch.zeros(800, 1))
        scaled_N = (torch.tensor([[4.0], [0.5]]) * logits_2N).flatten()
        sums: Any = None
        return Slots(sums, drafts, logits_2N.sigmoid().flatten(), scaled_N)

    trainee.slots = slots  # type: ignore[method-assign]
    ids: Tensor = torch.zeros(1, 400, dtype=torch.long)
    figures = calibrate(trainee, [Batch(ids, ids)] * 4)
    assert head.config.confidence_temperatures == pytest.approx((4.0, 0.5), rel=0.1)
    assert figures["confidence_error"] < 0.01 < 0.1 < figures["confidence_error_raw"]
