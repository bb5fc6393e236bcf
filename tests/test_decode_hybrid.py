"""Targets with a state decode with their own cache: each kind, its rows, and the states that heads
read. Law 1 for them is in tests/test_decode_lossless.py.
"""

import copy
import json
from functools import cache

import pytest
import torch
from transformers import GenerationConfig

from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.sampling import Sampling
from draftsmith.decode import (
    DraftModelProposer,
    LookaheadProposer,
    PromptLookupProposer,
    Proposer,
    SpeculativeDecoder,
)
from draftsmith.decode.propose.protocol import Proposal, Session
from draftsmith.decode.tree import chain
from draftsmith.decode.tree_batch import TreeBatch
from tests.conftest import tiny_tokenizer
from tests.hybrid_models import HYBRIDS, SOME_HYBRIDS, VOCAB, hybrid
from tests.tiny_models import random_llama

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]
NEW_TOKENS = 12
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
    """Drafts the target's own tokens, makes some of them wrong, and compares states."""

    hidden_layers = (1, -1)

    def __init__(self, kind, depth=3):
        self.kind = kind
        self.depth = depth
        self.accepted = set[int]()

    def start(self, setup):
        return ScriptedSession(self, setup)


class ScriptedSession(Session):
    def __init__(self, proposer, setup):
        self.proposer = proposer
        self.tree = TreeBatch.build(chain(proposer.depth), setup.device)
        self.texts = [list(prompt) for prompt in setup.prompts]
        self.wholes: list[list[int]] = []
        for text in self.texts:
            self.wholes.append(text + own_greedy(proposer.kind, PROMPTS.index(text)))
        self.steps = 0
        self.same(setup.hidden_BTH, [0] * len(self.texts), [len(text) - 1 for text in self.texts])

    def same(self, hidden, begins, ends):
        model = hybrid(self.proposer.kind)
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            ids = torch.tensor([self.texts[row][:end]])
            if begin < end:
                layers = self.proposer.hidden_layers
                _, states = forward_with_states(model, layers, input_ids=ids, use_cache=False)
                for found, expected in zip(hidden, states, strict=True):
                    there = found[row, : end - begin]
                    torch.testing.assert_close(there, expected[0, begin:], atol=2e-4, rtol=1e-4)

    def propose(self, u_BN):
        self.steps += 1
        drafted = []
        for row, (text, whole) in enumerate(zip(self.texts, self.wholes, strict=True)):
            ahead = (whole[len(text) :] + [0] * self.proposer.depth)[: self.proposer.depth]
            right = (self.steps + row) % (self.proposer.depth + 1)
            wrong = [(token + 1) % VOCAB for token in ahead[right : right + 1]]
            shown = ahead[:right] + wrong + ahead[right + 1 :]
            absent = [-1] * ((self.steps // 2 + row) % 2)
            drafted.append([-1, *shown[: len(shown) - len(absent)], *absent])
        return Proposal(self.tree, torch.tensor(drafted), None, "deterministic")

    def commit(self, outcome):
        begins = [len(text) - 1 for text in self.texts]
        for text, tokens in zip(self.texts, outcome.tokens, strict=True):
            text += tokens
        self.proposer.accepted |= set(map(len, outcome.paths))
        longest = max(len(states[0]) for states in outcome.hidden)
        layers = []
        for layer in range(len(self.proposer.hidden_layers)):
            rows = [states[layer] for states in outcome.hidden]
            padded = [torch.nn.functional.pad(r, (0, 0, 0, longest - len(r))) for r in rows]
            layers.append(torch.stack(padded))
        whole = [
            text[: len(w)] == w[: len(text)]
            for text, w in zip(self.texts, self.wholes, strict=True)
        ]
        assert all(whole)
        self.same(layers, begins, [len(text) - 1 for text in self.texts])

    def select_rows(self, rows):
        self.texts = [self.texts[row] for row in rows]
        self.wholes = [self.wholes[row] for row in rows]


@pytest.mark.parametrize("kind", EVERY)
def test_heads_get_the_states_of_full_forwards(kind):
    """Whatever number of tokens a row accepts, and whether or not a draft ends early."""
    proposer = Scripted(kind)
    decoder = SpeculativeDecoder(hybrid(kind), proposer, "chain:3", "exact")
    generations = decoder.generate(PROMPTS, GREEDY, NEW_TOKENS, eos_ids=()).generations
    assert [each.output_ids for each in generations] == [own_greedy(kind, r) for r in range(3)]
    assert proposer.accepted == {0, 1, 2, 3}


def test_many_unread_tokens_are_read_once(monkeypatch):
    """With room for two unread tokens every other step reads them by themselves."""
    monkeypatch.setattr("draftsmith.decode.own_cache_runner.MOST_UNREAD", 2)
    test_heads_get_the_states_of_full_forwards("mamba2")


def test_a_tree_is_refused_and_a_chain_is_the_default(golden):
    target = hybrid("qwen3_next")
    llama = random_llama(7, VOCAB)
    for pair in ((target, DraftModelProposer(llama)), (llama, DraftModelProposer(target))):
        for tree in ("kary:2,2", "eagle2:depth=3,beam=2,nodes=5"):
            with golden.raises(ValueError) as no:
                SpeculativeDecoder(*pair, tree)
            assert "\n" not in str(no.value)
        assert SpeculativeDecoder(*pair).tree.is_chain
    with golden.raises(ValueError):
        SpeculativeDecoder(target, LookaheadProposer())


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_commands_take_a_target_with_a_state(door, draft_dir, prompts_file, tmp_path):
    target = copy.deepcopy(hybrid("qwen3_next", vocabulary=290))
    target.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    words = ["--target", tmp_path / "target", "--draft", draft_dir, "--max_new_tokens", 6]
    door.refused("decode", *words, "--prompt", "The quick", "--tree", "kary:2,2")
    out, _ = door.ok("decode", *words, "--prompt", "The quick", "--json")
    assert json.loads(out.splitlines()[-1])["tree"] == "auto"
    plan = tmp_path / "plan.json"
    door.ok("plan", *words, "--prompts", prompts_file, "--confirm_prompts", 2, "--out", plan)
    found = json.loads(plan.read_text())
    assert {row["tree"].partition(":")[0] for row in found["candidates"]} == {"chain"}
    words += ["--id", f"q={prompts_file}", "--tree", "chain:2", "--speed_prompts", 2]
    door.ok("eval", *words, "--max_prompts", 3, "--out", tmp_path / "eval")
    speeds = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert [row for row in speeds["rows"] if row["figure"] == "speedup"]
