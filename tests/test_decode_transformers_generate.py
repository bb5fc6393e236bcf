"""`model.generate(..., custom_generate=speculative(...))` gives what `generate` gives, and refuses what it cannot."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from decode import DraftModelProposer
from decode.stop_strings import StopStrings
from decode.transformers_generate import speculative
from draftsmith_core.models import load_model


@pytest.fixture(scope="module")
def target(target_dir: str) -> PreTrainedModel:
    return load_model(target_dir, device="cpu")


@pytest.fixture(scope="module")
def ours(draft_dir: str) -> Any:
    return speculative(DraftModelProposer(load_model(draft_dir, device="cpu")), "kary:3,2", "mcsd")


def generate(target: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    return target.generate(ids, pad_token_id=0, **options)  # type: ignore[operator]


def test_a_left_padded_batch_with_many_ends(target: PreTrainedModel, ours: Any) -> None:
    ids = torch.tensor([[0, 0, 0, 60, 70], [80, 90, 100, 110, 120]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 30}
    wanted = generate(target, ids, **options)
    assert torch.equal(generate(target, ids, custom_generate=ours, **options), wanted)
    assert (wanted[:, -1] == 0).any(), "no row ended early, so padding behind it was not tried"


def test_stop_strings(target: PreTrainedModel, draft_dir: str, target_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    ids = torch.tensor([[60, 70]])
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    plain = generate(target, ids, **options)[0, 2:].tolist()
    text = str(tokenizer.decode(plain[6:8]))
    end = next(n for n in range(1, 31) if text in tokenizer.decode(plain[:n]))
    proposer = DraftModelProposer(load_model(draft_dir, device="cpu"))
    stopping = speculative(proposer, "chain:3", stop=StopStrings(tokenizer, ["never in it", text]))
    assert generate(target, ids, custom_generate=stopping, **options)[0, 2:].tolist() == plain[:end]


def test_sampling_follows_the_seed_and_the_distribution(target: PreTrainedModel, ours: Any) -> None:
    ids = torch.tensor([[60, 70]])
    options: dict[str, Any] = {"do_sample": True, "top_k": 2, "temperature": 0.7, "max_new_tokens": 1}
    torch.manual_seed(0)
    draws = generate(target, ids, num_return_sequences=4000, custom_generate=ours, **options)[:, -1]
    torch.manual_seed(0)
    assert torch.equal(draws, generate(target, ids, num_return_sequences=4000, custom_generate=ours, **options)[:, -1])
    best = (target(input_ids=ids).logits[0, -1].detach() / 0.7).topk(2)
    p = best.values.softmax(-1)
    share = (draws == best.indices[0]).float().mean()
    assert set(draws.tolist()) == set(best.indices.tolist())
    assert abs(float(share - p[0])) < 4 * float((p[0] * p[1] / 4000) ** 0.5)


def test_returns_a_dictionary_when_asked(target: PreTrainedModel, ours: Any) -> None:
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    ids = torch.tensor([[60, 70]])
    assert torch.equal(
        generate(target, ids, custom_generate=ours, **options).sequences, generate(target, ids, **options).sequences
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenalty"),
        ({"max_time": 1.0}, "MaxTime"),
        ({"num_beams": 2}, "num_beams 2"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ],
)
def test_refuses_what_it_cannot_honour(target: PreTrainedModel, ours: Any, options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        generate(target, torch.tensor([[60, 70]]), max_new_tokens=5, custom_generate=ours, **options)
