"""Block drafters: what the Markov head and the confidence read, and which layers a head reads.

Law 5 for them is in tests/test_train_heads.py.
"""

from typing import Any

import pytest
import torch

from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.block import DSparkHead, target_layers_of
from tests.tiny_models import stirred
from tests.train_laws import tiny_family


def test_the_markov_head_and_the_confidence_read_the_token_before():
    target = tiny_family("llama")
    head: Any = stirred(DSparkHead.fresh(target, num_layers=2, block_size=5).eval(), 0.1)
    states = torch.randn(2, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
    raw = head.raw_logits(states)
    one, other = (head.logits(raw, torch.tensor([token, 9])) for token in (4, 5))
    assert not torch.allclose(one[0], other[0]) and torch.equal(one[1], other[1])
    w1, w2 = (head.markov_head[name].weight for name in ("markov_w1", "markov_w2"))
    torch.testing.assert_close(one[0] - raw[0], w2 @ w1[4])
    plain = head.confidence(states, torch.tensor([4, 9]), 1)
    head.config = type(head.config)(
        **{**vars(head.config), "confidence_temperatures": (1.0, 2.0, 1.0, 1.0, 1.0)}
    )
    torch.testing.assert_close(
        head.confidence(states, torch.tensor([4, 9]), 1).logit() * 2, plain.logit()
    )


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(36, (1, 9, 17, 25, 33)), (8, (1, 2, 3, 4, 5)), (6, (1, 2, 3)), (4, (0, 1, 2)), (2, (0, 1))],
)
def test_layers_that_a_fresh_head_reads(layers, ids):
    assert target_layers_of(layers) == ids


def test_layers_that_the_target_lacks_are_refused(golden):
    with golden.raises():
        HEADS["dflash"].fresh(tiny_family("llama"), target_layers=[0, 2])  # type: ignore[call-arg]
