"""What retrieval drafts from: reading documents, and the file that keeps their index."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from decode.suffix_index import SuffixIndex
from draftsmith.datastore import load_index, read_documents, read_index, save_index
from draftsmith_core.errors import InputError
from draftsmith_core.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


def test_the_index_of_a_datastore_is_kept_and_read_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kept = tmp_path / "corpus.jsonl", tmp_path / "index.safetensors"
    text.write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    plain = read_index(str(text), None, tokenizer)
    assert not kept.exists()
    built = read_index(str(text), str(kept), tokenizer)
    assert kept.exists() and built.digest == plain.digest
    with monkeypatch.context() as patch:
        patch.setattr(SuffixIndex, "build", None)
        assert read_index(str(text), str(kept), tokenizer).digest == plain.digest
    text.write_text(json.dumps({"text": "the cat sat on the hat"}) + "\n")
    with pytest.raises(InputError, match="index.safetensors: was built from another text or tokenizer; name another"):
        read_index(str(text), str(kept), tokenizer)


def test_an_index_survives_the_disk_and_knows_its_source(tmp_path: Path) -> None:
    index, path = SuffixIndex.build([[1, 2, 3, 2], [2, 3]]), tmp_path / "index.safetensors"
    save_index(index, path, "corpus-a")
    again = load_index(path, "corpus-a")
    assert np.array_equal(again.text_n, index.text_n) and np.array_equal(again.positions, index.positions)
    assert again.digest == index.digest != SuffixIndex.build([[1, 2, 3], [2, 2, 3]]).digest
    with pytest.raises(InputError, match="another text or tokenizer"):
        load_index(path, "corpus-b")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="build it again"):
        load_index(path, "corpus-a")
    with pytest.raises(InputError, match="build it again"):
        load_index(tmp_path / "absent", "corpus-a")


def test_documents_are_read_from_every_kind_of_row(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
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
    plain.write_text(" \n")
    with pytest.raises(InputError, match="corpus.txt: holds no text"):
        read_documents(str(plain), tokenizer)
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
