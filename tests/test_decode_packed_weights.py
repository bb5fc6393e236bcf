"""Packed weights: a model that is handed in is not changed; one that was taken over gives the values it always gave."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decode import SpeculativeDecoder, packed_weights, take_over
from decode.native import kernel
from decode.packed_weights import FusedLinear, Packs, kernel_products, packs_of
from draftsmith_core.models import fingerprint
from draftsmith_core.sampling import Sampling

pytestmark = pytest.mark.skipif(kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime")


def sixteen_bit_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model in fp32 whose values 16 bits hold."""
    torch.manual_seed(3)
    model: PreTrainedModel
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, n_embd=256, n_layer=2, n_head=4))
    else:
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=kind == "tied", **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (4 if parameter.ndim == 2 else 1)).to(dtype).float())
    model.generation_config.eos_token_id = None
    model.train(False)
    return model


def decoded(model: PreTrainedModel, fast: bool = True) -> list[int]:
    out = SpeculativeDecoder(model, fast=fast).generate([[1, 2, 3]], Sampling(temperature=0.0), 12, eos_ids=())
    return out.generations[0].output_ids


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_a_model_that_is_handed_in_is_not_changed(kind: str) -> None:
    model = sixteen_bit_model(kind)
    wanted = decoded(model, fast=False)  # leaves transformers' own marks
    before, parameters = state(model), {name: id(each) for name, each in model.named_parameters()}
    looks = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    decoder = SpeculativeDecoder(model)
    assert wanted == decoder.generate([[1, 2, 3]], max_new_tokens=12, eos_ids=()).generations[0].output_ids
    assert {name: id(each) for name, each in model.named_parameters()} == parameters
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == looks
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    # Packed once for all who decode with it, and freed with the last of them.
    packs = packs_of(model)
    assert (packs.nbytes() > 0) == (kind != "gpt2") and SpeculativeDecoder(model)._packs is packs
    packed = [weakref.ref(matrix) for _, matrix in packs._beside.values()]
    del decoder, packs
    gc.collect()
    assert not any(each() for each in packed)


def test_training_between_generations_is_noticed() -> None:
    model, plain = sixteen_bit_model("llama"), sixteen_bit_model("llama")
    decoder, ids = SpeculativeDecoder(model), torch.arange(20)[None]

    def step(each: PreTrainedModel) -> None:
        torch.optim.SGD(each.parameters(), lr=0.5).zero_grad()
        each(ids, labels=ids).loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.5).step()

    def through_data(each: PreTrainedModel) -> None:
        each.lm_head.weight.data.mul_(-1)

    def exchange(each: PreTrainedModel) -> None:
        torch.manual_seed(1)
        each.model.layers[1].mlp.down_proj.weight = nn.Parameter(torch.randn(256, 512))

    for change in (step, through_data, exchange):
        before = decoder.generate([[1, 2, 3]], max_new_tokens=12, eos_ids=()).generations[0].output_ids
        change(model)
        change(plain)
        after = decoder.generate([[1, 2, 3]], max_new_tokens=12, eos_ids=()).generations[0].output_ids
        assert after == decoded(plain, fast=False) != before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("tied", torch.float16), ("gpt2", torch.float16)]
)
def test_a_model_that_was_taken_over_is_half_as_large_and_gives_the_same_values(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, untouched = sixteen_bit_model(kind, dtype), sixteen_bit_model(kind, dtype)
    ids = torch.tensor([[1, 2, 3]])
    wanted, own = fingerprint(model), decoded(model, fast=False)
    take_over(model)
    assert decoded(model) == own
    places = {id(place.matrix): place.matrix for module in model.modules() if (place := getattr(module, "place", None))}
    assert len(places) >= 8 and all(matrix.values.dtype == dtype for matrix in places.values())
    assert packs_of(model).nbytes() == 0 and decoded(model) == own
    # Who reads it gets the values, to the bit, but from the parameters themselves.
    with torch.no_grad():
        assert torch.equal(model(ids).logits, untouched(ids).logits)
    assert decoded(model, fast=False) == own and fingerprint(model) == wanted
    assert all(torch.equal(a, b) for a, b in zip(state(model).values(), state(untouched).values(), strict=True))
    packed = [parameter for parameter in model.parameters() if parameter.untyped_storage().nbytes() == 4]
    assert len(packed) >= 8 and all(parameter.isnan().all() for parameter in packed)
    assert [p.shape for p in model.parameters()] == [p.shape for p in untouched.parameters()]
    model.save_pretrained(tmp_path)
    assert fingerprint(type(model).from_pretrained(tmp_path)) == wanted
    saved = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert saved < 4.1 * sum(parameter.numel() for parameter in model.parameters())  # tied weights once
    assert decoded(copy.deepcopy(model)) == own


def test_a_projection_that_others_hold_is_packed_for_them_too() -> None:
    model = sixteen_bit_model("tied")
    projection, weight = model.get_output_embeddings(), model.get_output_embeddings().weight.detach().clone()
    freed = weakref.ref(projection.weight)
    take_over(model)
    decoded(model)
    gc.collect()
    x = torch.randn(2, 3, 256)
    with torch.no_grad():
        assert freed() is None and torch.equal(projection(x), F.linear(x, weight))
        with kernel_products():
            assert torch.equal(projection(x), projection.place.matrix.linear(x.view(6, 256)).view(2, 3, 300))
    assert torch.equal(model.get_input_embeddings()(torch.tensor([[3, 299]])), weight[torch.tensor([[3, 299]])])


def test_fused_layers_lie_side_by_side_and_add(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layers = nn.ModuleList([nn.Linear(5, 7, bias=False), nn.Linear(5, 3)])
    x, other = torch.randn(6, 5), torch.randn(6, 10)
    packs = Packs(layers)
    assert packs.matrix("small", list(layers)) is None  # small matrices gain nothing
    monkeypatch.setattr(packed_weights, "_SMALLEST", 0)
    with torch.no_grad():
        plain = torch.cat([layer(x) for layer in layers], dim=1)
        for matrix in (None, packs.matrix("both", list(layers))):
            fused = FusedLinear(list(layers), matrix, torch.float32)
            torch.testing.assert_close(fused(x), plain)
            for part, wanted in zip(fused.parts(x), plain.split((7, 3), dim=1), strict=True):
                torch.testing.assert_close(part, wanted)
            if matrix is not None:
                torch.testing.assert_close(fused.plus(x, other), plain + other)
