"""Models: what is loaded, what is refused, how two are told apart, and how much memory was held."""

import importlib.util
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from draftsmith_core.errors import InputError
from draftsmith_core.models import (
    context_length,
    dtype_name,
    eos_ids,
    fingerprint,
    load_model,
    memory_bytes,
    parameter_count,
    quantization,
    vocabulary_size,
)
from tests.train_laws import tiny_family


def test_a_model_is_loaded_whole_and_ready(target_dir):
    model = load_model(target_dir, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert (vocabulary_size(model), context_length(model)) == (290, 96)
    assert eos_ids(model)[0] == 1
    assert len(eos_ids(model)) == 17
    assert load_model(target_dir, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    model.generation_config.eos_token_id = [1, "</s>"]
    with pytest.raises(InputError, match="its eos_token_id is .*; write token ids"):
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


def test_an_encoder_is_refused(tmp_path):
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
    with pytest.raises(InputError, match="reads tokens ahead, as encoders do; name a causal model"):
        load_model(str(tmp_path), device="cpu")
