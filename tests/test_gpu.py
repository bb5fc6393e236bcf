"""What needs a CUDA device. Stands alone, so that it runs where only torch, transformers and pytest
are installed:

python -m pytest --noconftest -m gpu tests/test_gpu.py
"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.core.devices import resolve_device
from draftsmith.core.sampling import Sampling
from draftsmith.decode import DraftModelProposer, PromptLookupProposer, SpeculativeDecoder
from draftsmith.train.batch import Batch
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees.lm import LMTrainee
from tests.tiny_models import random_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[1, 2, 3], [5], [4, 4, 7, 9, 4]]


def llama(seed, device="cuda"):
    model = random_llama(seed, 61, hidden=64, heads=4)
    torch.nn.Module.to(model, device)
    return model


def gpt2():
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3
        )
    )
    torch.nn.Module.to(model, "cuda")
    model.eval()
    return model


@pytest.mark.parametrize(
    "tree", ["chain:3", "kary:2,2", "chain:4,stop=0.3", "eagle2:depth=3,beam=2,nodes=5", None]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_decode_as_eager(tree, rows):
    target, draft = llama(1), llama(2)
    for temperature in (0.0, 1.0):
        found = []
        for graphs in (False, True):
            proposer = None if tree is None else DraftModelProposer(draft)
            decoder = SpeculativeDecoder(target, proposer, tree, compile=graphs)
            # The second call replays what the first recorded, on another batch.
            for prompts in (PROMPTS[:rows], PROMPTS[::-1][:rows]):
                batch = decoder.generate(
                    prompts, Sampling(temperature=temperature), 24, seed=1, eos_ids=()
                )
                found.append([(each.output_ids, each.stats) for each in batch.generations])
            if graphs:
                assert sum(steps.count for steps in decoder.every_steps) > 0
        assert found[:2] == found[2:], (tree, temperature)


@pytest.mark.parametrize("proposer", [None, PromptLookupProposer()])
def test_graphs_of_a_models_own_forward(proposer):
    model = gpt2()
    found = [
        SpeculativeDecoder(model, proposer, compile=graphs)
        .generate(PROMPTS, max_new_tokens=24, eos_ids=())
        .generations
        for graphs in (False, True)
    ]
    assert [each.output_ids for each in found[0]] == [each.output_ids for each in found[1]]


def test_cuda_is_the_card_of_this_process(monkeypatch):
    assert resolve_device("cuda") == resolve_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count() - 1))
    assert resolve_device("cuda").index == torch.cuda.device_count() - 1


def test_a_gpu_decodes_as_a_cpu():
    on_gpu, on_cpu = (
        SpeculativeDecoder(
            llama(1, device), DraftModelProposer(llama(2, device)), "kary:2,2"
        ).generate(PROMPTS, max_new_tokens=24, eos_ids=())
        for device in ("cuda", "cpu")
    )
    assert [each.output_ids for each in on_gpu.generations] == [
        each.output_ids for each in on_cpu.generations
    ]


def test_a_training_step_is_that_of_a_cpu():
    ids = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for device in ("cuda", "cpu"):
        draft = llama(2, device)
        trainee = LMTrainee(draft, parse_objective("jsd"), llama(1, device)).train()
        trainee(Batch(ids, ids.roll(-1, 1)).to(torch.device(device))).loss.backward()
        gradients.append(
            [parameter.grad for parameter in draft.parameters() if parameter.grad is not None]
        )
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=1e-3)
