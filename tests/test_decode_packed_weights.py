"""Packed weights: a model that is handed in is not changed; one that was taken over gives the
values it always gave.
"""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from draftsmith.core.models import fingerprint, memory_bytes, parameter_count
from draftsmith.core.sampling import Sampling
from draftsmith.decode import HeadProposer, SpeculativeDecoder, packed_weights, take_over
from draftsmith.decode.native import kernel
from draftsmith.decode.packed_weights import kernel_products
from draftsmith.drafts.heads.borrowed import projection_of
from tests.tiny_models import HEADS, stirred_head
from tests.train_laws import tiny_family

pytestmark = pytest.mark.skipif(
    kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime"
)


def sixteen_bit_model(kind, dtype=torch.bfloat16):
    """A model in fp32 whose values 16 bits hold."""
    torch.manual_seed(3)
    model: PreTrainedModel
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=300, n_positions=128, n_embd=256, n_layer=2, n_head=4)
        )
    else:
        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=300, tie_word_embeddings=kind == "tied", **sizes)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (4 if parameter.ndim == 2 else 1)).to(dtype).float())
    model.generation_config.eos_token_id = None
    model.train(False)
    return model


def decoded(model, fast=True):
    out = SpeculativeDecoder(model, fast=fast).generate(
        [[1, 2, 3]], Sampling(temperature=0.0), 12, eos_ids=()
    )
    return out.generations[0].output_ids


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_a_model_that_is_handed_in_is_not_changed(kind):
    model = sixteen_bit_model(kind)
    wanted = decoded(model, fast=False)  # leaves transformers' own marks
    before, parameters = state(model), {name: id(each) for name, each in model.named_parameters()}
    looks = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    decoder = SpeculativeDecoder(model)
    assert (
        wanted
        == decoder.generate([[1, 2, 3]], max_new_tokens=12, eos_ids=()).generations[0].output_ids
    )
    assert {name: id(each) for name, each in model.named_parameters()} == parameters
    assert {
        name: (type(module), set(vars(module))) for name, module in model.named_modules()
    } == looks
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("tied", torch.float16), ("gpt2", torch.float16)]
)
def test_a_model_that_was_taken_over_is_half_as_large_and_gives_the_same_values(
    kind, dtype, tmp_path
):
    model, untouched = sixteen_bit_model(kind, dtype), sixteen_bit_model(kind, dtype)
    ids = torch.tensor([[1, 2, 3]])
    wanted, own = fingerprint(model), decoded(model, fast=False)
    take_over(model)
    assert decoded(model) == own
    places = {
        id(place.matrix): place.matrix
        for module in model.modules()
        if (place := getattr(module, "place", None))
    }
    assert len(places) >= 8 and all(matrix.values.dtype == dtype for matrix in places.values())
    assert decoded(model) == own
    # Who reads it gets the values, to the bit, but from the parameters themselves.
    with torch.no_grad():
        assert torch.equal(model(ids).logits, untouched(ids).logits)
    assert decoded(model, fast=False) == own and fingerprint(model) == wanted
    assert all(
        torch.equal(a, b)
        for a, b in zip(state(model).values(), state(untouched).values(), strict=True)
    )
    held = [(each.untyped_storage().nbytes(), each.nbytes) for each in model.parameters()]
    assert len([size for size, whole in held if size < whole]) >= 8
    assert parameter_count(model) == parameter_count(untouched)
    assert memory_bytes(model) == memory_bytes(untouched)
    assert [*dict(model.named_parameters())] == [*dict(untouched.named_parameters())]
    model.save_pretrained(tmp_path)
    assert fingerprint(type(model).from_pretrained(tmp_path)) == wanted
    saved = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert saved < 4.1 * sum(
        parameter.numel() for parameter in untouched.parameters()
    )  # tied weights once
    assert decoded(copy.deepcopy(model)) == own


def test_a_projection_that_others_hold_is_packed_for_them_too():
    model = sixteen_bit_model("tied")
    borrowed = projection_of(model)
    weight = model.get_output_embeddings().weight.detach().clone()
    freed = weakref.ref(model.get_output_embeddings().weight)
    take_over(model)
    decoded(model)
    gc.collect()
    projection: Any = borrowed.module
    x = torch.randn(2, 3, 256)
    with torch.no_grad():
        assert freed() is None and torch.equal(projection(x), F.linear(x, weight))
        with kernel_products():
            assert torch.equal(
                projection(x), projection.place.matrix.linear(x.view(6, 256)).view(2, 3, 300)
            )
    assert torch.equal(
        model.get_input_embeddings()(torch.tensor([[3, 299]])), weight[torch.tensor([[3, 299]])]
    )


def test_layers_that_another_thread_packed_meanwhile_are_found():
    model = sixteen_bit_model("llama")
    wanted = decoded(model)
    take_over(model)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    read = [attention.q_proj, attention.k_proj, attention.v_proj]
    packs = packed_weights.packs_of(model)
    matrix = packs.matrix(read)
    assert matrix is not None and packs.matrix(read) is matrix
    with ThreadPoolExecutor(4) as threads:
        together = [threads.submit(decoded, model) for _ in range(4)]
    assert [each.result() for each in together] == [wanted] * 4


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in HEADS), ("gemma2", "eagle3"), ("gemma3_text", "eagle3")],
)
def test_no_weight_is_unpacked_while_a_head_drafts(family, kind, monkeypatch):
    monkeypatch.setattr(packed_weights, "_SMALLEST", 0)
    target: Any = sixteen_bit_model(family)
    if family != "llama":
        # Its embedding, the output projection too, is scaled.
        sizes = {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32}
        target = tiny_family(family, tie_word_embeddings=True, **sizes)
    head = stirred_head(kind, target)
    plain = SpeculativeDecoder(target, HeadProposer(head, fast=False), tree="chain:3", fast=False)
    prompts = [[5, 6, 7], [8, 9]]
    expected = plain.generate(prompts, max_new_tokens=12, eos_ids=()).generations
    take_over(target)
    take_over(head)
    decoder = SpeculativeDecoder(target, HeadProposer(head), tree="chain:3")
    decoder.generate(prompts, max_new_tokens=1, eos_ids=())
    unpacked = []
    monkeypatch.setattr(packed_weights.PackedRows, "values", lambda place: unpacked.append(place))
    generations = decoder.generate(prompts, max_new_tokens=12, eos_ids=()).generations
    assert not unpacked
    assert [row.output_ids for row in generations] == [row.output_ids for row in expected]
