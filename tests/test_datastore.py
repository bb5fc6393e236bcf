"""What retrieval drafts from: reading documents, and the file that keeps their index."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from decode.suffix_index import SuffixIndex
from draftsmith.datastore import read_documents, read_index
from draftsmith_core.errors import InputError
from draftsmith_core.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


def test_the_index_of_a_datastore_is_kept_and_read_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, index_file = tmp_path / "corpus.jsonl", tmp_path / "index.safetensors"
    corpus.write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    plain = read_index(str(corpus), None, tokenizer)
    assert not index_file.exists()
    read_index(str(corpus), str(index_file), tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(SuffixIndex, "build", None)
        again = read_index(str(corpus), str(index_file), tokenizer)
    assert np.array_equal(again.text_n, plain.text_n) and np.array_equal(again.positions, plain.positions)
    whole = index_file.read_bytes()
    index_file.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="build it again"):
        read_index(str(corpus), str(index_file), tokenizer)
    index_file.write_bytes(whole)
    corpus.write_text(json.dumps({"text": "the cat sat on the hat"}) + "\n")
    with pytest.raises(InputError, match="index.safetensors: was built from another text or tokenizer; name another"):
        read_index(str(corpus), str(index_file), tokenizer)


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
    plain.write_text("the cat")
    assert read_documents(str(plain), tokenizer) == documents[:1]
    plain.write_text(" \n")
    with pytest.raises(InputError, match="corpus.txt: holds no text; a row needs one of the keys"):
        read_documents(str(plain), tokenizer)
