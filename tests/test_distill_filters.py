"""What is left out on request is what the option says, counted, and no other row changes for it."""

from collections import Counter

import pytest

from draftsmith.core.distilled_sets import described
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import Answer
from draftsmith.distill.filters import Suites, why_dropped
from tests.distilled import errors, manifest, rows_of, write_rows

LONG = "the quick brown fox jumps over the lazy dog and then it runs far away home"


@pytest.fixture
def words(target_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"The quick brown fox {number}", "id": f"p{number}", "domain": "d"}
        for number in range(30)
    ]
    write_rows("p.jsonl", *rows)
    command = (
        f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 10 "
        "--num_samples 3"
    )
    return [*command.split(), "--part_rows", "12"]


def test_dropped_answers_are_counted_and_the_others_are_the_same(words, door):
    door.ok(*words, "--out", "all")
    options = [
        "--drop",
        "truncated",
        "empty",
    ]
    out, _ = door.ok(*words, *options, "--json")
    every, kept, made = rows_of("all"), rows_of(), manifest()

    def useful(row):
        return row["finish_reason"] == "stop"

    assert kept == [row for row in every if useful(row)] and 0 < len(kept) < len(every) == 90
    counts = made["counts"]
    assert counts["rows"] + counts["rows_dropped"] == 90 and counts["rows"] == len(kept)
    assert counts["prompts_done"] + counts["prompts_skipped"] == 30
    # A prompt without any answer that is kept gave nothing.
    assert counts["prompts_done"] == len({row["prompt_id"] for row in kept})
    assert sum(int(line.split()[0]) for line in made["dropped_because"]) == counts["rows_dropped"]
    assert any(" dropped: truncated (row " in line for line in made["dropped_because"])
    assert all(line in out for line in made["dropped_because"] + made["skipped_because"])
    assert Counter(line["outcome"] for line in errors()) == {
        "dropped": counts["rows_dropped"],
        "skipped": counts["prompts_skipped"],
    }
    door.refused(*words)


def test_a_set_of_nothing_is_an_error(words, door, golden):
    door.refused(*words, "--ignore_eos", "--drop", "truncated", code=1)


@pytest.mark.parametrize(
    ("options", "ids", "reason", "why"),
    [
        ({"drop": ["empty"]}, [1], "stop", "empty"),
        ({"drop": ["empty"]}, [], "stop", "empty"),
        ({"drop": ["empty"]}, [50, 1], "stop", ""),
        ({"drop": ["truncated"]}, [50, 51], "length", "truncated"),
        ({"drop": ["repetitive"]}, [50, 51] * 30, "length", "repetitive"),
        ({"drop": ["repetitive"]}, [*range(40, 80), *[9] * 60], "length", "repetitive"),
        ({"drop": ["repetitive"]}, list(range(2, 200)), "length", ""),
        ({"drop": ["repetitive"]}, [50] * 31, "length", ""),
        ({}, [1], "length", ""),
    ],
)
def test_the_reasons(tokenizer, options, ids, reason, why):
    config = DistillConfig(target="t", prompts="p", out="o", **options)
    assert why_dropped(config, tokenizer, Answer(tuple(ids), reason)) == why


@pytest.mark.parametrize(
    ("row", "shared"),
    [
        (
            {"prompt": "Well: THE quick, brown fox -- jumps over the lazy dog (and then it runs)!"},
            True,
        ),
        ({"prompt": "Well: the quick brown fox jumps over the lazy dog and then it walks"}, False),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "user", "content": f"So {LONG}?"},
                ]
            },
            True,
        ),
        # What an assistant or a system turn says is not asked.
        (
            {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]},
            False,
        ),
        ({"text": f"Long ago, {LONG}."}, True),
        ({"prompt": "Short one!"}, True),
        ({"prompt": "A short one"}, False),
        ({"prompt": "敏捷的棕色狐狸跳过了懒惰的狗然后"}, True),
        ({"prompt": "敏捷的棕色狐狸跳过了"}, False),
    ],
)
def test_thirteen_words_in_a_row_are_shared(tmp_path, row, shared):
    rows = [
        {"prompt": LONG},
        {"prompt": "short one"},
        {"prompt": "敏捷的棕色狐狸跳过了懒惰的狗然后回家"},
    ]
    found = Suites([f"fox={write_rows(tmp_path / 's.jsonl', *rows)}"]).shared_with(row)
    assert found == ("fox" if shared else None)


def test_the_form_of_a_suite_is_no_content(tmp_path, golden):
    form = (
        "Answer the following question about numbers in as few words as you possibly can please: "
    )
    rows = [{"prompt": f"{form} what is {number}?"} for number in range(11)]
    suites = Suites([f"n={write_rows(tmp_path / 's.jsonl', *rows)}"])
    assert suites.shared_with({"prompt": f"{form} what is 99?"}) is None
    golden(suites.shared_with({"prompt": f"{form} what is 7?"}))


def test_they_are_skipped_and_counted_and_part_of_what_the_set_is(
    tmp_path, target_dir, door, monkeypatch, golden
):
    monkeypatch.chdir(tmp_path)
    write_rows("p.jsonl", {"prompt": "The"}, {"prompt": f"Now {LONG}"}, {"prompt": "fox"})
    fox, cat = write_rows("fox.jsonl", {"prompt": LONG}), write_rows("cat.jsonl", {"prompt": "cat"})
    words = f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 4".split()
    words += ["--decontaminate", f"cat={cat}", f"fox={fox}"]
    out, _ = door.ok(*words)
    golden(out)
    write_rows("fox.jsonl", {"prompt": "other words"})
    door.refused(*words)
    for wrong in ("=fox.jsonl", "fox="):
        door.refused(*words[:-2], wrong, "--out", "o")


def test_a_set_without_rows_is_described():
    empty = {"counts": {"rows": 0}, "texts": {"prompts": 0}}
    assert described(empty) == ["it has no rows"]
