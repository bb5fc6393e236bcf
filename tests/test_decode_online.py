"""`--tree auto:online`: the output stays the target's whatever the bandit picks, a draft that rested drafts as one that
did not, and the bandit loses little on streams of made-up costs.
"""

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from decode import PROPOSERS, DraftModelProposer, OnlineTrees, PromptLookupProposer, SpeculativeDecoder, parse_tree
from decode.bandit import ROUND, SHARE, Bandit
from decode.propose.online import OnlineSession
from tests.test_decode_lossless import (
    GREEDY,
    NEW_TOKENS,
    PROMPTS,
    SAMPLED,
    VARIANTS,
    check_rows_that_join,
    llama,
    own_greedy,
    run,
    statistic,
)
from tests.test_decode_lossless import proposer as proposer_of

ADAPT = [
    variant
    for variant in VARIANTS
    if variant == "several drafts" or (variant != "router" and PROPOSERS[variant.partition(",")[0]].draws)
]
CHAINS = OnlineTrees(("chain:1", "chain:3"), (parse_tree("chain:1"), parse_tree("chain:3")))  # type: ignore[arg-type]
TREES = OnlineTrees(("kary:3,2", "chain:2"), (parse_tree("kary:3,2"), parse_tree("chain:2")))  # type: ignore[arg-type]
GROWN = OnlineTrees(
    ("eagle2:depth=3,beam=2,nodes=5", "eagle2:depth=1,beam=3,nodes=3"),
    (parse_tree("eagle2:depth=3,beam=2,nodes=5"), parse_tree("eagle2:depth=1,beam=3,nodes=3")),  # type: ignore[arg-type]
)


def scripted(monkeypatch: pytest.MonkeyPatch, arms: list[int]) -> None:
    """A bandit that picks these arms in turn."""
    turn = cycle(arms)
    monkeypatch.setattr(Bandit, "choose", lambda self: next(turn))


@pytest.mark.parametrize("variant", ADAPT)
def test_greedy_outputs_are_the_targets_own(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0, 2, 0, 0, 0, 1, 2, 1, 0, 2])
    for shape in (CHAINS, TREES, GROWN):
        if shape.grows and "several" in variant or shape is not CHAINS and variant == "blockwise":
            continue
        made = SpeculativeDecoder(llama(2), proposer_of(variant), shape)
        for rows in ([0], [3, 1, 0, 2]):
            generations = run(made, rows, GREEDY)
            assert [g.output_ids for g in generations] == [own_greedy(row) for row in rows]


@pytest.mark.parametrize("variant", ["draft", "several drafts", "eagle"])
def test_the_output_distribution_is_the_targets(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [2, 0, 1, 2, 1, 0, 0])
    made = SpeculativeDecoder(llama(2), proposer_of(variant), CHAINS if variant == "eagle" else TREES)
    assert statistic(made, SAMPLED) < 1


def test_an_arm_that_depended_on_the_drawn_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [2])
    made = SpeculativeDecoder(llama(2), proposer_of("draft"), CHAINS)
    assert statistic(made, SAMPLED, 8_000) < 1
    honest = OnlineSession.propose

    def peeking(self: OnlineSession, u_BN: Any) -> Any:
        proposal = honest(self, u_BN)
        odd_B = proposal.tokens_BM[:, 1] % 2 == 1
        proposal.tokens_BM[odd_B, 1:] = -1
        return proposal

    monkeypatch.setattr(OnlineSession, "propose", peeking)
    assert statistic(made, SAMPLED, 8_000) > 1.5


@pytest.mark.parametrize("variant", ADAPT)
def test_a_draft_that_rested_drafts_as_one_that_did_not(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [0, 0, 0, 2, 0, 1, 2, 0, 2]
    scripted(monkeypatch, arms)
    asked: list[tuple[int, torch.Tensor]] = []
    whole = OnlineSession.propose

    def noted(self: OnlineSession, u_BN: Any) -> Any:
        proposal = whole(self, u_BN)
        asked.append((len(text), proposal.tokens_BM[0, 1:]))
        return proposal

    monkeypatch.setattr(OnlineSession, "propose", noted)
    text = list(PROMPTS[2])
    made = SpeculativeDecoder(llama(2), proposer_of(variant), CHAINS)
    made.generate([PROMPTS[2]], GREEDY, NEW_TOKENS, on_tokens=lambda row, ids, drafted: text.extend(ids))
    for (length, tokens), arm in zip(list(asked), cycle(arms), strict=False):
        if arm:
            asked.clear()
            scripted(monkeypatch, [arm])
            made.generate([text[:length]], GREEDY, 1)
            assert asked[0][1].tolist() == tokens.tolist()


@pytest.mark.parametrize("variant", ["draft", "eagle3", "medusa"])
def test_rows_that_join_while_the_draft_rests(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0, 0, 0, 2, 0, 0, 1, 0])
    check_rows_that_join(SpeculativeDecoder(llama(2), proposer_of(variant), CHAINS))


def test_a_perfect_draft_is_accepted_whole_after_resting(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0, 0, 2, 0, 2])
    made = SpeculativeDecoder(llama(2), DraftModelProposer(llama(2)), CHAINS)
    for rows in ([1], [3, 1, 0, 2]):
        for row in run(made, rows, GREEDY):
            # Only what did not fit the output was drafted in vain.
            assert row.stats.accepted >= row.stats.proposed - 3 > 0


def test_what_cannot_adapt_is_refused_and_heads_keep_the_arms_that_they_reach() -> None:
    with pytest.raises(ValueError, match="auto:online is for draft models and heads"):
        SpeculativeDecoder(llama(2), PromptLookupProposer(), "auto:online")
    with pytest.raises(ValueError, match="name a tree"):
        SpeculativeDecoder(llama(2), proposer_of("draft"), "auto:online", compile="eager")
    shape = SpeculativeDecoder(llama(2), proposer_of("medusa"), "auto:online").tree
    assert isinstance(shape, OnlineTrees) and shape.names == ("chain:2", "chain:4")
    with pytest.raises(ValueError, match="all grow, or trees of which none"):
        OnlineTrees(("a", "b"), (CHAINS.arms[0], GROWN.arms[0]))


def test_arms_around_a_plan() -> None:
    def arms(plan: dict[str, Any]) -> tuple[str, ...]:
        shape = parse_tree("auto:online:plan.json", lambda path: plan)
        assert isinstance(shape, OnlineTrees)
        return shape.names

    listed = [{"tree": tree} for tree in ("kary:2,1", "chain:1", "chain:5", "static, 7 nodes in 4 levels")]
    assert arms({"tree": {"spec": "chain:3"}, "name": "chain:3", "candidates": listed}) == (
        "chain:1",
        "chain:3",
        "chain:5",
    )
    assert arms({"tree": {"parents": [-1, -1, 0, 2]}, "name": "mine"}) == ("chain:1", "mine", "chain:6")
    grown = {"tree": {"spec": "eagle2:depth=3,beam=3,nodes=8"}, "candidates": [{"tree": "opt:nodes=12,depth=5"}]}
    assert arms(grown) == ("as planned", "opt:nodes=12,depth=5")
    for wrong in ({}, {"tree": {"spec": "auto:online"}}):
        with pytest.raises(ValueError, match="plan"):
            arms(wrong)


LENGTHS = (0, 2, 4, 8)
STREAM = 6_000  # tokens


def stream(
    stages: tuple[float, ...], draft_s: float, seed: int, arm: int | None, costs_s: Callable[[int], float]
) -> Any:
    """Seconds of a stream that changes from stage to stage, each with a chance that a drafted token is accepted; and
    the bandit, where no arm is fixed. A draft that rested reads what it missed, at a twentieth of its cost a token.
    """
    noise = random.Random(seed)
    bandit = Bandit(len(LENGTHS))
    seconds, done, missed = 0.0, 0, 0
    while done < STREAM:
        chance = stages[done * len(stages) // STREAM]
        length = LENGTHS[bandit.choose() if arm is None else arm]
        tokens = 1
        while tokens <= length and noise.random() < chance:
            tokens += 1
        step_s = costs_s(length) * (1 + 0.1 * noise.random())
        if length and missed:
            step_s, missed = step_s + draft_s * (1 + missed / 20), 0
        missed += not length
        bandit.learn(tokens, step_s)
        seconds, done = seconds + step_s, done + tokens
    return seconds, bandit


@pytest.mark.parametrize("draft_s", [0.02, 0.15])
@pytest.mark.parametrize(
    "stages", [(0.0,), (0.5,), (0.7,), (0.9,), (0.8, 0.2), (0.2, 0.8), (0.0, 0.9), (0.9, 0.0), (0.6, 0.4)]
)
def test_a_stream_costs_little_more_than_with_its_best_arm(stages: tuple[float, ...], draft_s: float) -> None:
    """One step of the target takes a second, a drafted token `draft_s` and 0.02 s to verify, drafting at all 0.1 s."""

    def costs_s(length: int) -> float:
        return 1 + (0.1 + (draft_s + 0.02) * length if length else 0)

    for seed in range(2):
        fixed = [stream(stages, draft_s, seed, arm, costs_s)[0] for arm in range(len(LENGTHS))]
        seconds, bandit = stream(stages, draft_s, seed, None, costs_s)
        assert seconds <= 1.05 * min(fixed)
        assert bandit._account.lost_s <= SHARE * seconds + ROUND * costs_s(LENGTHS[-1])
        if stages == (0.0,):
            assert seconds <= 1.03 * fixed[0]


def test_a_change_is_noticed_and_a_stream_that_does_not_change_is_left_alone() -> None:
    def costs_s(length: int) -> float:
        return 1 + 0.05 * length

    _, same = stream((0.7,), 0.05, 1, None, costs_s)
    _, worse = stream((0.9, 0.0), 0.05, 1, None, costs_s)
    _, better = stream((0.0, 0.9), 0.05, 1, None, costs_s)
    assert same.changes <= 1 <= min(worse.changes, better.changes)
    assert worse.arms[0].all_steps > 2_000 and better.arms[0].all_steps < 3_600
