"""Steps of static shapes: their memory, their sizes, and what is refused. That they decode as the eager ones do, and
compile as one graph each, is in `test_decode_lossless.py` and `test_decode_greedy.py`.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import DraftModelProposer, SpeculativeDecoder
from decode.static_steps import bucket
from draftsmith_core.sampling import Sampling
from tests.tiny_models import random_llama

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return random_llama(1, 40)


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


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("drafting", [False, True])
def test_threads_take_turns(model: LlamaForCausalLM, drafting: bool) -> None:
    """Every call writes the same buffers, so that two at once would each read what the other has cached."""
    proposer = DraftModelProposer([model]) if drafting else None
    decoder = SpeculativeDecoder(model, proposer, "chain:2" if drafting else None, compile="inductor")

    def greedy(prompt: list[int]) -> list[int]:
        return decoder.generate([prompt], GREEDY, 24, eos_ids=()).generations[0].output_ids

    prompts = [[1, 2, 3], [7], [5, 30, 2, 9]]
    alone = [greedy(prompt) for prompt in prompts]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            assert list(threads.map(greedy, prompts * 3)) == alone * 3
    finally:
        sys.setswitchinterval(switch)
