"""The suffix index: its order, what it finds, what it reads, and how long it takes."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.suffix_index import SAMPLE, SuffixIndex, read_documents, suffix_array
from draftsmith_core.errors import InputError
from draftsmith_core.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=15), max_size=5)


@given(st.lists(st.integers(-1, 3), max_size=80))
def test_the_suffix_array_is_the_sorted_suffixes(text: list[int]) -> None:
    order = suffix_array(np.array(text, dtype=np.int32))
    assert order.tolist() == sorted(range(len(text)), key=lambda start: text[start:])


def test_long_repeats_and_large_tokens_sort_too() -> None:
    rng = np.random.default_rng(0)
    for text in (
        np.full(300, 7),
        np.tile([1, 2, 3], 120),
        np.tile(rng.integers(0, 2**31 - 1, 40), 9),
        rng.integers(0, 2**31 - 1, 500),
    ):
        expected = sorted(range(len(text)), key=lambda start: text[start:].tolist())
        assert suffix_array(text).tolist() == expected


def occurrences(documents: list[list[int]], suffix: list[int], length: int) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        for at in range(len(suffix), len(document)):
            if document[at - len(suffix) : at] == suffix:
                found[tuple(document[at : at + length])] += 1
    return found


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_matches_and_continuations_are_those_of_a_scan(
    documents: list[list[int]], suffix: list[int], length: int, count: int
) -> None:
    index = SuffixIndex.build(documents)
    longest = [n for n in range(1, len(suffix) + 1) if occurrences(documents, suffix[-n:], 1)]
    assert index.match(suffix) == max(longest, default=0)
    found = index.continuations(suffix, length, count)
    expected = occurrences(documents, suffix, length)
    assert found == sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:count]
    assert SuffixIndex.build(documents[::-1]).continuations(suffix, length, count) == found


def test_no_match_crosses_documents() -> None:
    index = SuffixIndex.build([[1, 2], [3, 4], []])
    assert index.match([1, 2]) == 0 and index.match([2, 3]) == 1 and index.match([9, 1]) == 1
    assert index.continuations([3], 5, 9) == [((4,), 1)]
    assert SuffixIndex.build([]).match([1]) == 0 and SuffixIndex.build([]).largest == -1


def test_frequent_tokens_are_counted_on_an_even_sample() -> None:
    text = [0, 1] * (4 * SAMPLE) + [0, 2] * SAMPLE
    found = dict(SuffixIndex.build([text]).continuations([0], 1, 9))
    assert sum(found.values()) == SAMPLE and found[2,] == pytest.approx(SAMPLE / 5, rel=0.5)


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        SuffixIndex.build([[1, -1]])


def test_an_index_survives_the_disk_and_knows_its_source(tmp_path: Path) -> None:
    index, path = SuffixIndex.build([[1, 2, 3, 2], [2, 3]]), tmp_path / "index.safetensors"
    index.save(path, "corpus-a")
    again = SuffixIndex.load(path, "corpus-a")
    assert np.array_equal(again.text_n, index.text_n) and np.array_equal(again.places, index.places)
    assert again.digest == index.digest != SuffixIndex.build([[1, 2, 3], [2, 2, 3]]).digest
    with pytest.raises(InputError, match="another corpus"):
        SuffixIndex.load(path, "corpus-b")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="build it again"):
        SuffixIndex.load(path, "corpus-a")
    with pytest.raises(InputError, match="build it again"):
        SuffixIndex.load(tmp_path / "absent", "corpus-a")


def test_a_million_tokens_take_seconds() -> None:
    rng = np.random.default_rng(0)
    documents = [((rng.zipf(1.3, 1000) - 1) % 32000).tolist() for _ in range(1000)]
    began = time.process_time()
    index = SuffixIndex.build(documents)
    assert time.process_time() - began < 30
    assert index.text_n.nbytes + index.places.nbytes < 8.01 * 1_001_000
    assert index.match(documents[500][100:140]) == 40


def test_documents_are_read_from_every_kind_of_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"text": "the cat"},
        {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]},
        {"prompt": "a dog"},
        {"prompt_ids": [1, 2], "response_ids": [3]},
        {"text": " "},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = read_documents(str(path), tokenizer)
    assert documents[3:] == [[1, 2, 3], []] and len(documents) == 5
    assert documents[0] == tokenizer("the cat")["input_ids"]
    # The answer is part of a document although it is no part of a prompt.
    assert len(documents[1]) > len(tokenizer("the")["input_ids"]) and all(documents[:4])
    table = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["the cat"]}), table)
    assert read_documents(str(table), tokenizer) == documents[:1]
    plain = tmp_path / "corpus.txt"
    plain.write_text("the cat")
    assert read_documents(str(plain), tokenizer) == documents[:1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "found 'body'"),
        ({"text": 3}, "key 'text'"),
        ({"messages": "x"}, "key 'messages'"),
        ({"prompt_ids": [1], "response_ids": [-5]}, "key 'response_ids'"),
        ({"text": ""}, "holds no text"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, object], message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        read_documents(str(path), tokenizer)
