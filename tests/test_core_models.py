"""Models: what is loaded, what is refused, how two are told apart, and how much memory was held."""

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
)

from benchmarks.lib.tiny_types import tiny_config
from draftsmith.core.errors import InputError
from draftsmith.core.models import (
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    memory_bytes,
    parameter_count,
    quantization,
    read_per_token,
    vocabulary_size,
)
from tests.train_laws import tiny_family


def test_a_model_is_loaded_whole_and_ready(target_dir, golden):
    model = load_model(target_dir, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert (vocabulary_size(model), context_length(model)) == (290, 96)
    assert eos_ids(model)[0] == 1
    assert len(eos_ids(model)) == 17
    assert load_model(target_dir, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    model.generation_config.eos_token_id = [1, "</s>"]
    with golden.raises():
        eos_ids(model)


def test_a_fingerprint_follows_weights_and_architecture(target_dir, draft_dir):
    model = load_model(target_dir, device="cpu")
    before = fingerprint(model)
    assert len(before) == 16
    assert fingerprint(load_model(target_dir, device="cpu")) == before
    assert fingerprint(load_model(draft_dir, device="cpu")) != before
    with torch.no_grad():
        model.get_output_embeddings().weight[-1, -1] += 1e-3
    assert fingerprint(model) != before
    model = load_model(target_dir, device="cpu")
    model.config.rms_norm_eps = 0.5
    assert fingerprint(model) != before


bnb = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    """A model whose layers hold whole blocks of 64 values, and odd ones too."""
    sizes = {
        "vocab_size": 290,
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_attention_heads": 4,
    }
    model = tiny_family("llama", 8, 0.0, **sizes, num_key_value_heads=2, initializer_range=0.25)
    path = tmp_path_factory.mktemp("wide")
    model.save_pretrained(path)
    return str(path)


@bnb
def test_nf4_is_the_checkpoint_rounded_to_sixteen_levels(wide_dir):
    whole, small = (load_model(wide_dir, device="cpu", quantize=how) for how in (None, "nf4"))
    assert (quantization(whole), quantization(small)) == ("none", "nf4")
    assert dtype_name(small) == "float32" and not small.training and small.device.type == "cpu"
    assert (
        parameter_count(small)
        == parameter_count(whole)
        == sum(p.numel() for p in whole.parameters())
    )
    linear = sum(p.numel() for name, p in whole.named_parameters() if "proj" in name)
    saved = memory_bytes(whole) - memory_bytes(small)
    # 32 bits become 4, a doubly quantised scale of 8 bits a block of 64, and little else.
    assert saved == pytest.approx(linear * (32 - 4 - 8 / 64) / 8, rel=0.02)
    ids_BT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.inference_mode():
        exact, near = whole(input_ids=ids_BT).logits, small(input_ids=ids_BT).logits
        alone = small(input_ids=ids_BT[:1, :1]).logits
    error = float((exact - near).norm() / exact.norm())
    assert 1e-3 < error < 0.5
    torch.testing.assert_close(alone[0, 0], near[0, 0], atol=1e-4, rtol=1e-4)


def test_an_encoder_is_refused(tmp_path, golden):
    """transformers loads BERT as a causal model; it would be trained and measured on what it peeks
    at.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = BertForMaskedLM(BertConfig(vocab_size=99, initializer_range=0.5, **sizes))
    model.save_pretrained(tmp_path)
    with golden.raises():
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(("share", "refused"), [(0.01, True), (1e-5, False)])
def test_a_model_reads_ahead_where_a_later_token_changes_more_than_rounding(
    share, refused, target_dir, monkeypatch
):
    forward = LlamaForCausalLM.forward

    def peeking(self, *given, **options):
        output = forward(self, *given, **options)
        logits_BTV = output.logits
        logits_BTV[:, :-1] += share * logits_BTV.abs().max() * logits_BTV[:, 1:].sign()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", peeking)
    with pytest.raises(InputError) if refused else nullcontext():
        load_model(target_dir, device="cpu")


GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("family", "sizes", "total", "active"),
    [
        ("mixtral", {}, 46.7, 12.9),
        ("qwen3_moe", QWEN3_30B_A3B, 30.5, 3.3),
        ("deepseek_v3", {}, 671, 37),
        ("gpt_oss", GPT_OSS_20B, 20.9, 3.6),
        ("gpt_oss", {}, 116.8, 5.1),
        ("qwen2_moe", {}, 14.3, 2.7),
    ],
)
def test_a_mixture_reads_the_experts_of_one_token(family, sizes, total, active):
    """Billions as its authors publish them: some count the embedding, which is only looked up."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    assert parameter_count(model) / 1e9 == pytest.approx(total, rel=0.005)
    embedding = model.get_input_embeddings().weight.numel()
    read = read_per_token(model)
    counted = 0 if family == "gpt_oss" else embedding
    assert (read + counted) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", ("num_local_experts", "num_experts_per_tok")),
        ("qwen2_moe", ("num_experts", "num_experts_per_tok")),
        ("deepseek_v3", ("n_routed_experts", "num_experts_per_tok")),
        ("gpt_oss", ("num_local_experts", "num_experts_per_tok")),
        ("granitemoe", ("num_local_experts", "num_experts_per_tok")),
        ("olmoe", ("num_experts", "num_experts_per_tok")),
        ("llama4_text", ("num_local_experts", "num_experts_per_tok")),
        ("ernie4_5_moe", ("moe_num_experts", "moe_k")),
        ("aria_text", ("moe_num_experts", "moe_topk")),
        ("kimi_linear", ("num_experts", "num_experts_per_token")),
        ("jetmoe", ("num_local_experts", "num_experts_per_tok")),
    ],
)
def test_experts_that_a_token_does_not_have_cost_nothing(family, names):
    """Of eight experts two, as a model that has two; but for the routers, which grow."""

    def read(experts):
        config = tiny_config(family)
        for name, count in zip(names, (experts, 2), strict=True):
            setattr(config, name, count)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return read_per_token(model), parameter_count(model)

    few, many = read(2), read(8)
    assert 0 <= many[0] - few[0] <= 2 * 4 * 6 * 33 and many[1] > many[0] + 2 * 3 * 32 * 48


def test_experts_in_a_list_are_counted_too():
    """As models with code of their own have them."""
    model: Any = nn.Module()
    model.config = AutoConfig.for_model("llama", num_experts_per_tok=1)
    model.experts = nn.ModuleList(nn.Linear(3, 5) for _ in range(4))
    model.shared_experts = nn.Linear(3, 5)
    assert read_per_token(model) == 2 * 20
