"""Steps of static shapes: their memory, their sizes, and what is refused. That they decode as the eager ones do, and
compile as one graph each, is in `test_decode_lossless.py` and `test_decode_greedy.py`.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import DraftModelProposer, SpeculativeDecoder
from decode.static_steps import bucket
from draftsmith_core.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    made = LlamaForCausalLM(config)
    made.eval()
    return made


@pytest.mark.usefixtures("replayed")
def test_memory_stays_where_it_is_until_it_is_too_small(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, compile="inductor")
    assert decoder.steps is not None

    def address() -> int:
        assert decoder.steps is not None
        return decoder.steps.buffers(1, 1)[0].data_ptr()

    decoder.generate([[1, 2, 3], [2]], GREEDY, 4)
    first, count = address(), decoder.steps.count
    decoder.generate([[3, 1]], GREEDY, 9)
    assert address() == first and decoder.steps.count == count + 1  # a batch of one is another step
    decoder.generate([[1]] * 5, GREEDY, 4)
    assert decoder.steps.buffers(5, 1)[0].shape[1] == 5


@pytest.mark.usefixtures("replayed")
def test_replaced_weights_are_noticed(model: LlamaForCausalLM) -> None:
    def greedy(decoder: SpeculativeDecoder) -> list[int]:
        return decoder.generate([[1, 2, 3]], GREEDY, 8).generations[0].output_ids

    decoder = SpeculativeDecoder(model, compile="inductor")
    before = greedy(decoder)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    assert greedy(decoder) == greedy(SpeculativeDecoder(model, fast=False)) != before


def test_buckets_waste_at_most_a_quarter() -> None:
    sizes = [bucket(size) for size in range(1, 2000)]
    assert all(size <= found <= 1.25 * size for size, found in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and len(set(sizes)) < 45 and all(bucket(size) == size for size in sizes)


def test_graphs_without_a_gpu_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device"):
        SpeculativeDecoder(model, compile=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_decode_as_eager_on_a_gpu(model: LlamaForCausalLM, rows: int) -> None:
    torch.nn.Module.cuda(model)
    prompts = [[1, 2, 3], [5], [4, 4]][:rows]
    for tree in ("chain:3", "kary:2,2", "chain:4,stop=0.3", "eagle2:depth=3,beam=2,nodes=5"):
        for temperature in (0.0, 1.0):
            found = []
            for graphs in (False, True):
                decoder = SpeculativeDecoder(model, DraftModelProposer(model), tree, compile=graphs)
                batch = decoder.generate(prompts, Sampling(temperature=temperature), 24, seed=1)
                found.append([(each.output_ids, each.stats) for each in batch.generations])
            assert found[0] == found[1], (tree, temperature)
