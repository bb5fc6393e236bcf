"""Block drafters: training's blocks are decoding's, files keep them whole, and what a slot may see.

Legend: B rows, T tokens, A anchors, S slots, H hidden size.
"""

import pytest
import torch
from transformers import DynamicCache

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.heads.block import target_layers_of
from tests.train_laws import FAMILIES, SIZES, tiny_family

KINDS = ("dflash", "jetspec", "dspark")
V, S, WINDOW = SIZES["vocab_size"], 5, 9


def make_head(kind, target, **options):
    """Every parameter away from where it began."""
    head = HEADS[kind].fresh(target, **({"num_layers": 2, "block_size": S} | options)).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return head


@torch.no_grad()
def text(target, head, rows=2, tokens=17):
    ids_BT = torch.randint(0, V, (rows, tokens), generator=torch.Generator().manual_seed(3))
    _, states = forward_with_states(target, head.hidden_layers, input_ids=ids_BT)
    return ids_BT, list(states)


@torch.no_grad()
def decoded_block(head, ids_BT, states, anchor):
    """`[B, depths, H]`: the context comes in two parts, as decoding accepts it, then one block."""
    cache, rows = DynamicCache(), len(ids_BT)
    context_BTH = head.fuse([state[:, :anchor] for state in states])
    positions_BT = torch.arange(anchor).expand(rows, -1)
    for part in (slice(0, anchor // 2), slice(anchor // 2, anchor)):
        if part.stop > part.start:
            head.remember(context_BTH[:, part], positions_BT[:, part], cache)
    positions_BS = anchor + torch.arange(S).expand(rows, -1)
    context = positions_BS[:, :, None] - positions_BT[:, None, :] < (head.config.window or 99)
    own = torch.ones(S, S, dtype=torch.bool)
    mask = torch.cat(
        [context, (own.tril() if head.config.causal else own).expand(rows, -1, -1)], -1
    )[:, None]
    states_BDH = head.slots(head.states(head.block(ids_BT[:, anchor]), mask, positions_BS, cache))
    return states_BDH


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_blocks_in_one_forward_are_each_what_decoding_computes(
    family, kind, window, monkeypatch
):
    """Law 5, for every family; also over more than one group of blocks."""
    monkeypatch.setattr("draftsmith.drafts.heads.block._QUERIES", 3 * S)
    target = tiny_family(family)
    head = make_head(kind, target, window=window)
    ids_BT, states = text(target, head)
    with torch.no_grad():
        all_BADH = head.drafted(ids_BT, states, torch.arange(ids_BT.shape[1]).expand(2, -1))
    assert all_BADH.shape[2] == head.depths == (S if kind == "dspark" else S - 1)
    for anchor in (0, 1, 7, 16):
        torch.testing.assert_close(
            decoded_block(head, ids_BT, states, anchor), all_BADH[:, anchor], atol=1e-4, rtol=0
        )


def test_a_slot_sees_later_slots_unless_causal_and_never_the_anchor_s_own_state():
    target = tiny_family("llama")
    for kind in KINDS:
        head = make_head(kind, target)
        ids_BT, states = text(target, head, 1)
        before = decoded_block(head, ids_BT, states, 6)
        with torch.no_grad():
            later = head.drafted(
                ids_BT,
                [state * (torch.arange(17) < 6)[:, None] for state in states],
                torch.tensor([[6]]),
            )
            torch.testing.assert_close(later[:, 0], before, atol=1e-5, rtol=0)
            # The last slot's token changes the slots before it, unless they are causal.
            ids_BS = head.block(ids_BT[:, 6])
            ids_BS[:, -1] = 11
            cache = DynamicCache()
            head.remember(
                head.fuse([state[:, :6] for state in states]), torch.arange(6)[None], cache
            )
            seen = torch.ones(S, 6 + S, dtype=torch.bool)
            mask = (seen.tril(6) if head.config.causal else seen)[None, None]
            changed = head.slots(head.states(ids_BS, mask, 6 + torch.arange(S)[None], cache))
        same = torch.allclose(changed[:, :-1], before[:, :-1], atol=1e-5)
        assert same == head.config.causal


def test_the_markov_head_and_the_confidence_read_the_token_before():
    target = tiny_family("llama")
    head = make_head("dspark", target)
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
