"""Targets with a state decode with their own cache: each kind, its rows, and the states that heads
read. Law 1 for them is in tests/test_decode_lossless.py.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.sampling import Sampling
from draftsmith.decode import (
    DraftModelProposer,
    LookaheadProposer,
    PromptLookupProposer,
    Proposer,
    SpeculativeDecoder,
)
from draftsmith.decode.propose.lookup_first import LookupFirst
from draftsmith.decode.propose.protocol import Proposal, Session
from draftsmith.decode.tree import chain
from draftsmith.decode.tree_batch import TreeBatch
from tests.hybrid_models import HYBRIDS, SOME_HYBRIDS, VOCAB, hybrid
from tests.tiny_models import random_llama

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]
NEW_TOKENS = 12
DEPTH = 3
EVERY = [
    kind if kind in SOME_HYBRIDS else pytest.param(kind, marks=pytest.mark.slow) for kind in HYBRIDS
]


@cache
def own_greedy(kind, row):
    """Greedy tokens by full forwards without a cache."""
    model = hybrid(kind)
    ids = list(PROMPTS[row])
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPTS[row]) :]


def outputs(kind, proposer, rows):
    decoder = SpeculativeDecoder(hybrid(kind), proposer)
    prompts = [PROMPTS[row] for row in rows]
    return decoder.generate(prompts, GREEDY, NEW_TOKENS, eos_ids=()).generations


@pytest.mark.parametrize("kind", HYBRIDS)
def test_every_kind_gives_the_tokens_of_full_forwards(kind):
    found = [each.output_ids for each in outputs(kind, None, [2, 0, 1])]
    assert found == [own_greedy(kind, row) for row in (2, 0, 1)]
    copied = outputs(kind, PromptLookupProposer(), [0, 1, 2])
    assert [each.output_ids for each in copied] == [own_greedy(kind, row) for row in range(3)]


@pytest.mark.parametrize("kind", SOME_HYBRIDS)
def test_rows_that_take_turns_are_those_of_full_forwards(kind):
    decoder = SpeculativeDecoder(hybrid(kind))
    waiting = [0, 1, 2, 0]

    def source(free):
        joining = [waiting.pop(0) for _ in range(min(free, len(waiting)))]
        return [(row, PROMPTS[row], torch.Generator()) for row in joining]

    ended = list(decoder.continuous(source, 2, GREEDY, NEW_TOKENS, eos_ids=()))
    assert sorted(row for row, _ in ended) == [0, 0, 1, 2]
    assert all(generation.output_ids == own_greedy(kind, row) for row, generation in ended)


class Scripted(Proposer):
    """Drafts the target's own tokens, makes some of them wrong, and keeps the states it gets."""

    hidden_layers = (1, -1)

    def __init__(self, kind):
        self.wholes = [prompt + own_greedy(kind, row) for row, prompt in enumerate(PROMPTS)]
        self.accepted = set[int]()
        # By row and layer, in parts.
        self.states: list[list[list[Tensor]]] = []

    def start(self, setup):
        for row, prompt in enumerate(setup.prompts):
            self.states.append([[layer[row, : len(prompt) - 1]] for layer in setup.hidden_BTH])
        return ScriptedSession(self, setup)


class ScriptedSession(Session):
    def __init__(self, proposer, setup):
        self.proposer = proposer
        self.tree = TreeBatch.build(chain(DEPTH), setup.device)
        self.ends = list(map(len, setup.prompts))
        self.rows = list(range(len(self.ends)))
        self.steps = 0

    def propose(self, u_BN):
        self.steps += 1
        drafted = []
        for row in self.rows:
            ahead = (self.proposer.wholes[row][self.ends[row] :] + [0] * DEPTH)[:DEPTH]
            wrong = (self.steps + row) % (DEPTH + 1)
            if wrong < DEPTH:
                ahead[wrong] = (ahead[wrong] + 1) % VOCAB
            if (self.steps // 2 + row) % 2:
                ahead[-1] = -1
            drafted.append([-1, *ahead])
        return Proposal(self.tree, torch.tensor(drafted), None, "deterministic")

    def commit(self, outcome):
        for row, path, states in zip(self.rows, outcome.paths, outcome.hidden, strict=True):
            self.ends[row] += len(path) + 1
            self.proposer.accepted.add(len(path))
            for kept, state in zip(self.proposer.states[row], states, strict=True):
                kept.append(state)

    def select_rows(self, rows):
        self.rows = [self.rows[row] for row in rows]


@pytest.mark.parametrize("kind", EVERY)
def test_heads_get_the_states_of_full_forwards(kind):
    """Whatever number of tokens a row accepts, and whether or not a draft ends early."""
    proposer = Scripted(kind)
    decoder = SpeculativeDecoder(hybrid(kind), proposer, f"chain:{DEPTH}", "exact")
    generations = decoder.generate(PROMPTS, GREEDY, NEW_TOKENS, eos_ids=()).generations
    assert [each.output_ids for each in generations] == [own_greedy(kind, r) for r in range(3)]
    assert proposer.accepted == {0, 1, 2, 3}
    for whole, layers in zip(proposer.wholes, proposer.states, strict=True):
        ids = torch.tensor([whole])
        _, expected = forward_with_states(hybrid(kind), (1, -1), input_ids=ids, use_cache=False)
        for parts, state in zip(layers, expected, strict=True):
            found = torch.cat(parts)[: len(whole) - 1]
            torch.testing.assert_close(found, state[0, : len(found)], atol=2e-4, rtol=1e-4)
            assert len(found) >= len(whole) - 1 - DEPTH


def test_many_unread_tokens_are_read_once(monkeypatch):
    """With room for two unread tokens every other step reads them by themselves."""
    monkeypatch.setattr("draftsmith.decode.own_cache_runner.MOST_UNREAD", 2)
    test_heads_get_the_states_of_full_forwards("mamba2")


def test_a_tree_is_refused_and_a_chain_is_the_default(golden):
    target = hybrid("qwen3_next")
    llama = random_llama(7, VOCAB)
    for pair in ((target, DraftModelProposer(llama)), (llama, DraftModelProposer(target))):
        for tree in ("kary:2,2", "eagle2:depth=3,beam=2,nodes=5"):
            with golden.raises(ValueError):
                SpeculativeDecoder(*pair, tree)
        assert SpeculativeDecoder(*pair).tree.is_chain
    with golden.raises(ValueError):
        SpeculativeDecoder(target, LookaheadProposer())
    with golden.raises(ValueError):
        SpeculativeDecoder(target, LookupFirst(DraftModelProposer(llama), beside=True), "chain:2")
