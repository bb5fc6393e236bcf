"""Prompts of the evaluation are found in the training prompts by their words, and left out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.filters import Suites
from draftsmith_core.errors import InputError

Door = Callable[..., tuple[int, str, str]]
LONG = "the quick brown fox jumps over the lazy dog and then it runs far away home"


def suite(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "shared"),
    [
        ({"prompt": "Well: THE quick, brown fox -- jumps over the lazy dog (and then it runs)!"}, True),
        ({"prompt": "Well: the quick brown fox jumps over the lazy dog and then it walks"}, False),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": f"So {LONG}?"}]}, True),
        # What an assistant or a system turn says is not asked.
        ({"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]}, False),
        ({"text": f"Long ago, {LONG}."}, True),
        ({"prompt": "Short one!"}, True),
        ({"prompt": "A short one"}, False),
        ({"prompt": "敏捷的棕色狐狸跳过了懒惰的狗然后"}, True),
        ({"prompt": "敏捷的棕色狐狸跳过了"}, False),
    ],
)
def test_thirteen_words_in_a_row_are_shared(tmp_path: Path, row: dict[str, Any], shared: bool) -> None:
    rows = [{"prompt": LONG}, {"prompt": "short one"}, {"prompt": "敏捷的棕色狐狸跳过了懒惰的狗然后回家"}]
    found = Suites([f"fox={suite(tmp_path / 's.jsonl', *rows)}"]).shared_with(row)
    assert found == ("fox" if shared else None)


def test_the_form_of_a_suite_is_no_content(tmp_path: Path) -> None:
    form = "Answer the following question about numbers in as few words as you possibly can please: "
    rows = [{"prompt": f"{form} what is {number}?"} for number in range(11)]
    suites = Suites([f"n={suite(tmp_path / 's.jsonl', *rows)}"])
    assert suites.shared_with({"prompt": f"{form} what is 99?"}) is None
    assert suites.shared_with({"prompt": f"{form} what is 7?"}) == "n"


def test_they_are_skipped_and_counted_and_part_of_what_the_set_is(
    tmp_path: Path, target_dir: str, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suite(Path("p.jsonl"), {"prompt": "The"}, {"prompt": f"Now {LONG}"}, {"prompt": "fox"})
    fox, cat = suite(Path("fox.jsonl"), {"prompt": LONG}), suite(Path("cat.jsonl"), {"prompt": "cat"})
    words = ["distill", "--target", target_dir, "--prompts", "p.jsonl", "--out", "set", "--max_new_tokens", 4]
    words += ["--decontaminate", f"cat={cat}", f"fox={fox}"]
    code, out, err = door(*words)
    assert code == 0, err
    assert "2 rows" in out and "1 skipped: shares 13 words in a row with the evaluation's fox (row 2)" in out
    suite(Path("fox.jsonl"), {"prompt": "other words"})
    code, _, err = door(*words)
    assert code == 2 and "its decontaminated is" in err
    for wrong in ("fox.jsonl", "=fox.jsonl", "fox="):
        code, _, err = door(*words[:-2], wrong, "--out", "o")
        assert code == 2 and "expected NAME=P" in err


def test_a_set_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone.jsonl: no such file"):
        Suites([f"x={tmp_path / 'gone.jsonl'}"])
    with pytest.raises(InputError, match="--decontaminate x=.*holds no text"):
        Suites([f"x={suite(tmp_path / 's.jsonl', {'prompt': ' '})}"])
