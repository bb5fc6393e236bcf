"""The forward of a LLaMA as one call: equal to the tensor operations, and to itself to the bit in any tree."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decode import DraftModelProposer, SpeculativeDecoder
from decode import llama_forward as forward_module
from decode import packed_weights as packed_module
from decode.llama_forward import LeanForward
from decode.native import Kernel, kernel
from decode.packed_weights import packs_of
from decode.runner import Block, Runner
from decode.supported_models import attention_windows
from draftsmith_core.sampling import Sampling
from tests.native_builds import PARAMETERS, built_for

pytestmark = pytest.mark.skipif(kernel() is None, reason="no C compiler with OpenMP here, or torch has another runtime")

# Heads that fill no vector, that fill several, and one key/value head for all.
MODELS: dict[str, Any] = {
    "grouped": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}),
    "one group": (LlamaForCausalLM, LlamaConfig, {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10}),
    "biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "head norms": (Qwen3ForCausalLM, Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 36}),
}


@torch.inference_mode(False)
def build(name: str) -> LlamaForCausalLM:
    torch.manual_seed(len(name))
    model, config, changes = MODELS[name]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 83, "hidden_size": 72}
    made = model(config(**sizes | changes, intermediate_size=100, num_hidden_layers=3, max_position_embeddings=256))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.9 if parameter.ndim == 1 else 0, 0.2)
    eval_mode: LlamaForCausalLM = made.train(False)
    return eval_mode


@pytest.fixture(params=PARAMETERS, scope="module")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return built_for(request.param, tmp_path_factory)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, library: Kernel) -> Iterator[list[int]]:
    """Every model goes through the kernel, built as the test says; counts its forwards."""
    monkeypatch.setattr(forward_module, "_SMALLEST_MODEL", 0)
    monkeypatch.setattr(packed_module, "_SMALLEST", 0)
    for module in (forward_module, packed_module):
        monkeypatch.setattr(module, "kernel", lambda: library)
    calls: list[int] = []
    run = LeanForward._call

    def counted(self: LeanForward, *values: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        calls.append(values[0].numel())
        return run(self, *values)

    monkeypatch.setattr(LeanForward, "_call", counted)
    yield calls


def chain(count: int) -> Block:
    sees = torch.ones(1, count, count, dtype=torch.bool).tril()
    return Block(torch.arange(count).unsqueeze(0), sees, static=True)


# The root, two children, and a child of each.
TREE = Block(
    torch.tensor([[0, 1, 1, 2, 2]]),
    torch.tensor([[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]]).bool(),
    static=True,
)


def runner(model: LlamaForCausalLM, prompts: list[list[int]]) -> Runner:
    made = Runner(model, attention_windows(model), 256, packs_of(model))
    made.prefill(prompts, 40)
    return made


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_equals_tensor_operations(whole: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = build(name)
    prompts = [list(range(1, 38)), list(range(2, 21))]
    tokens = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])

    def outputs() -> list[Tensor]:
        found = []
        run = runner(model, prompts)
        for kept in (0, 2):
            run.open()
            logits, states = run.forward(tokens, TREE, keep_logits=kept, hidden_layers=(0, 2, -1))
            run.keep([[0, 2, 4], [0, 1]])
            found += [logits, *states]
        return found

    ours = outputs()
    assert whole == [10, 10]
    monkeypatch.setattr(LeanForward, "_whole", lambda self: None)
    theirs = outputs()
    assert whole == [10, 10]
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_in_a_tree(whole: list[int], name: str) -> None:
    model = build(name)
    prompt, tokens = list(range(1, 30)), [4, 9, 7, 2, 8]
    alone, together = runner(model, [prompt]), runner(model, [prompt])
    together.open()
    tree, _ = together.forward(torch.tensor([tokens]), TREE)
    one_by_one = []
    for node in (0, 2, 4):
        alone.open()
        logits, _ = alone.forward(torch.tensor([[tokens[node]]]), chain(1))
        alone.keep([[0]])
        one_by_one.append(logits[0, 0])
    assert torch.equal(torch.stack(one_by_one), tree[0, [0, 2, 4]])
    # After the path has moved up in the cache, too.
    together.keep([[0, 2, 4]])
    together.open()
    alone.open()
    next_token = torch.tensor([[6]])
    assert torch.equal(together.forward(next_token, chain(1))[0], alone.forward(next_token, chain(1))[0])


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_many_queries_behind_a_long_cache(whole: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # More slots than one block of keys, and more queries with one key/value head than are taken together.
    model = build(name)
    prompt, tokens = [place % 80 for place in range(150)], torch.arange(35).unsqueeze(0)

    def outputs(pieces: list[Tensor]) -> Tensor:
        run, found = runner(model, [prompt]), []
        for piece in pieces:
            run.open()
            found.append(run.forward(piece, chain(piece.shape[1]))[0])
            run.keep([list(range(piece.shape[1]))])
        return torch.cat(found, dim=1)

    together = outputs([tokens])
    assert torch.equal(outputs(list(tokens.split([1, 20, 14], dim=1))), together)
    assert len(whole) == 4
    monkeypatch.setattr(LeanForward, "_whole", lambda self: None)
    torch.testing.assert_close(outputs([tokens]), together, atol=2e-4, rtol=1e-4)
    assert len(whole) == 4


@torch.inference_mode()
def test_threads_do_not_change_the_bits(whole: list[int]) -> None:
    run = runner(build("one group"), [list(range(1, 38))])
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            run.open()
            found.append(run.forward(torch.tensor([[5, 6, 7, 8, 9]]), TREE)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_speculation_gives_the_tokens_of_no_draft(whole: list[int]) -> None:
    target, draft = build("grouped"), build("tied")
    prompts = [list(range(1, 20)), [4, 5], list(range(7, 40))]
    plain = SpeculativeDecoder(target).generate(prompts, Sampling(temperature=0.0), 30, eos_ids=())
    for tree in ("chain:3", "kary:3,2", "eagle2:depth=3,beam=3,nodes=8"):
        decoder = SpeculativeDecoder(target, DraftModelProposer(draft), tree)
        drafted = decoder.generate(prompts, Sampling(temperature=0.0), 30, eos_ids=())
        assert [row.output_ids for row in drafted.generations] == [row.output_ids for row in plain.generations]
    assert len(whole) > 30


@torch.inference_mode()
def test_what_is_not_a_number_stays_none_and_large_numbers_are_right(whole: list[int]) -> None:
    with torch.inference_mode(False):
        model = build("grouped")
        model.model.layers[1].mlp.gate_proj.weight.data.mul_(2e3)  # far beyond what exp can hold
    run = runner(model, [[1, 2, 3]])
    run.open()
    (ours, _), own = run.forward(torch.tensor([[4, 5]]), chain(2)), model(torch.tensor([[1, 2, 3, 4, 5]])).logits[:, 3:]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours / own.abs().max(), own / own.abs().max(), atol=1e-4, rtol=1e-3)
    with torch.inference_mode(False):
        model.model.layers[0].input_layernorm.weight.data[3] = float("nan")
    run = runner(model, [[1, 2, 3]])
    run.open()
    assert run.forward(torch.tensor([[4, 5]]), chain(2))[0].isnan().all()


@torch.inference_mode()
def test_a_token_outside_the_vocabulary_is_refused(whole: list[int]) -> None:
    run = runner(build("tied"), [[1, 2, 3]])
    for token in (83, -1):
        run.open()
        with pytest.raises(IndexError, match="a token outside 0..82"):
            run.forward(torch.tensor([[token]]), chain(1))
