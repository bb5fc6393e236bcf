"""A parameter whose values are packed says and gives what it always did, to every reader; writers get it back."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decode import SpeculativeDecoder
from decode.native import kernel
from decode.packed_weight import PackedWeight, kernel_products, pack_weights, unpack, unpack_model
from draftsmith_core.models import fingerprint
from draftsmith_core.sampling import Sampling

pytestmark = pytest.mark.skipif(kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime")


def packed_layer(bias: bool = True) -> tuple[nn.Linear, Tensor]:
    """A packed linear layer of 300 inputs and 200 outputs, and its weight as it was."""
    torch.manual_seed(0)
    layer = nn.Linear(300, 200, bias=bias)
    layer.weight.data = layer.weight.data.bfloat16().float()
    before = layer.weight.detach().clone()
    functions = kernel()
    assert functions is not None and pack_weights(functions, [layer.weight]) is not None
    assert type(layer.weight) is PackedWeight and layer.weight.place.matrix.values.dtype == torch.bfloat16
    return layer, before


def test_it_says_what_a_parameter_says_and_stays_packed() -> None:
    layer, before = packed_layer()
    weight = layer.weight
    assert isinstance(weight, nn.Parameter) and dict(layer.named_parameters())["weight"] is weight
    assert weight.shape == before.shape and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert weight.requires_grad and weight.grad is None and weight.is_leaf and weight.is_floating_point()
    assert (weight.numel(), weight.dim(), weight.ndim, len(weight), weight.size(0)) == (60000, 2, 2, 200, 200)
    assert weight.nbytes == 240000 and weight.element_size() == 4
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad
    assert type(layer.weight) is PackedWeight


@torch.no_grad()
def test_a_forward_by_anybody_gives_the_same_bits_and_leaves_it_packed() -> None:
    layer, before = packed_layer()
    x, ids = torch.randn(2, 3, 300), torch.tensor([[3, 199], [0, 3]])
    assert torch.equal(layer(x), F.linear(x, before, layer.bias))
    assert torch.equal(F.embedding(ids, layer.weight), before[ids])
    assert torch.equal(x[0, :, :200] @ layer.weight, x[0, :, :200] @ before)
    with kernel_products():
        inside = layer(x)
    torch.testing.assert_close(inside, F.linear(x, before, layer.bias))
    weight = layer.weight
    assert isinstance(weight, PackedWeight)
    assert torch.equal(inside, weight.place.matrix.linear(x.view(6, 300), layer.bias).view(2, 3, 200))


READERS: dict[str, Callable[[nn.Linear], Tensor]] = {
    "data": lambda layer: layer.weight.data,
    "detach": lambda layer: layer.weight.detach(),
    "state_dict": lambda layer: layer.state_dict()["weight"],
    "view": lambda layer: layer.weight.view(-1).view(200, 300),
    "numpy": lambda layer: torch.from_numpy(layer.weight.detach().numpy()),
    "deepcopy": lambda layer: copy.deepcopy(layer).weight,
    "copy of the parameter": lambda layer: copy.deepcopy(layer.weight),
    "to": lambda layer: copy.deepcopy(layer).to(torch.float64).weight.float(),
    "clone": lambda layer: layer.weight.clone(),
    "list": lambda layer: torch.stack([layer.weight])[0],
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_it_gets_the_values(name: str) -> None:
    layer, before = packed_layer()
    weight = layer.weight
    assert torch.equal(READERS[name](layer), before)
    assert layer.weight is weight and type(weight) is nn.Parameter and torch.equal(weight, before)


def test_saving_gives_the_values() -> None:
    layer, before = packed_layer()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], before)


def add_to_row(layer: nn.Linear) -> None:
    layer.weight[3] += 1


def step(layer: nn.Linear) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with torch.enable_grad():
        layer(torch.ones(1, 300))[0, 3].backward()
    optimizer.step()


WRITERS: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.add_(1),
    "through data": lambda layer: layer.weight.data.mul_(2),
    "set data": lambda layer: setattr(layer.weight, "data", torch.ones(200, 300)),
    "through detach": lambda layer: layer.weight.detach().zero_(),
    "a row": add_to_row,
    "init": lambda layer: nn.init.normal_(layer.weight),
    "load": lambda layer: layer.load_state_dict({"weight": torch.ones(200, 300)}, strict=False),
    "all at once": lambda layer: torch._foreach_add_(list(layer.parameters()), 1),
    "optimizer": step,
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_writes_to_it_writes_to_an_ordinary_parameter(name: str) -> None:
    torch.manual_seed(5)
    layer, before = packed_layer()
    plain = nn.Linear(300, 200)
    plain.load_state_dict({"weight": before, "bias": layer.bias})
    weight = layer.weight
    for each in (plain, layer):
        torch.manual_seed(1)
        with torch.no_grad():
            WRITERS[name](each)
    assert layer.weight is weight and type(weight) is nn.Parameter
    assert torch.equal(weight, plain.weight) and not torch.equal(weight, before)


def test_an_optimizer_made_before_trains_what_is_decoded_with() -> None:
    layer, before = packed_layer()
    unpack(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters())
    functions = kernel()
    assert functions is not None
    for _ in range(3):
        assert pack_weights(functions, [layer.weight]) is not None
        optimizer.zero_grad()
        layer(torch.randn(4, 300)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(layer.weight, before)
    assert pack_weights(functions, [layer.weight]) is not None and layer.weight.grad is not None


def test_a_weight_in_an_unfinished_graph_stays_as_it_is() -> None:
    layer, _ = packed_layer()
    unpack(layer.weight)
    x = torch.randn(2, 300, requires_grad=True)
    loss = layer(x).sum()  # the graph keeps the weight, to give x its gradient
    functions = kernel()
    assert functions is not None
    assert pack_weights(functions, [layer.weight]) is None and type(layer.weight) is nn.Parameter
    loss.backward()
    assert x.grad is not None and layer.weight.grad is not None


def test_a_transposed_weight() -> None:
    torch.manual_seed(0)
    layer = Conv1D(70, 50)
    layer.weight.data = layer.weight.data.half().float()
    x, before = torch.randn(2, 3, 50), layer.weight.detach().clone()
    functions = kernel()
    assert functions is not None and pack_weights(functions, [layer.weight], transposed=True) is not None
    with torch.no_grad():
        assert torch.equal(layer(x), torch.addmm(layer.bias, x.view(6, 50), before).view(2, 3, 70))
        with kernel_products():
            torch.testing.assert_close(layer(x).view(6, 70), torch.addmm(layer.bias, x.view(6, 50), before))
    assert type(layer.weight) is PackedWeight and torch.equal(layer.weight, before)


def sixteen_bit_model(kind: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=128, n_embd=256, n_layer=2, n_head=4))
    else:
        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = LlamaConfig(vocab_size=300, num_key_value_heads=2, tie_word_embeddings=kind == "tied", **sizes)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (4 if parameter.ndim == 2 else 1)).to(dtype).float())
    model.generation_config.eos_token_id = None
    model.train(False)
    return model


def decoded(model: PreTrainedModel, fast: bool = True) -> list[int]:
    out = SpeculativeDecoder(model, fast=fast).generate([[1, 2, 3]], Sampling(temperature=0.0), 12, eos_ids=())
    return out.generations[0].output_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_decoding_packs_a_model_in_half_and_everything_else_still_works(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = sixteen_bit_model(kind, dtype)
    ids = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    wanted = model.generate(ids, **options)[0, 3:].tolist()  # type: ignore[operator]
    own = decoded(model, fast=False)
    print_before = fingerprint(model)
    with torch.no_grad():
        logits = model(ids).logits
    assert wanted == own == decoded(model)
    packed = [weight for weight in model.parameters() if type(weight) is PackedWeight]
    assert len(packed) >= 8 and all(weight.place.matrix.values.dtype == dtype for weight in packed)
    # The model's own forward, and this engine without packed weights, to the bit; the weights stay packed.
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    assert model.generate(ids, **options)[0, 3:].tolist() == wanted == decoded(model, fast=False)  # type: ignore[operator]
    assert all(type(weight) is PackedWeight for weight in packed)
    assert fingerprint(model) == print_before
    assert wanted == decoded(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert fingerprint(again) == print_before
    saved = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert saved < 4.1 * sum(parameter.numel() for parameter in model.parameters())  # tied weights once
    assert wanted == decoded(model)
    unpack_model(model)
    assert not any(type(weight) is PackedWeight for weight in model.parameters())


def test_two_decoders_share_one_packed_matrix() -> None:
    model = sixteen_bit_model("llama")
    decoders = [SpeculativeDecoder(model) for _ in range(2)]
    for each in decoders:
        each.generate([[1, 2, 3]], Sampling(temperature=0.0), 3, eos_ids=())
    one, two = ({name: id(matrix) for name, matrix in each._packs._matrices.items()} for each in decoders)  # type: ignore[union-attr]
    assert one == two and one


def test_training_after_decoding_is_training() -> None:
    losses = []
    for decodes in (False, True):
        model = sixteen_bit_model("tied")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.arange(20)[None]
        for _ in range(2):
            if decodes:
                decoded(model)
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
