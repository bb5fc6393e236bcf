"""Law 1 at temperature 0: token for token what the target's own greedy decoding gives, in fp32."""

import copy
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode import DecodeStats, DraftModelProposer, SpeculativeDecoder
from tests.tiny_models import redrawn, stirred

GREEDY = Sampling(temperature=0.0)
VOCAB = 17
MODERN = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
}
WINDOWED = {**MODERN, "head_dim": 8, "sliding_window": 5}
OPT = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
}
ARCHITECTURES = {
    "llama": ("llama", MODERN),
    "llama-eager": ("llama", {**MODERN, "attn_implementation": "eager"}),
    "mistral-window": ("mistral", {**WINDOWED, "sliding_window": 6}),
    "qwen2": ("qwen2", MODERN),
    "qwen2-mixed": (
        "qwen2",
        {**MODERN, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**MODERN, "head_dim": 8}),
    # Untied: with random tied embeddings the most probable next token is the token itself, for
    # ever.
    "gemma2-mixed": (
        "gemma2",
        {**WINDOWED, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    ),
    "opt": ("opt", {**OPT, "max_position_embeddings": 64}),
    "gpt_neox": ("gpt_neox", {**MODERN, "num_key_value_heads": None}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "phi": ("phi", MODERN),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]
NEW_TOKENS = 12


def tiny(kind, options, seed, vocab=VOCAB):
    options = {k: v for k, v in options.items() if v is not None}
    attention = options.pop("attn_implementation", None)
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = cast(Any, CONFIG_MAPPING[kind])(vocab_size=vocab, **special, **options)
    torch.manual_seed(seed)
    model = redrawn(AutoModelForCausalLM.from_config(config, attn_implementation=attention), 0.4)
    return cast(PreTrainedModel, model.float())


@cache
def target_of(name):
    kind, options = ARCHITECTURES[name]
    return tiny(kind, options, seed=1)


@cache
def draft_of(name, relation):
    target = target_of(name)
    if relation == "itself":
        return target
    if relation == "other":
        kind, options = ARCHITECTURES[name]
        return tiny(kind, options, seed=2)
    return stirred(copy.deepcopy(target), 0.1, seed=3)


@cache
def huggingface_greedy(name, row, eos):
    model = cast(Any, target_of(name))
    prompt = torch.tensor([PROMPTS[row]])
    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    output = model.generate(prompt, max_new_tokens=NEW_TOKENS, **options)
    return [int(token) for token in output[0, prompt.shape[1] :]]


def some_eos(name):
    """A token that greedy decoding emits in the middle of row 0."""
    return huggingface_greedy(name, 0, None)[NEW_TOKENS // 2]


def decode(decoder, rows, eos=()):
    prompts = [PROMPTS[row] for row in rows]
    generators = [generator(row) for row in rows]
    return decoder.generate(prompts, GREEDY, NEW_TOKENS, generators, eos_ids=eos).generations


PAIRS = [
    ("speculative", "chain:1"),
    ("speculative", "chain:4"),
    *[
        (verifier, tree)
        for verifier in ("exact", "mcsd")
        for tree in ("chain:1", "chain:4", "kary:3,2", "kary:2,2,2")
    ],
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_autoregressive_equals_huggingface(name):
    decoder = SpeculativeDecoder(target_of(name))
    outputs = [huggingface_greedy(name, row, None) for row in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    for rows in ([0], [1], [2], [0, 1, 2]):
        generations = decode(decoder, rows)
        assert [g.output_ids for g in generations] == [outputs[row] for row in rows]
        assert all(g.stats.tau == 1.0 and g.stats.alpha_mcsd is None for g in generations)


RELATIONS = ("other", "near", "itself")


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_speculation_equals_huggingface(name, relation):
    """Every two of architecture, draft and (verifier, tree) meet: three architectures in a row
    share out the pairs.
    """
    proposer = DraftModelProposer(draft_of(name, relation))
    eos = some_eos(name)
    total = DecodeStats()
    turn = list(ARCHITECTURES).index(name) + RELATIONS.index(relation)
    for index, (verifier, tree) in enumerate(PAIRS):
        if (index + turn) % 3:
            continue
        alone, together = (None, eos) if index % 2 else (eos, None)
        decoder = SpeculativeDecoder(target_of(name), proposer, tree=tree, verifier=verifier)
        for rows, stop in (([0], alone), ([2, 0, 1], together)):
            generations = decode(decoder, rows, () if stop is None else (stop,))
            expected = [huggingface_greedy(name, row, stop) for row in rows]
            assert [g.output_ids for g in generations] == expected, (verifier, tree, stop)
            for g in generations:
                ended = stop is not None and g.output_ids[-1] == stop
                assert g.finish_reason == ("stop" if ended else "length")
                total = total + g.stats
            if relation == "itself" and stop is None:
                # All is accepted, so only every (depth + 1)-th token is the target's own.
                own = NEW_TOKENS // (decoder.tree.depth + 1)
                assert [g.stats.accepted for g in generations] == [NEW_TOKENS - own] * len(rows)
    if relation == "near":
        assert total.accept_at[0] is not None and 0 < total.accept_at[0] < 1


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_decodes_as_huggingface(name):
    expected = [huggingface_greedy(name, row, None) for row in range(3)]
    for proposer, tree in ((None, None), (DraftModelProposer(draft_of(name, "near")), "kary:2,2")):
        decoder = SpeculativeDecoder(target_of(name), proposer, tree, compile="inductor")
        batch = decoder.generate(PROMPTS, GREEDY, len(expected[0]), eos_ids=())
        assert [each.output_ids for each in batch.generations] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(set(ARCHITECTURES) - {"llama-eager", "qwen2"})
)  # others have their forwards
def test_every_architecture_is_one_graph(name):
    expected = [huggingface_greedy(name, row, None) for row in range(3)]
    torch._dynamo.reset()
    counters.clear()
    # Whether it is one graph does not depend on the backend; two see that AOTAutograd takes it.
    backend = "aot_eager" if name in ("gemma2-mixed", "gpt2") else "eager"
    decoder = SpeculativeDecoder(
        target_of(name), DraftModelProposer(draft_of(name, "near")), "chain:2", compile=backend
    )
    batch = decoder.generate(PROMPTS, GREEDY, len(expected[0]), eos_ids=())
    assert [each.output_ids for each in batch.generations] == expected
    assert not counters["graph_break"]
