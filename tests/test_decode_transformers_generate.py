"""`model.generate(..., custom_generate=speculative(...))` gives what `generate` gives, and refuses what it cannot."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from decode import DraftModelProposer
from decode.batch_run import StopStrings
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
    as_dictionary = generate(target, ids, custom_generate=ours, return_dict_in_generate=True, **options)
    assert torch.equal(as_dictionary.sequences, wanted)
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenalty"),
        ({"max_time": 1.0}, "MaxTime"),
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"position_ids": torch.tensor([[5, 6]])}, "leave out position_ids"),
        ({"position_ids": torch.zeros(3, 1, 2, dtype=torch.long)}, "leave out position_ids"),
        ({"suppress_tokens": [3]}, "SuppressTokens"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ],
)
def test_refuses_what_it_cannot_honour(target: PreTrainedModel, ours: Any, options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        generate(target, torch.tensor([[60, 70]]), max_new_tokens=5, custom_generate=ours, **options)


def test_what_generate_itself_passes_is_accepted(target: PreTrainedModel, ours: Any) -> None:
    ids, mask = torch.tensor([[0, 0, 60, 70], [3, 1, 60, 70]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "use_cache": True}
    expected = generate(target, ids, **options)
    assert torch.equal(generate(target, ids, custom_generate=ours, **options), expected)
    assert torch.equal(generate(target, ids, custom_generate=ours, position_ids=positions, **options), expected)


def test_min_p_is_followed(target: PreTrainedModel, ours: Any) -> None:
    ids = torch.tensor([[60, 70]])
    p = (target(input_ids=ids).logits[0, -1].detach()).softmax(-1)
    least = float(p.sort(descending=True).values[2])
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "num_return_sequences": 600}
    drawn = generate(target, ids, custom_generate=ours, min_p=least / float(p.max()) * 0.999, **options)[:, -1]
    assert set(drawn.tolist()) == set(p.topk(3).indices.tolist())


@pytest.mark.parametrize("name", ["token_type_ids", "pixel_values", "encoder_outputs"])
def test_a_model_argument_that_would_be_dropped_is_refused(name: str) -> None:
    """GPT-2 adds an embedding of token_type_ids, models with images read pixel_values: outputs would differ."""
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=None)
    model, ids = GPT2LMHeadModel(config).eval(), torch.tensor([[6, 7]])
    with pytest.raises(ValueError, match=f"cannot honour {name}; leave it out"):
        if name == "token_type_ids":
            generate(model, ids, custom_generate=speculative(None), token_type_ids=ids, max_new_tokens=3)
        else:
            arguments: Any = (LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig(max_length=5))
            speculative(None)(model, ids, *arguments, **{name: torch.zeros(1)})
