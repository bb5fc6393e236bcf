"""Law 1 for targets and drafts with a state: chains, verified with each model's own cache."""

from functools import cache

import pytest
import torch

from decode import (
    DraftModelProposer,
    Generation,
    PromptLookupProposer,
    Proposer,
    SpeculativeDecoder,
)
from draftsmith_core.sampling import Sampling
from tests.hybrid_models import HYBRIDS, hybrid

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8]]
NEW_TOKENS = 12
# Convolutions; a gated delta rule, Mamba 2 and attention in parallel, and a state that is read
# token by token, all with attention; recurrent layers alone.
SOME = ("lfm2", "qwen3_next", "falcon_h1", "jamba", "mamba2")
EVERY = [kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow) for kind in HYBRIDS]


@cache
def own_greedy(kind: str, row: int) -> list[int]:
    """Greedy tokens by full forwards without a cache."""
    model = hybrid(kind)
    ids = list(PROMPTS[row])
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPTS[row]) :]


def decode(kind: str, proposer: Proposer | None, rows: list[int]) -> list[Generation]:
    decoder = SpeculativeDecoder(hybrid(kind), proposer)
    prompts = [PROMPTS[row] for row in rows]
    return decoder.generate(prompts, GREEDY, NEW_TOKENS, eos_ids=()).generations


@pytest.mark.parametrize("kind", HYBRIDS)
def test_every_kind_gives_the_tokens_of_full_forwards(kind):
    for rows in ([1], [2, 0, 1]):
        outputs = [each.output_ids for each in decode(kind, None, rows)]
        assert outputs == [own_greedy(kind, row) for row in rows]
    copied = decode(kind, PromptLookupProposer(), [0, 1, 2])
    assert [each.output_ids for each in copied] == [own_greedy(kind, row) for row in range(3)]


@pytest.mark.parametrize("kind", SOME)
def test_rows_that_take_turns_are_those_of_full_forwards(kind):
    decoder = SpeculativeDecoder(hybrid(kind))
    waiting = [0, 1, 2, 0]

    def source(free):
        joining = [waiting.pop(0) for _ in range(min(free, len(waiting)))]
        return [(row, PROMPTS[row], torch.Generator()) for row in joining]

    ended = list(decoder.continuous(source, 2, GREEDY, NEW_TOKENS, eos_ids=()))
    assert sorted(row for row, _ in ended) == [0, 0, 1, 2]
    assert all(generation.output_ids == own_greedy(kind, row) for row, generation in ended)


@pytest.mark.parametrize("kind", EVERY)
def test_a_draft_with_a_state_gives_the_tokens_of_full_forwards(kind):
    drafts = {"other": hybrid(kind, seed=2), "itself": hybrid(kind)}
    accepted: dict[str, int] = {}
    for name, draft in drafts.items():
        generations = decode(kind, DraftModelProposer(draft), [2, 0, 1])
        assert [each.output_ids for each in generations] == [own_greedy(kind, r) for r in (2, 0, 1)]
        accepted[name] = sum(each.stats.accepted for each in generations)
    # The draft that is the target proposes its own tokens, four a step.
    assert accepted["itself"] == 3 * (NEW_TOKENS - NEW_TOKENS // 5) >= accepted["other"]
