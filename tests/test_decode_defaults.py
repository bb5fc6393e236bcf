"""Defaults, parts of one's own, and models that are refused with the reason that is theirs."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.decode import (
    DraftModelProposer,
    LookaheadProposer,
    PromptLookupProposer,
    SpeculativeDecoder,
    parse_tree,
)
from draftsmith.decode.method import OWN_TREE, Method
from tests.tiny_models import random_llama
from tests.train_laws import tiny_family

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 1, 0, 1]]


def tiny(seed, eos=None):
    return random_llama(seed, 11, positions=96, eos=eos)


def test_the_tree_that_suits_a_proposer():
    target = tiny(1)
    own = SpeculativeDecoder(target, LookaheadProposer()).tree
    assert own == Method.of(OWN_TREE).shape and not own.is_chain
    assert SpeculativeDecoder(target, PromptLookupProposer()).tree == parse_tree("chain:4")


def test_a_seed_gives_every_row_its_own_generator():
    decoder = SpeculativeDecoder(tiny(1), DraftModelProposer(tiny(2)), "kary:2,2")
    warm = Sampling(temperature=1.0)

    def outputs(**options):
        return [
            g.output_ids for g in decoder.generate([[1, 2]] * 3, warm, 24, **options).generations
        ]

    assert (
        outputs()
        == outputs(seed=0)
        == outputs(generators=[generator(row_seed(0, str(row))) for row in range(3)])
    )
    assert len({tuple(ids) for ids in outputs()}) == 3
    assert outputs(seed=1) != outputs()
    alone = decoder.generate([[1, 2]], warm, 24).generations[0].output_ids
    assert alone == outputs()[0]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
@pytest.mark.parametrize("bad", ["target", "draft"])
@pytest.mark.parametrize("tree", ["chain:2", "kary:2,2", "eagle2:depth=2,beam=2,nodes=4"])
def test_logits_that_are_not_finite_are_an_error_that_names_the_model(tree, bad, sampling, golden):
    target, draft = tiny(1), tiny(2)
    target.name_or_path, draft.name_or_path = "the/target", "the/draft"
    decoder = SpeculativeDecoder(target, DraftModelProposer(draft), tree)
    damaged = target if bad == "target" else draft
    with torch.no_grad():
        damaged.lm_head.weight[3, 5] = torch.nan
    with golden.raises():
        decoder.generate(PROMPTS, sampling, 8)
    with torch.no_grad():
        damaged.lm_head.weight[3, 5] = torch.inf
    with golden.raises():
        decoder.generate(PROMPTS * 4, sampling, 40)


def test_a_proposer_serves_targets_of_several_vocabularies():
    """What a proposer learned of one target must not leak into the decoder of another."""
    proposer = DraftModelProposer(tiny(2))
    decoder = SpeculativeDecoder(tiny(1), proposer)
    before = decoder.generate(PROMPTS, GREEDY, 12).generations
    wide = LlamaForCausalLM(LlamaConfig(**{**tiny(1).config.to_dict(), "vocab_size": 19}))
    SpeculativeDecoder(wide.eval(), proposer).generate(PROMPTS, GREEDY, 12)
    assert decoder.generate(PROMPTS, GREEDY, 12).generations == before


REASONS = "mamba rwkv openai-gpt bloom gpt_neo lfm2 llama olmo2 olmoe doge bert electra roberta"


@pytest.mark.parametrize("kind", REASONS.split())
def test_the_reason_is_the_right_one(kind, golden):
    options: dict[str, dict[str, Any]] = {
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "llama": {"sliding_window": 8},
        "olmoe": {"sliding_window": 8, "num_experts": 2, "num_experts_per_tok": 1},
        "olmo2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2},
    }
    with golden.raises(ValueError):
        model = tiny_family(kind, **options.get(kind, {}))
        SpeculativeDecoder(model, PromptLookupProposer(), "kary:2,1")


def test_a_window_is_a_matter_of_the_class_and_not_of_words_in_its_file(golden):
    class Own(LlamaForCausalLM):  # type: ignore[misc, unused-ignore]
        """In a file that says sliding_window."""

    config = LlamaConfig(**tiny(1).config.to_dict() | {"sliding_window": 8})
    model: PreTrainedModel = Own(config)
    with golden.raises():
        SpeculativeDecoder(model, PromptLookupProposer(), "kary:2,1")
