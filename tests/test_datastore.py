"""What retrieval drafts from: reading documents, and the file that keeps their index."""

import json

import pyarrow
import pyarrow.parquet

from draftsmith.core.retrieval_text import read_documents


def test_documents_are_read_from_every_kind_of_row(tmp_path, tokenizer, monkeypatch, golden):
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
    with golden.raises():
        read_documents(str(plain), tokenizer)
