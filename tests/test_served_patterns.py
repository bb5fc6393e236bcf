"""`doctor --served` finds where a server accepts less: beyond a length, after a while, on a second
reading. Healthy servers with noise are rarely accused.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftsmith.core.errors import InputError
from draftsmith.core.prompts import Prompt
from draftsmith.eval.bootstrap import PromptSums
from draftsmith.serving.against import LESS, changes, read_earlier, served_rows
from draftsmith.serving.asking import AGAIN, SHARED, ServedPrompt
from draftsmith.serving.patterns import (
    Compared,
    by_cached,
    by_length,
    find_patterns,
    later_readings,
    less_later,
)
from draftsmith.serving.report import in_words
from draftsmith.serving.running_server import ServedAnswer
from tests.conftest import SENTENCES
from tests.drafting_server import Drafting, drafting
from tests.test_served import ask, count_greedy, pair_of, place  # noqa: F401

EMITTED = 60
DRAFTS = 3


def made_up(calls: Any, lengths: Any, again: Any = None, drafted: Any = None, seed: int = 0) -> Any:
    """Prompts of these lengths, asked in a drawn order; 30 calls each were predicted."""
    drafted = np.full(len(calls), 1.0) if drafted is None else drafted
    asked = []
    order = np.random.default_rng(seed).permutation(len(calls))
    for row, length in enumerate(lengths):
        prompt = Prompt(str(row), "d", tuple(range(length)), row=row + 1)
        answers = []
        for count, cached in ((calls, 0), (calls if again is None else again, length - 1)):
            answers.append(
                ServedAnswer(
                    prompt_ids=list(prompt.ids),
                    output_ids=[5] * (EMITTED + 1),
                    calls=int(count[row]),
                    drafted=int(count[row] * DRAFTS * drafted[row]),
                    cached=cached,
                )
            )
        first, second = answers
        later = {AGAIN: second, SHARED: first}
        asked.append(ServedPrompt(prompt, first, int(order[row]), later))
    emitted = [EMITTED] * len(calls)
    served = PromptSums.of(emitted, list(calls))
    counts = Compared(served, PromptSums.of(emitted, [30.0] * len(calls)), range(len(calls)))
    return counts, asked


def found(counts: Compared, asked: Any, less: bool = False) -> list[str]:
    patterns = find_patterns(counts, asked, less, DRAFTS) + less_later(counts, asked)
    return [f"{pattern.suspect}: {pattern.detail}" for pattern in patterns]


LENGTHS = np.arange(20, 120, 8)


def test_less_beyond_a_length_is_named_by_the_length():
    calls = np.where(LENGTHS > 64, 50, 30)
    counts, asked = made_up(calls, LENGTHS)
    assert found(counts, asked) == [
        "length: as predicted up to 60 tokens of prompt, less from 68 on"
    ]
    rows = by_length(counts, asked)
    assert [(row["up_to"], row["prompts"]) for row in rows] == [(32, 2), (64, 4), (128, 7)]
    served = [row["served"]["value"] for row in rows]
    assert served == [2.0, 2.0, pytest.approx(60 / 50)] and rows[2]["predicted"]["value"] == 2.0


@pytest.mark.parametrize(("high", "less"), [(0.0, False), (-1e-9, True), (None, True)])
def test_an_interval_that_ends_at_zero_is_not_less(high, less, monkeypatch):
    def estimate(served: PromptSums, predicted: PromptSums, picks: Any) -> dict[str, Any]:
        away = (served.pooled or 0) - (predicted.pooled or 0)
        return {"value": away, "low": None if high is None else away - 1, "high": high, "n": 7}

    monkeypatch.setattr("draftsmith.serving.patterns.difference", estimate)
    counts, asked = made_up(np.where(LENGTHS > 64, 50, 30), LENGTHS)
    patterns = find_patterns(counts, asked, False, DRAFTS)
    assert [pattern.suspect for pattern in patterns] == ["length"] * less


def test_a_draft_that_is_cut_at_its_own_context_is_named():
    far = LENGTHS > 64
    counts, asked = made_up(np.where(far, 60, 30), LENGTHS, drafted=np.where(far, 0.0, 1.0))
    (line,) = found(counts, asked)
    assert line.startswith(
        "context of the draft: as predicted up to 60 tokens of prompt, less from"
    )
    assert "0% of the tokens are drafted instead of 100%" in line


def test_a_server_that_falls_in_time_is_named():
    calls = np.full(len(LENGTHS), 30)
    _, asked = made_up(calls, LENGTHS)
    calls[[each.order > 6 for each in asked]] = 45
    counts, asked = made_up(calls, LENGTHS)
    assert found(counts, asked) == ["time: as predicted for 7 prompts, less from then on"]


def test_less_on_a_second_reading_is_named():
    counts, asked = made_up(np.full(13, 30), LENGTHS, again=np.full(13, 40))
    assert found(counts, asked) == [
        f"prefix cache: less on a second reading {AGAIN} (1.50, not 2.00)"
    ]
    assert later_readings(counts, asked)[SHARED].served.pooled == 2.0
    cached = by_cached(counts, asked)
    assert [(row["up_to"], row["prompts"]) for row in cached] == [(0.0, 26), (1.0, 13)]
    assert [row["served"]["value"] for row in cached] == [2.0, 1.5]


def test_less_later_is_named():
    """Only the first prompts are asked later."""
    counts, asked = made_up(np.full(13, 30), LENGTHS)
    for each in asked[:8]:
        each.later["after 10 minutes"] = replace(each.answer, calls=40)
    assert found(counts, asked) == [
        "time: less on a second reading after 10 minutes (1.50, not 2.00)"
    ]


def test_what_changed_since_an_earlier_run(tmp_path):
    _, asked = made_up(np.full(13, 30), LENGTHS)
    old: dict[str, Any] = {"engine": "vLLM", "rows": served_rows(asked)}
    old["server"] = {"version": "0.31", "dtype": "auto"}
    file = tmp_path / "old.json"
    file.write_text("lines before\n" + json.dumps(old) + "\n")
    earlier = read_earlier(str(file))
    _, asked = made_up(np.full(12, 40), LENGTHS[1:])
    facts = {"version": "0.32", "dtype": "auto"}
    less = changes(earlier, served_rows(asked), range(12), facts)
    assert less["changed"] == {"version": ["0.31", "0.32"]}
    assert (less["prompts"], less["other_answers"], less["verdict"]) == (12, 0, LESS)
    assert (less["before"], less["now"], less["difference"]["value"]) == (2.0, 1.5, -0.5)
    _, asked = made_up(30 + np.arange(12) % 2 * 2 - 1, LENGTHS[1:])
    same = changes(earlier, served_rows(asked), range(12), facts)
    assert same["verdict"] == "no significant change"
    none = changes(earlier, [], [], facts)
    assert none["verdict"] == "not comparable" and none["prompts"] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"server": {}}', None])
def test_a_file_that_is_no_earlier_run_is_refused(tmp_path, text):
    file = tmp_path / "old.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match="is not the output of `draftsmith doctor --served"):
        read_earlier(str(file))


def test_less_at_every_length_is_not_a_length():
    """A uniform loss, with noise, has other causes."""
    calls = np.random.default_rng(1).normal(45, 3, len(LENGTHS)).round()
    counts, asked = made_up(calls, LENGTHS, again=calls)
    assert found(counts, asked, less=True) == []


def test_healthy_servers_with_noise_are_rarely_accused():
    random = np.random.default_rng(0)
    accused = 0
    for seed in range(20):
        calls, again = random.normal(30, 4, (2, len(LENGTHS)))
        accused += bool(found(*made_up(calls.round(), LENGTHS, again=again.round(), seed=seed)))
    assert accused <= 1


def worse_if(monkeypatch: pytest.MonkeyPatch, server: Drafting, worse: Any) -> None:
    """Count no accepted drafts for answers to some prompts."""
    post = server.post

    def posted(path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt: list[int] = body["prompt"]
        if not worse(prompt):
            return post(path, body)
        before = dict(server.counts)
        reply = post(path, body)
        server.counts = before
        count_greedy(server, lambda text: -1, reply["choices"][0]["token_ids"])
        return reply

    monkeypatch.setattr(server, "post", posted)


@pytest.mark.slow
def test_two_servers_that_are_worse_are_told_apart(place, monkeypatch):  # noqa: F811
    """Beyond a length, and on a second reading; neither is a draft that has not read the prompt."""
    words = " ".join(SENTENCES).split()
    rows = [{"prompt": " ".join(words[row : row + 2 + row])} for row in range(12)]
    (place / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen: set[tuple[int, ...]] = set()

    def is_long(prompt: list[int]) -> bool:
        return len(prompt) > 20

    def is_known(prompt: list[int]) -> bool:
        known = tuple(prompt) in seen
        seen.add(tuple(prompt))
        return known

    with drafting("vllm", pair_of(place)) as (url, server):
        worse_if(monkeypatch, server, is_known)
        again = ask(place, url, prompts="lengths", temperature=0)
    (place / "old.json").write_text(json.dumps(again))
    with drafting("vllm", pair_of(place)) as (url, server):
        worse_if(monkeypatch, server, is_long)
        long = ask(
            place,
            url,
            prompts="lengths",
            temperature=0,
            against=str(place / "old.json"),
            watch=1,
            watch_minutes=0.001,
        )
    assert again["cause"].startswith("prefix cache: less on a second reading"), again["tried"]
    assert long["cause"].startswith("length: as predicted up to"), (
        long["by_length"],
        long["tried"],
    )
    assert long["against"]["verdict"] == LESS and long["against"]["changed"] == {}
    assert long["readings"]["after 0.001 minutes"]["difference"]["value"] == 0
    for one in (again, long):
        lines, missed = in_words(one)
        assert missed is not None and "likely cause: " in str(missed), json.dumps(one)
