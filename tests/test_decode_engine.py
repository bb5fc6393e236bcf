"""The engine: rows are independent, blocks are cut and counted right, cached forwards equal plain
ones.
"""

import copy
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.decode.propose.head_proposers import HeadProposer
from draftsmith.decode.runner import Block, Runner
from tests.tiny_models import redrawn, stirred, stirred_head, tiny_llama

VOCAB = 17
GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=0.9, top_p=0.95)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [7, 2], [2, 7, 1, 8], [5, 5, 5], [1, 16, 2, 3, 4]]
SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 16, "num_key_value_heads": 1},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "gemma2": {
        **{"intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8},
        **{"sliding_window": 4, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    },
}


@cache
def model_of(kind, seed, limit=64):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, **SHAPES, **SMALL, **KINDS[kind], max_position_embeddings=limit
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    return redrawn(model, 0.35)


def decoder_of(kind, tree, verifier):
    target = model_of(kind, 1)
    return SpeculativeDecoder(
        target, DraftModelProposer(stirred(copy.deepcopy(target), 0.08)), tree, verifier
    )


def run(decoder, rows, sampling, new_tokens=12):
    prompts = [PROMPTS[row] for row in rows]
    generators = [generator(100 + row) for row in rows]
    batch = decoder.generate(prompts, sampling, new_tokens, generators, eos_ids=(6,))
    return batch.generations


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_step_by_step_forwards_equal_teacher_forced_ones(monkeypatch, kind, sampling):
    """Law 5: target and draft, every cell of every tree, along its path from the first prompt
    token.
    """
    decoder = decoder_of(kind, "kary:3,1,2", "mcsd")
    assert isinstance(decoder.proposer, DraftModelProposer)
    calls: list[tuple[Runner, Block, list[int], list[int], Tensor, Tensor]] = []
    plain = Runner.forward

    def spy(self, tokens, block, keep_logits=0, **rest):
        logits, hidden = plain(self, tokens, block, 0, **rest)
        lead = self.state_B3[:, 1].tolist()
        calls.append((self, block, list(self.lengths), lead, tokens.clone(), logits.clone()))
        return logits[:, -keep_logits:], hidden

    monkeypatch.setattr(Runner, "forward", spy)
    rows = [0, 2, 4]
    prompts = [PROMPTS[row] for row in rows]
    generators = [generator(row) for row in rows]
    # No EOS, so that rows end together and batch places stay rows.
    batch = decoder.generate(prompts, sampling, 10, generators)
    texts = [p + g.output_ids for p, g in zip(prompts, batch.generations, strict=True)]
    cells: dict[int, Tensor] = {}
    checked = {"target": 0, "draft": 0, "two pending": 0}
    for runner, block, lengths, leads, tokens, logits in calls:
        if len(lengths) < len(rows):
            break
        total, queries = block.offsets_RT.shape[1], block.queries
        before = cells.get(id(runner), tokens[:, :0])[:, : total - queries]
        cells[id(runner)] = so_far = torch.cat([before, tokens], dim=1)
        for row, (length, lead) in enumerate(zip(lengths, leads, strict=True)):
            for query in range(queries):
                cell = total - queries + query
                if length == 0 or cell < lead:
                    continue
                seen = [i for i in range(lead, total) if bool(block.sees_RqT[0, query, i])]
                text = texts[row][:length] + [int(so_far[row, i]) for i in seen]
                with torch.inference_mode():
                    forced = runner.model(input_ids=torch.tensor([text])).logits[0, -1]
                torch.testing.assert_close(logits[row, query], forced, atol=1e-4, rtol=1e-4)
                is_target = runner.model is decoder.target
                checked["target" if is_target else "draft"] += 1
                checked["two pending"] += not is_target and lead == 0 and int(seen == [0, 1])
    assert all(count > 3 for count in checked.values()), checked


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
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.0],
        "long_factor": [4.0, 4.0],
    }
    config = AutoConfig.for_model(
        "llama",
        **SHAPES,
        **SMALL | {"hidden_size": 8},
        intermediate_size=8,
        max_position_embeddings=64,
        rope_parameters=rope | {"original_max_position_embeddings": 24},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
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


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_bfloat16_runs_with_masks_and_cache_of_its_own_type(kind):
    """Half precision has ties, so only the mechanics are checked: types, lengths, counts that add
    up.
    """
    target = cast(Any, copy.deepcopy(model_of(kind, 1))).to(torch.bfloat16)
    decoder = SpeculativeDecoder(target, DraftModelProposer(target), "kary:2,2", "mcsd")
    batch = decoder.generate(PROMPTS[:2], WARM, 12, [generator(0), generator(1)])
    for g in batch.generations:
        assert len(g.output_ids) == 12 == g.stats.emitted
        assert g.stats.accepted == sum(g.from_draft) > 0
    assert batch.prefill_s > 0 and batch.decode_s > 0


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("draft", ["model", "head"])
def test_equal_prompts_are_read_once_and_go_their_own_ways(monkeypatch, kind, draft):
    """Samples of one prompt stand in any order among others."""
    if draft == "head" and kind != "llama":
        pytest.skip("heads read LLaMA")
    target = model_of(kind, 1)
    decoder = decoder_of(kind, "kary:2,2", "mcsd")
    if draft == "head":
        head = HeadProposer(stirred_head("eagle", target).eval())
        decoder = SpeculativeDecoder(target, head, "kary:2,2", "mcsd")
    rows = [0, 1, 0, 2, 1, 0]
    prompts = [PROMPTS[row] for row in rows]
    seeds = range(100, 100 + len(rows))
    apart = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        batch = decoder.generate([prompt], WARM, 12, [generator(seed)], eos_ids=())
        apart.append(batch.generations[0].output_ids)
    read = []
    whole = Runner._prefill_chunk

    def counted(self, tokens_BT, *rest):
        read.append(len(tokens_BT))
        return whole(self, tokens_BT, *rest)

    monkeypatch.setattr(Runner, "_prefill_chunk", counted)
    together = decoder.generate(prompts, WARM, 12, [generator(seed) for seed in seeds], eos_ids=())
    assert [row.output_ids for row in together.generations] == apart
    # The target and a draft model read three prompts; a head reads the features of every row.
    assert read == [3, 3 if draft == "model" else len(rows)]


def test_decoding_leaves_the_callers_attention_as_it_was():
    """cuDNN's attention, which plans anew for every length, is off while a batch is decoded."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    during: list[bool] = []
    SpeculativeDecoder(model_of("llama", 1)).generate(
        PROMPTS[:2],
        max_new_tokens=3,
        eos_ids=(),
        on_tokens=lambda *_: during.append(torch.backends.cuda.cudnn_sdp_enabled()),
    )
    assert during and not any(during)
    assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
