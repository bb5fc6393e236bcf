"""Penalties: what they do to a text, to drafts, to acceptance and at the door. Law 1 under them is
in tests/test_decode_lossless.py.
"""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import draftsmith as ds
from draftsmith.core import penalties
from draftsmith.core.sampling import Sampling
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.eval.alpha import Reader
from draftsmith.eval.formulas import Continuation
from tests.tiny_models import penalised, tiny_llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8, 2, 7, 1]]
TOKENS = 16
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.4},
    "all": {"repetition_penalty": 0.8, "presence_penalty": 0.3, "frequency_penalty": 0.3},
}
VOCAB, LENGTH, PROMPT = 5, 3, [1, 3, 1]


@cache
def target():
    return tiny_llama(0, layers=3)


@cache
def own(name, row):
    answer: list[int] = []
    for _ in range(TOKENS):
        ids = torch.tensor([PROMPTS[row] + answer])
        with torch.no_grad():
            logits_V = target()(ids).logits[0, -1]
        answer.append(int(penalised(logits_V, PROMPTS[row], answer, PENALTIES[name]).argmax()))
    return answer


def decoded(decoder, name):
    sampling = Sampling(temperature=0.0, **PENALTIES[name])
    return decoder.generate(PROMPTS, sampling, TOKENS, eos_ids=()).generations


def test_a_draft_under_the_penalty_is_accepted_more():
    """The target itself is the draft, so that all is accepted if both have the penalty."""
    decoder = SpeculativeDecoder(target(), DraftModelProposer(target()), "chain:3")
    for row in decoded(decoder, "all"):
        assert row.stats.tau == 4.0


def test_a_target_has_its_own_and_options_override_them(target_dir, golden):
    pair = ds.load_pair(target_dir, device="cpu", dtype="float32")
    plain = pair.generate("The quick", max_new_tokens=24, ignore_eos=True).output_ids
    given = pair.generate(
        "The quick", max_new_tokens=24, ignore_eos=True, repetition_penalty=2.0
    ).output_ids
    pair.target.generation_config.repetition_penalty = 2.0
    taken = pair.generate("The quick", max_new_tokens=24, ignore_eos=True).output_ids
    off = pair.generate(
        "The quick", max_new_tokens=24, ignore_eos=True, repetition_penalty=1.0
    ).output_ids
    assert plain == off != given == taken
    with golden.raises(ds.InputError):
        pair.generate("a", repetition_penalty=0.0)


@pytest.mark.parametrize("seen", [True, False])
def test_acceptance_is_read_with_drafts_as_they_are_decoded(seen):
    """Our drafts see the penalties; those of engines do not. The target itself is the draft."""
    rows = [Continuation(str(row), PROMPTS[row], own("all", row)) for row in range(3)]
    reader = Reader(
        target(),
        {"itself": target()},
        Sampling(temperature=0.0, **PENALTIES["all"]),
        [],
        batch_size=3,
        drafts_see_penalties=seen,
    )
    traces = reader.read(rows)
    for row, accepted in zip(rows, traces["itself"].values["alpha"][0], strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*row.prompt_ids, *row.output_ids]])
            guesses = target()(ids).logits[0, len(row.prompt_ids) - 1 : -1].argmax(-1)
        plain = (guesses == torch.tensor(row.output_ids)).double().tolist()
        assert accepted.tolist() == ([1.0] * TOKENS if seen else plain)
        assert 0 < sum(plain) < TOKENS


@pytest.mark.parametrize("name", PENALTIES)
def test_a_node_has_seen_the_tokens_on_its_own_path(name):
    """Row 0 has token 0 twice on one path and a place without a node; row 1 is another tree."""
    prompts, answers, vocabulary = [[1, 4], [2]], [[3, 3], [5]], 6
    sampling = Sampling(**PENALTIES[name])
    seen = penalties.Seen.of(prompts, vocabulary, sampling, torch.device("cpu"))
    assert seen is not None
    seen.read(answers)
    tokens = [[-1, 0, 3, 0, -1], [-1, 5, 1, 4, 0]]
    paths = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]], [[0], [0, 1], [0, 1, 2], [0, 3], [0, 4]]]
    sees = torch.zeros(2, 5, 5, dtype=torch.bool)
    for row, node in itertools.product(range(2), range(5)):
        sees[row, node, paths[row][node]] = True
    logits = torch.randn(2, 5, vocabulary, generator=torch.Generator().manual_seed(0))
    found = penalties.penalised(logits, sampling, seen.in_tree(torch.tensor(tokens), sees))
    for row, node in itertools.product(range(2), range(5)):
        path = [tokens[row][place] for place in paths[row][node] if tokens[row][place] >= 0]
        wanted = penalised(logits[row, node], prompts[row], answers[row] + path, PENALTIES[name])
        torch.testing.assert_close(found[row, node], wanted, atol=1e-5, rtol=1e-5)
