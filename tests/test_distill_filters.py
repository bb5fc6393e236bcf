"""What is left out on request is what the option says, counted, and no other row changes for it."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from distill.config import DistillConfig
from distill.engines import Answer
from distill.filters import NearDuplicates, is_held_out, why_dropped
from draftsmith_core.packages import is_installed
from draftsmith_core.prompt_rows import Record
from draftsmith_core.prompts import prompt_hash, read_prompts
from draftsmith_core.tokenization import Tokenizer, load_tokenizer

Door = Callable[..., tuple[int, str, str]]
needs_datasketch = pytest.mark.skipif(not is_installed("datasketch"), reason="datasketch is not installed")
needs_py3langid = pytest.mark.skipif(not is_installed("py3langid"), reason="py3langid is not installed")


@pytest.fixture
def words(target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"The quick brown fox {number}", "id": f"p{number}", "domain": "d"} for number in range(30)]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 10 --num_samples 3"
    return [*command.split(), "--part_rows", "12"]


def rows_of(directory: str) -> list[dict[str, Any]]:
    return [row for path in sorted(Path(directory).glob("part-*")) for row in pq.read_table(path).to_pylist()]


def manifest(directory: str = "set") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(directory, "manifest.json").read_text())
    return found


def errors(directory: str = "set") -> Counter[str]:
    lines = Path(directory, "errors.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["outcome"] for line in lines)


def test_dropped_answers_are_counted_and_the_others_are_the_same(words: list[str], door: Door) -> None:
    assert door(*words, "--out", "all")[0] == 0
    options = ["--drop", "truncated", "empty", "--min_response_tokens", 3, "--max_response_tokens", 9]
    code, out, err = door(*words, *options, "--json")
    assert code == 0, err
    every, kept, made = rows_of("all"), rows_of("set"), manifest()

    def useful(row: dict[str, Any]) -> bool:
        return row["finish_reason"] == "stop" and 3 <= len(row["response_ids"]) <= 9

    assert kept == [row for row in every if useful(row)] and 0 < len(kept) < len(every) == 90
    counts = made["counts"]
    assert counts["rows"] + counts["rows_dropped"] == 90 and counts["rows"] == len(kept)
    assert counts["prompts_done"] + counts["prompts_skipped"] == 30
    # A prompt without any answer that is kept gave nothing.
    assert counts["prompts_done"] == len({row["prompt_id"] for row in kept})
    assert sum(int(line.split()[0]) for line in made["dropped_because"]) == counts["rows_dropped"]
    assert any(" dropped: truncated (row " in line for line in made["dropped_because"])
    assert any(" tokens, fewer than min_response_tokens 3" in line for line in made["dropped_because"])
    assert all(line in out for line in made["dropped_because"] + made["skipped_because"])
    assert errors() == {"dropped": counts["rows_dropped"], "skipped": counts["prompts_skipped"]}
    code, _, err = door(*words)
    assert code == 2 and "holds another distilled set: its drop is" in err


def test_a_set_of_nothing_is_an_error(words: list[str], door: Door) -> None:
    code, _, err = door(*words, "--ignore_eos", "--drop", "truncated")
    assert code == 1 and "set: no row is left: " in err and "every answer dropped: " in err


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


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
        ({"min_response_tokens": 2}, [50], "stop", "1 tokens, fewer than min_response_tokens 2"),
        ({"max_response_tokens": 2}, [50, 51, 52], "stop", "3 tokens, more than max_response_tokens 2"),
        ({}, [1], "length", ""),
    ],
)
def test_the_reasons(tokenizer: Tokenizer, options: dict[str, Any], ids: list[int], reason: str, why: str) -> None:
    config = DistillConfig(target="t", prompts="p", out="o", **options)
    assert why_dropped(config, tokenizer, Answer(tuple(ids), reason)) == why


def test_prompts_are_held_out_by_their_content(words: list[str], door: Door, target_dir: str) -> None:
    code, out, err = door(*words, "--split", 0.7)
    assert code == 0, err
    lines = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    asked = read_prompts("p.jsonl", load_tokenizer(target_dir)).prompts
    held = [row for row, prompt in zip(lines, asked, strict=True) if prompt_hash(prompt.ids) >= 0.7 * 2**64]
    assert 2 < len(held) < 20 and f"{len(held)} skipped: held out by split (row " in out
    assert [json.loads(line) for line in Path("set/heldout.jsonl").read_text().splitlines()] == held
    # They are as they should be, and answered nowhere.
    assert not Path("set/errors.jsonl").exists()
    assert {row["prompt_id"] for row in rows_of("set")} == {row["id"] for row in lines} - {row["id"] for row in held}
    # In another order, and among others, the same are held out.
    random.Random(0).shuffle(lines)
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines[5:], {"prompt": "new"}]))
    assert door(*words, "--split", 0.7, "--out", "other")[0] == 0
    assert {row["prompt_id"] for row in rows_of("other")}.isdisjoint(row["id"] for row in held)


def test_the_share_that_is_held_out() -> None:
    held = np.mean([is_held_out([number, 3], 0.9) for number in range(20_000)])
    assert abs(held - 0.1) < 4 * math.sqrt(0.09 / 20_000)


@needs_datasketch
def test_near_duplicates_of_prompts_are_skipped(words: list[str], door: Door) -> None:
    text = "Write a short story about a lighthouse keeper who finds a letter in a bottle and answers it every day"
    rows = [{"prompt": text}, {"prompt": text.upper() + "!"}, {"prompt": text + " of the year"}, {"prompt": "Say hi"}]
    rows += [{"prompt": "Say hi"}, {"prompt": ""}, {"prompt": "Name the capital of a country of your own choice"}]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = door(*words, "--near_duplicates", 0.7, "--part_rows", 3)
    assert code == 0, err
    skipped = [json.loads(line) for line in Path("set/errors.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in skipped] == [
        (2, "nearly the same as row 1"),
        (3, "nearly the same as row 1"),
        (5, "nearly the same as row 4"),
        (6, "key 'prompt' is empty"),
    ]
    before = {path.name: path.read_bytes() for path in Path("set").iterdir()}
    Path("set/part-00006.parquet").unlink()
    assert door(*words, "--near_duplicates", 0.7, "--part_rows", 3)[0] == 0
    assert {path.name: path.read_bytes() for path in Path("set").iterdir()} == before


@needs_datasketch
def test_near_duplicates_are_those_of_exact_counting() -> None:
    """Against Jaccard similarity of the sets themselves, away from the threshold."""
    draw, base = random.Random(3), [f"w{number}" for number in range(60)]
    texts = [" ".join(base)]
    for changes in [*range(0, 12), *range(20, 32)]:
        words = list(base)
        for place in draw.sample(range(60), changes):
            words[place] = f"x{draw.randrange(10**9)}"
        texts.append(" ".join(words))

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[start : start + 5]) for start in range(len(words) - 4)}

    for number, text in enumerate(texts[1:], 2):
        one, other = runs(texts[0]), runs(text)
        similarity = len(one & other) / len(one | other)
        if abs(similarity - 0.6) > 0.15:
            found = NearDuplicates(0.6, "p.jsonl").among(
                [Record(1, {"prompt": texts[0]}), Record(number, {"prompt": text})]
            )
            assert (number in found) == (similarity > 0.6), similarity


@needs_py3langid
@pytest.mark.parametrize(
    ("text", "languages", "why"),
    [
        ("If the lock is not owned by the thread that calls release, an error is raised.", ["en"], ""),
        ("Wenn das Schloss dem Faden nicht gehört, wird ein Fehler gemeldet.", ["en"], "in language de, not en"),
        ("Wenn das Schloss dem Faden nicht gehört, wird ein Fehler gemeldet.", ["en", "de"], ""),
        ("Je ne sais pas, mais je crois que le chat est là.", ["en", "de"], "in language fr, not en or de"),
        ("こんにちは、元気ですか", ["en"], "in language ja, not en"),
        ("42", ["en"], ""),
        ("x = 3, y = 4", ["de"], ""),
        ("Paris", ["en"], ""),
        ("", ["en"], ""),
    ],
)
def test_answers_in_other_languages(tokenizer: Tokenizer, text: str, languages: list[str], why: str) -> None:
    config = DistillConfig(target="t", prompts="p", out="o", languages=languages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert why_dropped(config, tokenizer, Answer((*ids, 1), "stop")) == why


@needs_py3langid
def test_what_is_dropped_for_its_language_is_counted(
    words: list[str], door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny target writes no language, so a stand-in calls every third text French."""
    import distill.filters

    told: list[str] = []

    def classify(text: str) -> tuple[str, float]:
        told.append(text)
        return ("fr" if len(told) % 3 == 0 else "en"), 0.9

    detector = distill.filters._languages()
    monkeypatch.setattr(type(detector), "classify", lambda self, text: classify(text))
    code, out, err = door(*words, "--languages", "en")
    assert code == 0, err
    assert "30 dropped: in language fr, not en (row " in out
    assert manifest()["counts"]["rows"] == 60 and manifest()["config"]["languages"] == ["en"]
    assert errors()["dropped"] == 30
    code, _, err = door(*words, "--languages", "xx", "--out", "other")
    assert code == 2 and "languages: 'xx' is none of ace, af, am, " in err and not Path("other").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--split", "1"], "split: 1.0 must be between 0 and 1"),
        (["--near_duplicates", "1"], "near_duplicates: 1.0 must be from 0.1 to 0.95"),
        (["--drop", "short"], "expected one of empty, truncated, repetitive"),
        (["--min_response_tokens", "0"], "min_response_tokens: 0 must be at least 1"),
        (["--min_response_tokens", "11"], "min_response_tokens: 11 is more than an answer may have"),
        (["--min_response_tokens", "5", "--max_response_tokens", "4"], "min_response_tokens: 5 is more than"),
    ],
)
def test_options_that_cannot_be(words: list[str], door: Door, wrong: list[str], said: str) -> None:
    code, out, err = door(*words, *wrong)
    assert (code, out) == (2, "") and said in err
    assert not Path("set").exists()


def test_a_missing_package_is_named(words: list[str], door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith_core.packages.is_installed", lambda package: False)
    for option, value, package, extra in (
        ("near_duplicates", 0.8, "datasketch", "dedupe"),
        ("languages", "en", "py3langid", "language"),
    ):
        code, _, err = door(*words, f"--{option}", value)
        said = f"{option}: needs {package}, which is not installed; pip install 'draftsmith[{extra}]'"
        assert code == 2 and said in err
        assert not Path("set").exists()
