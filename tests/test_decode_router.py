"""`--proposer router`: outputs stay the target's whichever draft a row takes, a draft that rested drafts as one that
did not, and the better draft is found, per stream and per request, on streams of made-up acceptance.
"""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from decode import VERIFIERS, RouterProposer, SpeculativeDecoder
from decode.bandit import Bandit
from decode.propose.draft_model import CATCH_UP, DraftModelProposer
from decode.propose.router import RouterSession
from decode.propose.static_tree import StaticTreeSession
from tests.test_decode_lossless import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    check_rows_that_join,
    llama,
    own_greedy,
    run,
    statistic,
)
from tests.tiny_models import random_llama

TREES = ["chain:3", "chain:3,stop=0.3", "kary:3,2,1,stop=0.15", "eagle2:depth=3,beam=2,nodes=5", "opt:nodes=4,gain=0.3"]


def router() -> RouterProposer:
    return RouterProposer([llama(7), llama(8, 8, 1), llama(2)])


def scripted(monkeypatch: pytest.MonkeyPatch, turns: Sequence[int], each: bool = True) -> None:
    """Rows take these drafts in turn, each beginning elsewhere in the list unless all are to take the same."""
    begun, steps = count(), {}

    def choose(self: Bandit) -> int:
        if self not in steps:
            steps[self] = next(begun) if each else 0
        steps[self] += 1
        return turns[(steps[self] - 1) % len(turns)]

    monkeypatch.setattr(Bandit, "choose", choose)


@pytest.mark.parametrize("tree", TREES)
def test_greedy_outputs_are_the_targets_own(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0, 2, 1, 1, 0, 0, 0, 1, 2])
    made = SpeculativeDecoder(llama(2), router(), tree)
    accepted = 0
    for rows in ([0], [3, 1, 0, 2]):
        generations = run(made, rows, GREEDY)
        assert [each.output_ids for each in generations] == [own_greedy(row) for row in rows]
        accepted += sum(each.stats.accepted for each in generations)
    assert accepted > 0


@pytest.mark.parametrize(("tree", "verifier"), [("kary:3,2", "mcsd"), ("chain:3,stop=0.3", "speculative")])
def test_the_output_distribution_is_the_targets(tree: str, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [2, 0, 1, 1, 0])
    assert statistic(SpeculativeDecoder(llama(2), router(), tree, verifier), SAMPLED) < 1


def test_a_draft_chosen_by_the_drawn_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SpeculativeDecoder(llama(2), RouterProposer([llama(7), llama(8)]), "chain:3")
    scripted(monkeypatch, [0, 1])
    assert statistic(made, SAMPLED, 8_000) < 1

    def peeking(self: RouterSession, u_BN: Any) -> Any:
        one, other = (session.propose(u_BN) for session in self.sessions)
        self._picks, self._asked = [0] * len(self.rows), [0, 1]
        odd_B = one.tokens_BM[:, 1] % 2 == 1
        one.tokens_BM[odd_B], one.q_BEV[odd_B] = other.tokens_BM[odd_B], other.q_BEV[odd_B]  # type: ignore[index]
        return one

    monkeypatch.setattr(RouterSession, "propose", peeking)
    assert statistic(made, SAMPLED, 8_000) > 1.5


def test_a_draft_that_rested_drafts_as_one_that_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that emit unequally leave unequal lengths to be read; every proposal is what the draft alone proposes."""
    scripted(monkeypatch, [0, 1, 1, 1, 2, 0, 2, 2, 2, 2])
    drafts = [llama(7), llama(8, 8, 1), llama(2)]
    texts = [list(prompt) for prompt in PROMPTS]
    seen: list[tuple[int, list[int], list[int]]] = []
    whole = RouterSession.propose

    def noted(self: RouterSession, u_BN: Any) -> Any:
        proposal = whole(self, u_BN)
        if len(self.rows) == len(texts):  # from when on rows leave, they are in another order
            drafted = proposal.tokens_BM[:, 1:].tolist()
            seen.extend((pick, list(texts[row]), drafted[row]) for row, pick in enumerate(self._picks))
        return proposal

    monkeypatch.setattr(RouterSession, "propose", noted)
    made = SpeculativeDecoder(llama(2), RouterProposer(drafts), "chain:3")
    made.generate(PROMPTS, GREEDY, 30, eos_ids=(), on_tokens=lambda row, ids, drafted: texts[row].extend(ids))
    assert {pick for pick, _, _ in seen} == {0, 1, 2} and len(seen) > 30
    one, alone = StaticTreeSession.propose, []

    def last(self: StaticTreeSession, u_BN: Any) -> Any:
        alone.append(one(self, u_BN))
        return alone[-1]

    monkeypatch.setattr(StaticTreeSession, "propose", last)
    for pick, text, tokens in seen:
        SpeculativeDecoder(llama(2), DraftModelProposer(drafts[pick]), "chain:3").generate([text], GREEDY, 1)
        assert alone[-1].tokens_BM[0, 1:].tolist() == tokens


def test_rows_that_join_while_a_draft_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [0, 0, 0, 1, 1, 0, 2, 1])
    check_rows_that_join(SpeculativeDecoder(llama(2), router(), "chain:3"))


def test_rows_far_apart_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target emits five tokens a step where a bad one emits one, so that what a resting draft has
    to read differs by hundreds of tokens from row to row, and is more than it reads at once.
    """
    target = random_llama(2, 5, hidden=8, layers=1, heads=1, positions=1400, spread=0.45)
    bad = random_llama(5, 5, hidden=8, layers=1, heads=1, positions=1400, spread=0.45)
    new, steps = CATCH_UP + 300, 40
    rested: list[list[int]] = []
    whole = RouterSession.propose

    def choose(self: RouterSession, u_BN: Any) -> Any:
        steps_done = len(rested)
        rested.append([len(pending) for pending in self.sessions[2].network._pending])  # type: ignore[attr-defined]
        picks = [0, 1] if len(self.rows) == 2 else [1]
        if steps_done and steps_done % (2 * steps) == 0:
            picks = [2] * len(self.rows)
        for row, pick in zip(self.rows, picks, strict=True):
            row.choose = lambda pick=pick: pick  # type: ignore[method-assign,misc]
        return whole(self, u_BN)

    monkeypatch.setattr(RouterSession, "propose", choose)
    made = SpeculativeDecoder(target, RouterProposer([target, bad, bad]), "chain:4")
    prompts = [[1, 3], [2, 4] * 300]
    both = made.generate(prompts, GREEDY, new, eos_ids=()).generations
    for prompt, found in zip(prompts, both, strict=True):
        own = SpeculativeDecoder(target).generate([prompt], GREEDY, new, eos_ids=()).generations[0]
        assert found.output_ids == own.output_ids
    assert max(max(lengths) - min(lengths) for lengths in rested) > 100


def test_a_request_begins_with_what_earlier_ones_taught() -> None:
    """The second draft is the target itself, so that all it drafts is accepted."""
    proposer = RouterProposer([llama(7), llama(2)])
    made = SpeculativeDecoder(llama(2), proposer, "chain:3")
    first = [run(made, [row], GREEDY)[0].stats for row in (0, 1, 2)]
    later = [run(made, [row], GREEDY)[0].stats for row in (0, 1, 2)]
    assert sum(each.target_calls for each in later) < sum(each.target_calls for each in first)
    one, other = proposer.record()
    assert other["tokens_per_step"] == pytest.approx(4) and one["tokens_per_step"] < 3  # type: ignore[operator]
    assert other["steps"] > 1.5 * one["steps"] > 0  # type: ignore[operator]
    # A larger draft has to earn its cost; the same depth of a draft as large as the target costs as much again.
    assert proposer._costs == [4.0, 4.0]


def test_what_does_not_go_with_a_router_is_refused() -> None:
    with pytest.raises(ValueError, match="give two or more"):
        RouterProposer([llama(7)])
    with pytest.raises(ValueError, match="name a tree"):
        SpeculativeDecoder(llama(2), router(), "auto:online")
    with pytest.raises(ValueError, match="leave compile out"):
        SpeculativeDecoder(llama(2), router(), "chain:2", compile="eager")
    with pytest.raises(ValueError, match="valid on chains only"):
        SpeculativeDecoder(llama(2), router(), "kary:2,2", VERIFIERS["block"])


def steps_of(
    choose: Callable[[], int],
    learn: Callable[[float, float], None],
    chances: Sequence[float],
    tokens: int,
    noise: random.Random,
) -> int:
    """Target calls for a request of `tokens`, with chains of four of which each token has its draft's chance."""
    done, steps = 0, 0
    while done < tokens:
        arm, emitted = choose(), 1
        while emitted <= 4 and noise.random() < chances[arm]:
            emitted += 1
        learn(emitted, 1.0)
        done, steps = done + emitted, steps + 1
    return steps


def stream(requests: Sequence[Sequence[float]], seed: int, fixed: int | None = None, tokens: int = 64) -> int:
    """Target calls of a stream of requests; each says how well the drafts do on it. With one draft, where `fixed`."""
    noise, bandit, steps = random.Random(seed), Bandit(2, resting=False), 0
    for chances in requests:
        row = bandit.branch()
        if fixed is None:
            steps += steps_of(row.choose, row.learn, chances, tokens, noise)
        else:
            steps += steps_of(lambda: 0, lambda emitted, cost: None, chances[fixed:], tokens, noise)
    return steps


# alpha of the base and of the aligned draft: in the domain of its data, and in one that it forgot.
NEAR, FAR = (0.39, 0.47), (0.34, 0.16)


@pytest.mark.parametrize(
    ("requests", "most"),
    [
        ([NEAR] * 200, 1.05),
        ([FAR] * 200, 1.05),
        ([NEAR] * 100 + [FAR] * 100, 0.99),  # a switch: better than either draft
        ([FAR] * 100 + [NEAR] * 100, 0.99),
        ([(0.5, 0.3)] * 100 + [(0.5, 0.7)] * 100, 0.9),  # of the draft that had been given up
        ([(0.3, 0.7), (0.7, 0.3)] * 100, 0.85),  # another domain with every request
    ],
)
def test_the_better_draft_is_found_and_a_switch_followed(requests: Sequence[Sequence[float]], most: float) -> None:
    """Target calls over those of the better of the two drafts alone."""
    for seed in range(3):
        better = min(stream(requests, seed, fixed) for fixed in (0, 1))
        assert stream(requests, seed) <= most * better


def test_requests_shorter_than_a_round_teach_too() -> None:
    noise, bandit = random.Random(1), Bandit(2, resting=False)
    for _ in range(100):
        row = bandit.branch()
        steps_of(row.choose, row.learn, (0.2, 0.8), 6, noise)
    assert bandit.arms[1].all_steps > 5 * bandit.arms[0].all_steps
