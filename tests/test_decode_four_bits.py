"""4-bit weights of bitsandbytes, multiplied by the kernel: their dequantised product, for every
kind of model.
"""

import importlib.util

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.core.models import fingerprint, load_model
from draftsmith.core.sampling import Sampling
from draftsmith.decode import SpeculativeDecoder, take_over
from draftsmith.decode.llama_forward import lean_forward
from draftsmith.decode.native import four_bit_state, kernel, pack_four_bits
from draftsmith.decode.packed_weights import packs_of

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
    ),
    pytest.mark.skipif(
        kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime"
    ),
]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def quantised(weight, **options):
    parameter = importlib.import_module("bitsandbytes.nn").Params4bit
    return parameter(weight.clone(), requires_grad=False, **options).to("cpu")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("block", [64, 128])
def test_values_are_the_dequantised_matrix_to_the_bit(kind, nested, block):
    from bitsandbytes.functional import dequantize_4bit

    functions = kernel()
    assert functions is not None
    generator = torch.Generator().manual_seed(3)
    options = {"quant_type": kind, "compress_statistics": nested, "blocksize": block}
    weights = [
        quantised(torch.randn(rows, 384, generator=generator), **options) for rows in (70, 130)
    ]
    assert all(four_bit_state(weight) is not None for weight in weights)
    exact = torch.cat([dequantize_4bit(weight.data, weight.quant_state) for weight in weights])
    matrix = pack_four_bits(functions, weights)
    assert torch.equal(matrix.rows(torch.arange(200)), exact)


def test_what_the_kernel_cannot_read_is_left_alone():
    weight = torch.randn(8, 64)
    assert four_bit_state(torch.nn.Parameter(weight)) is None
    assert (
        four_bit_state(quantised(torch.randn(8, 96), quant_type="nf4")) is None
    )  # blocks reach into the next row
    assert four_bit_state(quantised(weight.bfloat16(), quant_type="nf4")) is None
    assert four_bit_state(quantised(weight, quant_type="nf4")) is not None


def saved(path, name, **changes):
    torch.manual_seed(4)
    sizes = SIZES | ({"sliding_window": 32} if name == "gemma2" else {}) | changes
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).save_pretrained(path)
    return str(path)


# Granite runs through its own forward, whose layers the kernel takes over.
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_a_quantised_model_decodes_by_the_kernel_as_by_itself(tmp_path, monkeypatch, name):
    directory = saved(tmp_path, name)
    target = load_model(directory, device="cpu", quantize="nf4")
    before = fingerprint(target)
    calls = []
    layer = importlib.import_module("bitsandbytes.nn").Linear4bit
    forward = layer.forward

    def counted(self, x):
        calls.append("own")
        return forward(self, x)

    monkeypatch.setattr(layer, "forward", counted)
    prompts, sampling = [[5, 6, 7, 8], [9, 10]], Sampling(temperature=0.0)
    take_over(target)
    assert (lean_forward(target, packs_of(target)) is None) == (name == "granite")
    fast = SpeculativeDecoder(target).generate(prompts, sampling, 24, eos_ids=())
    assert not calls
    slow = SpeculativeDecoder(target, fast=False).generate(prompts, sampling, 24, eos_ids=())
    assert calls
    assert [row.output_ids for row in fast.generations] == [
        row.output_ids for row in slow.generations
    ]
    assert fingerprint(target) == before


def test_odd_widths_decode_through_bitsandbytes(tmp_path):
    target = load_model(
        saved(tmp_path, "llama", intermediate_size=72), device="cpu", quantize="nf4"
    )
    take_over(target)
    assert lean_forward(target, packs_of(target)) is None
    fast, slow = (
        SpeculativeDecoder(target, fast=how).generate(
            [[5, 6]], Sampling(temperature=0.0), 8, eos_ids=()
        )
        for how in (True, False)
    )
    assert fast.generations[0].output_ids == slow.generations[0].output_ids
