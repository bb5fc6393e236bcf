"""What the kernel computes of a head equals the head's own forward, alone and in a tree.

Legend: B rows, q queries, T tokens, H hidden size, D draft vocabulary, e nodes of a level, d tokens
of a path.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.decode.head_forward import BlockHeadForward, EagleForward
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import packs_of, take_over
from draftsmith.decode.propose.head_proposers import (
    BlockAsModel,
    HeadAsModel,
    block_behind,
)
from draftsmith.decode.propose.network import pending_block
from draftsmith.decode.runner import Block, Runner
from draftsmith.drafts.heads.block import DFlashHead, DSparkHead, JetSpecHead
from draftsmith.drafts.heads.eagle import EagleConfig, EagleHead, draw
from draftsmith.drafts.heads.eagle3 import Eagle3Config, Eagle3Head
from draftsmith.drafts.heads.mtp import MtpConfig, MtpHead, layer_of

pytestmark = pytest.mark.skipif(kernel() is None, reason="needs the compiled kernel")

HIDDEN, VOCABULARY = 128, 200
PROMPTS = [list(range(5, 45)), list(range(30, 36))]
# Behind three tokens of text: two siblings, and a child of each.
TREE = Block(
    torch.tensor([[0, 1, 2, 3, 3, 4, 4]]),
    torch.tensor(
        [
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 0, 1, 0, 0],
            [1, 1, 1, 1, 0, 1, 0],
            [1, 1, 1, 0, 1, 0, 1],
        ]
    )[None].bool(),
    static=False,
)


def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def eagle(**options):
    bias = options.pop("bias", False)
    model = target()
    head = EagleHead(
        EagleConfig.like(model, {"intermediate_size": 512, **options}, bias=bias), model
    )
    draw(head.fc, head.layers, seed=1)
    return varied(head)


def eagle3(draft_vocab_size=VOCABULARY, **options):
    model = target()
    layer = {"intermediate_size": 512, "qk_norm": options.pop("qk_norm", False)}
    layer["num_hidden_layers"] = options.pop("num_layers", 1)
    config = Eagle3Config.like(
        model,
        layer,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=(2, 3, 4),
        target_hidden_size=HIDDEN,
        **options,
    )
    head = Eagle3Head(config, model)
    draw(head.fc, head.midlayer, seed=1)
    if head.reduced:
        head.set_draft_vocab(range(0, 2 * draft_vocab_size, 2))
    return varied(head)


def mtp(family, hidden_first=False):
    model = target()
    layer = layer_of(model, family) | {"intermediate_size": 512}
    head = MtpHead(MtpConfig.read(layer, layer=layer, hidden_first=hidden_first), model)
    draw(head.fc, head.layers, seed=1)
    return varied(head)


def block(kind, **options):
    return varied(kind.fresh(target(), num_layers=2, block_size=4, **options))


def varied(head):
    """Norms and biases that are neither one nor zero."""
    torch.manual_seed(2)
    for weight in head.parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, 1.0, 0.3)
    return head.eval().requires_grad_(False)


HEADS: dict[str, Callable[[], Any]] = {
    "eagle": eagle,
    "eagle, biases": lambda: eagle(bias=True, qkv_bias=True, attention_bias=True),
    "eagle3": eagle3,
    "eagle3, draft vocabulary": lambda: eagle3(draft_vocab_size=90),
    "eagle3, as Qwen 3": lambda: eagle3(qk_norm=True),
    "eagle3, residual of normed features": lambda: eagle3(norm_before_residual=True),
    "eagle3, normed output": lambda: eagle3(norm_output=True, fc_norm=True),
    "eagle3, two layers": lambda: eagle3(norm_output=True, num_layers=2),
    "eagle3, own embedding": lambda: eagle3(own_embedding=True),
    "mtp": lambda: mtp("llama"),
    "mtp, as MiMo": lambda: mtp("qwen2", hidden_first=True),
    "mtp, as Qwen 3": lambda: mtp("qwen3"),
}


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The forwards of heads in the kernel, which packs matrices of any size."""
    monkeypatch.setattr("draftsmith.decode.packed_weights._SMALLEST", 0)
    calls = []
    for kind in (EagleForward, BlockHeadForward):

        def counted(self, *inputs, run=kind.run, **options):
            calls.append(type(self))
            return run(self, *inputs, **options)

        monkeypatch.setattr(kind, "run", counted)
    return calls


def runner_of(head, fast, kind=HeadAsModel, window=None):
    model: Any = kind(head)
    take_over(head)
    return Runner(model, {"full_attention": window}, None, packs_of(model) if fast else None)


def outputs(head, fast):
    """Logits and features of pending tokens and of a tree, behind ragged prompts."""
    runner = runner_of(head, fast)
    random = torch.Generator().manual_seed(3)

    def features(*shape):
        return torch.randn(*shape, HIDDEN, generator=random).to(head.fc.weight.dtype)

    runner.prefill(PROMPTS, 20, features_BTH=features(2, len(PROMPTS[0])))
    tokens_Bq, lead = runner.open_pending([[1, 2, 3], [4]])
    pending = pending_block(3, runner.device)
    logits, (states,) = runner.forward(tokens_Bq, pending, 1, (0,), features(2, 3))
    found = [logits, states[:, -1:]]
    drafted_Bq = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])
    logits, (states,) = runner.forward(drafted_Bq, TREE, 0, (0,), features(2, 4))
    return [*found, logits, states]


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_equals_the_heads_own_forward(name, ran):
    with torch.inference_mode(False):
        head = HEADS[name]()
    theirs = outputs(head, fast=False)
    assert not ran
    for ours, own in zip(outputs(head, fast=True), theirs, strict=True):
        torch.testing.assert_close(ours, own, atol=2e-5, rtol=1e-5)
    assert len(ran) == 3
    # 16 bits go through the kernel as they are.
    half = outputs(head.bfloat16(), fast=True)
    for ours, own in zip(half, theirs, strict=True):
        assert (ours - own).norm() < 0.03 * own.norm()
    assert len(ran) == 6


BLOCKS: dict[str, Callable[[], Any]] = {
    "dflash": lambda: block(DFlashHead),
    "dflash, window": lambda: block(DFlashHead, window=9),
    "dspark, draft vocabulary": lambda: block(DSparkHead, draft_vocab=range(0, VOCABULARY, 2)),
    "jetspec": lambda: block(JetSpecHead),
}


def block_states(head, fast):
    """States of two blocks, behind ragged prompts and tokens of a first step."""
    runner = runner_of(head, fast, BlockAsModel, head.config.window)
    random = torch.Generator().manual_seed(3)

    def features(count):
        return torch.randn(2, count, HIDDEN, generator=random)

    runner.prefill(PROMPTS, 20, features_BTH=features(len(PROMPTS[0])))
    slots = head.config.block_size
    found = []
    for known in (3, 2):
        masks = [head.config.mask_token_id] * (slots - 1)
        tokens_BT, lead = runner.open_pending([[0] * known + [7] + masks, [0, 9] + masks])
        behind = block_behind(known, slots, head.config.causal, runner.device)
        _, (states_BSH,) = runner.forward(tokens_BT, behind, 0, (0,), features(known))
        runner.keep([range(ahead, known) for ahead in lead])
        found.append(states_BSH)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_equals_the_block_drafters_own_forward(monkeypatch, name, ran):
    with torch.inference_mode(False):
        head = BLOCKS[name]()
    theirs = block_states(head, fast=False)
    assert not ran
    ours = block_states(head, fast=True)
    assert len(ran) == 3
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    monkeypatch.setattr("draftsmith.decode.head_forward.MOST_TOKENS", 14)
    assert torch.equal(block_states(head, fast=True), ours)


@torch.inference_mode()
def test_a_prompt_in_parts_is_the_prompt(monkeypatch):
    with torch.inference_mode(False):
        head = eagle3()
    whole = outputs(head, fast=True)
    monkeypatch.setattr("draftsmith.decode.head_forward.MOST_TOKENS", 14)
    for ours, theirs in zip(outputs(head, fast=True), whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["gelu", "hook", "patched"])
@torch.inference_mode()
def test_a_head_that_it_does_not_know_runs_its_own_forward(kind, ran):
    head = eagle(hidden_act="gelu") if kind == "gelu" else eagle()
    if kind == "hook":
        head.fc.register_forward_hook(lambda *_: None)
    if kind == "patched":
        head.fc.__dict__["forward"] = head.fc.forward
    outputs(head, fast=True)
    assert not ran
