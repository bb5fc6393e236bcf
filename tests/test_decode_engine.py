"""The engine: rows are independent, blocks are cut and counted right, cached forwards equal plain
ones.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.decode.propose.head_proposers import HeadProposer
from tests.tiny_models import redrawn, stirred, stirred_head, tiny_llama
from tests.train_laws import tiny_family

VOCAB = 17
GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=0.9, top_p=0.95)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [7, 2], [2, 7, 1, 8], [5, 5, 5], [1, 16, 2, 3, 4]]


@cache
def model_of(kind, seed, limit=64):
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": limit}
    sizes |= {"word_embed_proj_dim": 16, "eos_token_id": None}
    return redrawn(tiny_family(kind, seed, **sizes), 0.35)


def test_counts_of_a_hand_computed_run():
    """Draft = target and greedy: everything is accepted. chain:3, 10 tokens: blocks of 4, 4 and a
    cut 2.
    """
    target = model_of("llama", 1)
    decoder = SpeculativeDecoder(target, DraftModelProposer(target), "chain:3", "speculative")
    g = decoder.generate([PROMPTS[0]], GREEDY, 10, [generator(0)]).generations[0]
    assert g.from_draft == [True, True, True, False] * 2 + [True, True]
    s = g.stats
    assert (s.target_calls, s.emitted, s.proposed, s.accepted, s.depth_sum) == (3, 10, 9, 8, 9)
    assert s.accepted_by_depth == (3, 3, 2)
    # In the last block depth 3 was on offer but beyond max_new_tokens: not reached.
    assert s.reached_by_depth == (3, 3, 2)
    assert s.tau == 10 / 3 and s.alpha_mcsd == 8 / 9 and s.accept_at == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("place", range(8))
def test_eos_inside_an_accepted_block_ends_and_cuts_the_counts(place):
    target = model_of("llama", 1)
    full = SpeculativeDecoder(target).generate([PROMPTS[2]], GREEDY, 8, [generator(0)])
    ids = full.generations[0].output_ids
    eos = ids[place]
    first = ids.index(eos)
    decoder = SpeculativeDecoder(target, DraftModelProposer(target), "chain:3", "speculative")
    streamed: list[tuple[int, list[int], list[bool]]] = []
    g = decoder.generate(
        [PROMPTS[2]],
        GREEDY,
        8,
        [generator(0)],
        eos_ids=(eos,),
        on_tokens=lambda row, tokens, drafted: streamed.append((row, tokens, drafted)),
    ).generations[0]
    assert g.output_ids == ids[: first + 1] and g.finish_reason == "stop"
    blocks, rest = divmod(first + 1, 4)
    steps = blocks + (rest > 0)
    assert (g.stats.target_calls, g.stats.emitted) == (steps, first + 1)
    assert g.stats.accepted == sum(g.from_draft) == 3 * blocks + rest
    by_depth = tuple(blocks + (rest >= depth) for depth in (1, 2, 3))
    assert g.stats.accepted_by_depth == g.stats.reached_by_depth == by_depth
    assert [token for _, tokens, _ in streamed for token in tokens] == g.output_ids
    assert [flag for _, _, flags in streamed for flag in flags] == g.from_draft
    assert len(streamed) == steps and {row for row, _, _ in streamed} == {0}


def test_a_refused_draft_counts_as_reached_but_not_accepted():
    target, draft = model_of("llama", 1), model_of("llama", 2)
    decoder = SpeculativeDecoder(target, DraftModelProposer(draft), "kary:2,2", "exact")
    g = decoder.generate([PROMPTS[0]], WARM, 40, [generator(3)]).generations[0]
    s = g.stats
    assert s.reached_by_depth[0] in (s.target_calls, s.target_calls - 1)
    assert s.accepted_by_depth[0] - 1 <= s.reached_by_depth[1] <= s.accepted_by_depth[0]
    assert 0 < s.accepted < s.target_calls * 2
    assert s.accepted == sum(s.accepted_by_depth) == sum(g.from_draft)
    assert s.emitted == len(g.output_ids) == 40
    assert s.emitted in (s.accepted + s.target_calls, s.accepted + s.target_calls - 1)
    assert s.proposed == 6 * s.target_calls and s.depth_sum == 2 * s.target_calls


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_the_context_may_be_filled_to_the_last_token(kind):
    """Trees reach beyond the last position that can be emitted; learned positions must not
    overflow.
    """
    target, draft = model_of(kind, 1, limit=20), model_of(kind, 2, limit=20)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2]]
    plain = SpeculativeDecoder(target).generate(prompts, GREEDY, 14, [generator(0)] * 2)
    for source in (draft, target):
        decoder = SpeculativeDecoder(target, DraftModelProposer(source), "chain:4", "exact")
        batch = decoder.generate(prompts, GREEDY, 14, [generator(0)] * 2)
        assert [g.output_ids for g in batch.generations] == [
            g.output_ids for g in plain.generations
        ]


def test_context_limits_are_checked_before_anything_runs(golden):
    long, short = model_of("llama", 1), model_of("llama", 1, limit=20)
    with golden.raises(ValueError):
        SpeculativeDecoder(short).generate([PROMPTS[0]], GREEDY, 14)
    with golden.raises(ValueError):
        SpeculativeDecoder(long, DraftModelProposer(short)).generate([PROMPTS[0]], GREEDY, 14)


def test_parts_that_do_not_fit_are_refused(golden):
    target, proposer = model_of("llama", 1), DraftModelProposer(model_of("llama", 2))
    for parts in (
        (proposer, "kary:4,2", "speculative"),
        (proposer, "chain:2", "medusa"),
        (None, "chain:4", None),
    ):
        with golden.raises(ValueError):
            SpeculativeDecoder(target, *parts)
    decoder = SpeculativeDecoder(target, proposer, "kary:1,1", "speculative")
    for prompt in ([], [VOCAB], [2, -1]):
        with golden.raises(ValueError):
            decoder.generate([[1], prompt], GREEDY, 4)
    assert decoder.generate([], GREEDY, 4, []).generations == []


@pytest.mark.parametrize("name", ["target", "draft"])
def test_training_mode_is_refused_when_it_is_switched_on_later(name, golden):
    models = {
        "target": copy.deepcopy(model_of("llama", 1)),
        "draft": copy.deepcopy(model_of("llama", 2)),
    }
    decoder = SpeculativeDecoder(models["target"], DraftModelProposer(models["draft"]), "chain:2")
    models[name].train()
    with golden.raises(ValueError):
        decoder.generate([PROMPTS[0]], GREEDY, 4, [generator(0)])


@pytest.mark.parametrize("fast", [False, True])
def test_under_autocast_outputs_are_the_targets_own(fast):
    """The caller's autocast would run some of a step in bfloat16; it is on again afterwards."""
    target, draft = tiny_llama(1, VOCAB), tiny_llama(2, VOCAB)
    decoder = SpeculativeDecoder(
        target, DraftModelProposer([draft], fast=fast), "chain:3", fast=fast
    )
    plain = decoder.generate(PROMPTS, GREEDY, 24, eos_ids=())
    prompts = iter([[(index, prompt, generator(0)) for index, prompt in enumerate(PROMPTS)]])
    dtypes = set()
    hook = target.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _, given, out: dtypes.add(out.dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        cast = decoder.generate(PROMPTS, GREEDY, 24, eos_ids=())
        alone = SpeculativeDecoder(target, fast=fast)
        streamed = dict(
            alone.continuous(lambda free: next(prompts, ()), len(PROMPTS), GREEDY, 24, eos_ids=())
        )
        assert torch.is_autocast_enabled("cpu")
    hook.remove()
    assert dtypes <= {torch.float32}
    assert [each.output_ids for each in cast.generations] == [
        each.output_ids for each in plain.generations
    ]
    assert [streamed[row].output_ids for row in range(len(PROMPTS))] == [
        e.output_ids for e in plain.generations
    ]


def test_a_rope_that_changes_with_length_ends_the_context(golden):
    """Behind the pretrained context longrope would change every key that is already cached."""
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 4.0],
    }
    rope |= {"original_max_position_embeddings": 24}
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "max_position_embeddings": 64}
    model: Any = tiny_family("llama", 0, **sizes, rope_parameters=rope)
    decoder = SpeculativeDecoder(model, DraftModelProposer(model), "chain:4")
    with golden.raises(ValueError):
        decoder.generate([[1] * 20], GREEDY, 5, [generator(0)])
    prompt = torch.tensor([[1, 2, 3]])
    options = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    wanted = model.generate(prompt, max_new_tokens=21, **options)
    got = decoder.generate([[1, 2, 3]], GREEDY, 21, [generator(0)]).generations[0].output_ids
    assert got == wanted[0, 3:].tolist()


@pytest.mark.parametrize("draft", ["model", "head"])
def test_equal_prompts_are_read_once_and_go_their_own_ways(draft):
    """Samples of one prompt stand in any order among others. A head reads the features of every
    row.
    """
    target = copy.deepcopy(model_of("llama", 1))
    proposer: Any = DraftModelProposer(stirred(copy.deepcopy(target), 0.08))
    if draft == "head":
        proposer = HeadProposer(stirred_head("eagle", target).eval())
    decoder = SpeculativeDecoder(target, proposer, "kary:2,2", "mcsd", fast=False)
    prompts = [PROMPTS[row] for row in (0, 1, 0, 2, 1, 0)]
    streams = [generator(100 + row) for row in range(6)]
    apart = [
        decoder.generate([prompt], WARM, 12, [generator(100 + row)], eos_ids=()).generations[0]
        for row, prompt in enumerate(prompts)
    ]
    read: list[int] = []
    target.register_forward_pre_hook(
        lambda _, args, given: read.append(len(given["input_ids"])), with_kwargs=True
    )
    together = decoder.generate(prompts, WARM, 12, streams, eos_ids=()).generations
    assert [row.output_ids for row in together] == [row.output_ids for row in apart]
    assert read[:2] == [3, 6]
