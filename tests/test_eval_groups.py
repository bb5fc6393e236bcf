"""Which prompts are one group, and that intervals, counts and verdicts are over groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from draftsmith.core.asked_hash import Groups
from draftsmith.core.chats import Chat
from draftsmith.core.prompts import Prompt
from draftsmith.decode.propose.sources import AnyDraft
from draftsmith.eval import remarks
from draftsmith.eval.bootstrap import PromptSums, estimate, resamples, resamples_of_sets, signs
from draftsmith.eval.groups import groups_of
from draftsmith.eval.plan import Planner
from draftsmith.eval.results import Results
from draftsmith.eval.suites import Suite, prompt_groups
from draftsmith.eval.timing import Task
from tests.results_made_up import BASE, BOTH, made_up

RNG = np.random.default_rng(0)
PREAMBLE = tuple(RNG.integers(0, 30_000, 500).tolist())
QUESTIONS = [tuple(RNG.integers(0, 30_000, 20).tolist()) for _ in range(30)]


def of_ids(*prompts):
    return groups_of([Prompt(f"p{i}", "set", tuple(ids)) for i, ids in enumerate(prompts)])


def of_chats(*questions, template=PREAMBLE[:40]):
    """Each character of a question is a token, inside a chat template."""
    prompts = []
    for index, text in enumerate(questions):
        chat = Chat(({"role": "user", "content": text},), None)
        ids = (*template, *map(ord, text), 7, 8, 9)
        prompts.append(Prompt(f"p{index}", "set", ids, chat=chat, asked=1 + index))
    return groups_of(prompts)


def test_prompts_that_ask_the_same_are_one_group_whatever_their_tokens():
    assert of_ids((1, 2, 3), (7, 8, 9), (1, 2, 3)) == [0, 1, 0]
    dated = [Prompt(f"p{day}", "set", (day, *QUESTIONS[day]), asked=5) for day in range(3)]
    assert groups_of(dated) == [0, 0, 0]
    # The same tokens are the same prompt, whoever wrote them.
    written = [Prompt("a", "set", (1, 2), asked=5), Prompt("b", "set", (1, 2), asked=6)]
    assert groups_of(written) == [0, 0] and groups_of([]) == []


def test_prompts_that_differ_in_at_most_four_tokens_are_one_group():
    whole = QUESTIONS[0]
    changed = (*whole[:5], 1, *whole[6:12], 2, *whole[13:])
    added, left_out = (*whole[:9], 1, 2, *whole[9:]), whole[2:18]
    assert of_ids(whole, changed, added, left_out, QUESTIONS[1]) == [0, 0, 0, 0, 1]
    assert of_ids(whole, whole[:15]) == [0, 1]
    # Groups are closed: one by one, the last differs from the first in six tokens.
    steps = [(*range(50_000, 50_000 + 2 * i), *whole[2 * i :]) for i in range(4)]
    assert of_ids(*steps) == [0, 0, 0, 0] and of_ids(steps[0], steps[-1]) == [0, 1]
    # Short prompts of other tokens stay apart.
    assert of_ids((0, 1), (0, 2), (0, 3)) == [0, 1, 2]


@pytest.mark.parametrize("preamble", [(), PREAMBLE], ids=["alone", "behind a preamble"])
def test_a_preamble_that_all_prompts_share_does_not_make_them_one(preamble):
    prompts = [(*preamble, *question) for question in QUESTIONS]
    assert of_ids(*prompts) == list(range(30))
    # Nor does it hide those that nearly repeat.
    prompts += [(*preamble, *question[:-1], 5) for question in QUESTIONS[:3]]
    assert of_ids(*prompts) == [*range(30), 0, 1, 2]


def test_short_chats_inside_a_template_stay_apart_and_a_changed_digit_does_not():
    assert of_chats("Hi", "Hello", "Yo", "Sing!", "Who?") == [0, 1, 2, 3, 4]
    story = "Write a story about a cat that lives in house number {} by the sea."
    assert of_chats(*map(story.format, range(6)), "Write a poem.") == [0] * 6 + [1]


def test_sets_that_share_an_element_are_connected():
    assert Groups([[1, 2], [3], [2, 4], [4, 3], [5]]).numbers() == [0, 0, 0, 0, 1]


def test_prompts_behind_a_long_preamble_that_differ_in_a_digit_are_one_group():
    sums = [(*PREAMBLE, 1, 2, 10 + i % 30, 3, 10 + i // 30, 4) for i in range(300)]
    assert set(of_ids(*sums)) == {0}


def test_copies_change_no_interval_no_count_and_no_sign():
    rates = np.random.default_rng(1).uniform(0.2, 0.5, 8)
    once = PromptSums(rates * 20, np.full(8, 20.0))
    copied = PromptSums(np.tile(rates * 20, 10), np.full(80, 20.0))
    of_eight = estimate(once, resamples(range(8), 500, 3))
    of_eighty = estimate(copied, resamples(list(range(8)) * 10, 500, 3))
    assert of_eighty == pytest.approx(of_eight) and of_eighty["n"] == 8
    assert estimate(copied, resamples([0] * 80, 500, 3))["low"] is None
    assert signs([of_eighty]) == signs([of_eight]) == [-1]


def test_ten_copies_of_eight_prompts_cover_the_truth_as_often_as_the_eight():
    """Rows of one prompt differ, as samples of it do; its level is drawn once."""
    rng = np.random.default_rng(1)
    covered = {"eight": 0, "copies": 0, "rows": 0}
    trials = 300
    for trial in range(trials):
        level_G = rng.normal(0.4, 0.1, 8)
        noise_GC = rng.normal(0, 0.02, (8, 10))
        rates = (level_G[:, None] + noise_GC).ravel()
        once = PromptSums(level_G * 20, np.full(8, 20.0))
        rows = PromptSums(rates * 20, np.full(80, 20.0))
        groups = np.arange(8).repeat(10).tolist()
        found = {
            "eight": estimate(once, resamples(range(8), 300, trial)),
            "copies": estimate(rows, resamples(groups, 300, trial)),
            "rows": estimate(rows, resamples(range(80), 300, trial)),
        }
        for name, each in found.items():
            assert each["low"] is not None and each["high"] is not None
            covered[name] += each["low"] <= 0.4 <= each["high"]
    # 95 % of 300 is known to 4 points (three standard errors).
    assert 0.91 <= covered["eight"] / trials <= 0.99
    assert abs(covered["copies"] - covered["eight"]) <= 0.02 * trials
    assert covered["rows"] / trials < 0.6


def test_results_count_groups_and_keep_the_number_of_prompts():
    gains: Any = {"base": BASE, "mine": {"id": 0.2, "ood": 0.1}}
    copied = Results(made_up(gains, BOTH, prompts=80, copies=10), Path())
    once = Results(made_up(gains, BOTH, prompts=8), Path())
    assert copied.document["suites"][0]["done"] == 80
    assert copied.document["suites"][0]["prompt_groups"] == [i // 10 for i in range(80)]
    pairs = zip(copied.document["rows"], once.document["rows"], strict=True)
    for many, eight in pairs:
        assert many["n"] == eight["n"], many["figure"]
        for key in ("low", "high"):
            assert many[key] == pytest.approx(eight[key]), many["figure"]


def test_sets_that_share_prompts_are_resampled_as_one_where_they_are_pooled():
    def suite(name, first):
        prompts = tuple(Prompt(f"{i}", name, (i, i, i)) for i in range(first, first + 6))
        return Suite(name, "id", name, prompts, (), 6)

    suites = [suite("a", 0), suite("b", 100), suite("c", 3)]
    groups = prompt_groups(suites)
    assert groups["c"] == [3, 4, 5, 12, 13, 14]
    pool = resamples_of_sets(groups, 100, 0)
    assert pool.sizes == (9, 6) and pool.groups == 15 and pool.prompts == 18
    assert (pool.weights_RP[:, 3:6] == pool.weights_RP[:, 12:15]).all()
    apart = resamples_of_sets({name: groups[name] for name in "ab"}, 100, 0)
    assert apart.sizes == (6, 6)
    alone = resamples_of_sets({"a": groups["a"]}, 100, 0)
    assert (apart.weights_RP[:, :6] == alone.weights_RP).all()


def test_repeats_are_said_and_few_counts_groups(golden):
    repeats, few = remarks.of_groups({"prose": list(range(7)) * 10})
    golden(repeats["text"])
    assert few["about"] == "few_prompts"
    golden(few["text"])
    assert not list(remarks.of_groups({"prose": range(8)}))


def test_a_plan_counts_batches_that_hold_the_same_prompts_once():
    prompts = [Prompt(f"{i}", "set", (i % 4, i % 4, 9)) for i in range(16)]

    def groups(batch_size, count):
        task = SimpleNamespace(prompts=prompts, batch_size=batch_size)
        return Planner(cast(Task, task), cast(AnyDraft, None)).batch_groups(count)

    assert groups(1, 6) == [0, 1, 2, 3, 0, 1]
    assert groups(2, 4) == [0, 1, 0, 1] and groups(4, 3) == [0, 0, 0]
