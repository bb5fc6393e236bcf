"""Heads: their files are what other engines read, their two ways of running agree, and they train
what is theirs.
"""

import copy
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.heads import head_kind, load_head, save_head
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import HydraHeads, MedusaHeads
from draftsmith.drafts.heads.mtp import MtpHead
from tests.test_core_sources import Evil
from tests.tiny_models import DRAFT_VOCAB, FRESH, stirred
from tests.train_laws import tiny_family

V, H, D = 40, 16, 12


def make_target(layers=4):
    more: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    more |= {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    return tiny_family(
        "llama", 1, 0.0, vocab_size=V, num_hidden_layers=layers, initializer_range=0.3, **more
    )


@pytest.fixture(scope="module")
def target():
    return make_target()


every_head = pytest.mark.parametrize("name", FRESH)


def inputs(rows=2, tokens=7):
    random = torch.Generator().manual_seed(3)
    return (
        torch.randint(0, V, (rows, tokens), generator=random),
        torch.randn(rows, tokens, H, generator=random),
    )


def outputs(head):
    """Everything a head says about the same inputs."""
    ids_BT, features_BTH = inputs()
    if isinstance(head, EagleHead | MtpHead):
        return list(head(ids_BT, features_BTH))
    if isinstance(head, Eagle3Head):
        states = [features_BTH.roll(i, -1) for i, _ in enumerate(head.hidden_layers)]
        first_BTD, g_BTH = head(ids_BT, head.fuse(states))
        return [first_BTD, *head(ids_BT, g_BTH), head.to_target(first_BTD)]
    if isinstance(head, BlockHead):
        states = [features_BTH * (layer + 1) for layer in head.hidden_layers]
        drafted = head.drafted(ids_BT, states, torch.tensor([[2, 5], [1, 6]]))
        previous = ids_BT[:, None, : head.depths].expand(-1, 2, -1)
        logits = head.logits(head.raw_logits(drafted), previous)
        if head.config.confidence:
            logits = logits + head.confidence_logits(drafted, previous)[..., None].to(logits.dtype)
        return [logits]
    if isinstance(head, MedusaHeads):
        return [head(features_BTH)]
    windows = ids_BT.unfold(1, 3, 1)
    return [head(features_BTH[:, :5], windows[..., : d + 1]) for d in range(3)]


@every_head
def test_a_saved_head_comes_back_bit_for_bit(name, target, tmp_path):
    head = stirred(FRESH[name](target))
    save_head(head, tmp_path / "head")
    back = load_head(tmp_path / "head", target)
    assert head_kind(tmp_path / "head") == back.kind == head.kind
    assert type(back) is type(head) and back.config == head.config and not back.training
    before, after = head.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[key], after[key]) for key in before
    )
    for a, b in zip(outputs(head), outputs(back), strict=True):
        assert torch.equal(a, b)
    save_head(back, tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "head" / file).read_bytes()


@every_head
def test_fresh_is_repeatable_and_what_it_borrows_follows_the_target(name):
    own = make_target()
    head = FRESH[name](own)
    for one, other in zip(head.parameters(), FRESH[name](own).parameters(), strict=True):
        assert torch.equal(one, other)
    copied = copy.deepcopy(head)
    before = outputs(head)
    with torch.no_grad():
        for module in (own.get_input_embeddings(), own.get_output_embeddings()):
            assert module is not None
            module.weight.mul_(-1.5)
    changed = [not torch.equal(a, b) for a, b in zip(before, outputs(head), strict=True)]
    # Medusa reads features only and projects by itself.
    assert not any(changed) if name == "medusa" else any(changed)
    for a, b in zip(outputs(copied), outputs(head), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_a_fresh_head_joins_its_inputs_at_their_scale(name):
    """Outputs of `fc` are as large as its inputs; the other matrices are drawn as transformers
    draws them.
    """
    head = FRESH[name](tiny_family("llama", 1, 0.0, hidden_size=64, vocab_size=V))
    weights = dict(head.named_parameters())
    joined = weights["fc.weight"]
    assert float(joined.std()) * joined.shape[1] ** 0.5 == pytest.approx(1, rel=0.05)
    maps = [key for key in weights if "_proj.weight" in key]
    assert len(maps) == 7
    for key in maps:
        assert float(weights[key].std()) == pytest.approx(0.02, rel=0.1), key
    assert not any(value.any() for key, value in weights.items() if key.endswith("bias"))


@every_head
def test_heads_follow_the_target_to_bf16(name, tmp_path, target):
    save_head(stirred(FRESH[name](target)), tmp_path)
    half = make_target().bfloat16()
    head = load_head(tmp_path, half)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    if isinstance(head, EagleHead | Eagle3Head):
        exact = load_head(tmp_path, target)
        assert isinstance(exact, EagleHead | Eagle3Head)
        rotary, same = cast(Any, head.rotary), cast(Any, exact.rotary)
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, same.inv_freq)
    for out in outputs(head):
        assert out.dtype == torch.bfloat16 and not out.isnan().any()


def reference_layer(tensors, prefix, x, residual):
    """A LLaMA layer behind its input norm, written out: causal, 4 query heads on 2 key heads of 4,
    rope base 500.
    """

    def linear(name, value):
        return value @ tensors[f"{prefix}{name}.weight"].T + tensors.get(f"{prefix}{name}.bias", 0)

    rows, length = x.shape[:2]
    q, k, v = (
        linear(f"self_attn.{n}_proj", x).view(rows, length, -1, 4).transpose(1, 2) for n in "qkv"
    )
    angle = torch.arange(length)[:, None] / 500.0 ** (torch.arange(0, 4, 2) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rope(value):
        turned = torch.complex(value[..., :2].contiguous(), value[..., 2:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    scores = rope(q) @ rope(k).repeat_interleave(2, dim=1).transpose(-1, -2) / 2
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    mixed = (scores.softmax(-1) @ v.repeat_interleave(2, dim=1)).transpose(1, 2).flatten(-2)
    states = residual + linear("self_attn.o_proj", mixed)
    normed = rms(states, tensors[f"{prefix}post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(linear("mlp.gate_proj", normed)) * linear(
        "mlp.up_proj", normed
    )
    return states + linear("mlp.down_proj", gated)


def rms(states, weight):
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@torch.no_grad()
def test_eagle_computes_what_its_paper_says(target, tmp_path):
    head = stirred(EagleHead.fresh(target))
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids_BT, features_BTH = inputs()
    x = (
        torch.cat([tensors["embed_tokens.weight"][ids_BT], features_BTH], -1)
        @ tensors["fc.weight"].T
    )
    expected = reference_layer(tensors, "layers.0.", x, x)
    logits_BTV, predicted_BTH = head(ids_BT, features_BTH)
    torch.testing.assert_close(predicted_BTH, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits_BTV, target.lm_head(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_eagle3_computes_what_its_paper_says(target, tmp_path):
    head = stirred(Eagle3Head.fresh(target, draft_vocab=DRAFT_VOCAB, norms="eagle3"))
    assert isinstance(head, Eagle3Head)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids_BT, low = inputs()
    g = head.fuse([low, low + 1, low * 2])
    torch.testing.assert_close(g, torch.cat([low, low + 1, low * 2], -1) @ tensors["fc.weight"].T)
    embedded = target.get_input_embeddings()(ids_BT)
    x = torch.cat(
        [
            rms(embedded, tensors["midlayer.input_layernorm.weight"]),
            rms(g, tensors["midlayer.hidden_norm.weight"]),
        ],
        dim=-1,
    )
    expected = reference_layer(tensors, "midlayer.", x, g)
    logits_BTD, next_BTH = head(ids_BT, g)
    torch.testing.assert_close(next_BTH, expected, atol=1e-5, rtol=1e-5)
    wanted = rms(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(logits_BTD, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_fresh_medusa_and_hydra_say_what_the_target_says():
    target = make_target()
    ids_BT, _ = inputs()
    out = target(ids_BT, output_hidden_states=True)
    features_BTH = out.hidden_states[-1]
    medusa = MedusaHeads.fresh(target)
    logits_BTKV = medusa(features_BTH)
    assert logits_BTKV.shape == (2, 7, 4, V) and medusa.hidden_layers == (-1,)
    for head in range(4):
        torch.testing.assert_close(logits_BTKV[:, :, head], out.logits)
    hydra = HydraHeads.fresh(target)
    for d in range(4):
        tokens = ids_BT[..., None].expand(-1, -1, d + 1)
        torch.testing.assert_close(hydra(features_BTH, tokens), out.logits)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere", "granite"])
def test_heads_fit_other_families(family):
    """Own head sizes (Qwen 3), logits that are bounded (Gemma 2) or scaled (Cohere, Granite)."""
    model = tiny_family(family, vocab_size=V, max_position_embeddings=64)
    for fresh in FRESH.values():
        assert all(out.shape[-1] in (V, D, H) for out in outputs(fresh(model)))
    with torch.no_grad():
        out = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
        logits = MedusaHeads.fresh(model, num_heads=1)(out.hidden_states[-1])
        torch.testing.assert_close(logits[:, :, 0], out.logits)
        torch.testing.assert_close(
            EagleHead.fresh(model).borrowed.project(out.hidden_states[-1]), out.logits
        )
        block: Any = FRESH["dflash"](model)
        torch.testing.assert_close(
            block.logits(block.raw_logits(out.hidden_states[-1])), out.logits
        )


def test_ordinary_models_are_no_heads(tmp_path, target, draft_dir, golden):
    target.save_pretrained(tmp_path / "lm")
    for path in (tmp_path / "lm", draft_dir, tmp_path, tmp_path / "nothing", "owner/name"):
        assert head_kind(path) is None
    with golden.raises():
        load_head(tmp_path / "lm", target)


def test_a_head_that_does_not_fit_or_would_run_code_is_refused_in_one_line(
    target, tmp_path, golden
):
    save_head(FRESH["eagle"](target), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    foreign = tensors | {"embed_tokens.weight": -tensors["embed_tokens.weight"]}
    torch.save(tensors | {"evil": Evil()}, tmp_path / "pytorch_model.bin")
    for content in (
        {name: tensor for name, tensor in tensors.items() if name != "fc.weight"},
        foreign,
        None,
    ):
        if content is None:
            file.unlink()
        else:
            save_file(content, file)
        with golden.raises():
            load_head(tmp_path, target)
