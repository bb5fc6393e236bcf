"""Every row of a prompt source is accounted for; what cannot be understood is named by file, line and key."""

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith_core.errors import InputError
from draftsmith_core.prompt_rows import count_rows
from draftsmith_core.prompts import PromptSet, Reasons, Skipped, read_prompts
from draftsmith_core.tokenization import Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(target_dir: str) -> Tokenizer:
    return load_tokenizer(target_dir)


@pytest.fixture
def chat(target_dir: str) -> Tokenizer:
    tokenizer = load_tokenizer(target_dir)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def adds_up(prompts: PromptSet) -> bool:
    return len(prompts.prompts) + len(prompts.skipped) == prompts.rows


def test_every_kind_of_row(tmp_path: Path, chat: Tokenizer) -> None:
    tokenizer = chat
    text = "The quick brown fox jumps over the lazy dog. " * 3
    source = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "The fox"},
        {"text": text, "id": 7, "domain": "books"},
        {"messages": [{"role": "user", "content": "The"}, {"role": "assistant", "content": "fox"}]},
        {"prompt": None, "text": None, "messages": [{"role": "user", "content": "The"}]},
    )
    found = read_prompts(source, tokenizer, domain="d", prompt_tokens=5)
    assert adds_up(found)
    first, book, asked, same = found.prompts
    assert first.ids == tuple(tokenizer("The fox")["input_ids"])
    assert first.ids[0] == tokenizer.bos_token_id
    assert book == type(book)("7", "books", tuple(tokenizer(text)["input_ids"][:5]))
    # The assistant's answer is not part of the prompt.
    assert tokenizer.decode(list(asked.ids)) == "[user]The[assistant]"
    assert asked.ids == same.ids
    assert same.id == f"{asked.id}-2"
    assert {p.domain for p in (first, asked, same)} == {"d"}


def test_a_chat_that_the_template_refuses_is_one_line(tmp_path: Path, chat: Tokenizer) -> None:
    source = jsonl(tmp_path / "p.jsonl", {"messages": [{"role": "judge", "content": "x"}]})
    with pytest.raises(InputError, match=r"p\.jsonl:1: key 'messages': .*no judges here"):
        read_prompts(source, chat)


def test_sharegpt_rows_are_chats(tmp_path: Path, chat: Tokenizer) -> None:
    def row(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"id": "twice", "conversations": [{"from": who, "value": said} for who, said in turns]}

    source = jsonl(
        tmp_path / "p.jsonl",
        row(("human", "Hi"), ("gpt", "Yes?"), ("human", "Who?"), ("gpt", "I.")),
        row(("gpt", "... the end."), ("human", "More"), ("human", "please"), ("gpt", "No")),
        row(("system", "Be brief."), ("human", "Who?")),
        row(),
        row(("gpt", "An answer alone")),
    )
    found = read_prompts(source, chat)
    assert adds_up(found)
    assert [chat.decode(list(prompt.ids)) for prompt in found.prompts] == [
        "[user]Hi[assistant]Yes?[user]Who?[assistant]",
        "[user]More\n\nplease[assistant]",
        "[system]Be brief.[user]Who?[assistant]",
    ]
    assert [skipped.row for skipped in found.skipped] == [4, 5]
    assert len({prompt.id for prompt in found.prompts}) == 3


def test_alpaca_rows_are_chats(tmp_path: Path, chat: Tokenizer) -> None:
    asked = {"instruction": "Add", "input": "1 2", "output": "3", "text": "Below is an instruction. Add 1 2: 3"}
    source = jsonl(tmp_path / "p.jsonl", asked, {"instruction": "Sing", "input": ""}, {"instruction": " "})
    found = read_prompts(source, chat)
    assert [chat.decode(list(prompt.ids)) for prompt in found.prompts] == [
        "[user]Add\n\n1 2[assistant]",
        "[user]Sing[assistant]",
    ]
    assert [skipped.row for skipped in found.skipped] == [3]


def test_parquet_is_the_same_as_jsonl(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"id": f"r{i}", "prompt": "The quick brown fox"[: 3 + i], "domain": None} for i in range(6)]
    parquet = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    lines = read_prompts(jsonl(tmp_path / "p.jsonl", *rows), tokenizer)
    table = read_prompts(str(parquet), tokenizer)
    assert lines.prompts == table.prompts
    assert lines.digest == table.digest
    assert read_prompts(str(parquet), tokenizer, limit=5).digest != table.digest


def test_rows_that_cannot_be_used_are_counted_with_their_reasons(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "  \n"},
        {"text": "too short"},
        {"prompt": "The quick brown fox jumps over the lazy dog and more"},
        {"prompt": "fox"},
    )
    found = read_prompts(source, tokenizer, max_tokens=8)
    assert adds_up(found)
    assert [skip.row for skip in found.skipped] == [1, 2, 3]
    reasons = [skip.reason for skip in found.skipped]
    assert "empty" in reasons[0]
    assert "of 32 tokens" in reasons[1]
    assert "more than the 8" in reasons[2]


def test_long_tokens_do_not_make_a_text_short(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The first characters of a text are tokenised first; when they hold too few tokens, the rest is."""
    text = " " * 5000 + "the fox"
    few = load_tokenizer(str(Path(tokenizer.name_or_path)))
    few.add_tokens([" " * 500])
    found = read_prompts(jsonl(tmp_path / "p.jsonl", {"text": text}), few, prompt_tokens=11)
    assert len(found.prompts[0].ids) == 11


def test_limit_counts_rows_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "p.jsonl", {"prompt": ""}, {"prompt": "a"}, {"prompt": "b"}, {"nonsense": 1})
    found = read_prompts(source, tokenizer, limit=3)
    assert (found.rows, len(found.prompts), len(found.skipped)) == (3, 2, 1)


def test_blank_lines_are_no_rows_and_lines_keep_their_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": ""}\n')
    found = read_prompts(str(path), tokenizer)
    assert found.rows == 2
    assert found.skipped[0].row == 5


def test_any_unicode_goes_through(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["é λ 漢字 🙂👩‍🚀", "a\u2028b\u2029c\x85d", "\u202eabc", "x\x00y"]
    found = read_prompts(jsonl(tmp_path / "p.jsonl", *({"prompt": t} for t in texts)), tokenizer)
    assert [tokenizer.decode(list(p.ids), skip_special_tokens=True) for p in found.prompts] == texts


BAD_ROWS = [
    ('{"prompt": "a"', 1, "not valid JSON"),
    ("[1]", 1, "must be a JSON object"),
    ('{"promt": "a"}', 1, "needs one of the keys messages, prompt, text, .*; has 'promt'"),
    ('{"prompt": 3}', 1, "key 'prompt': expected text, got int"),
    ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', 2, "key 'id': 'x' is also the id of row 1"),
    ('{"messages": "hi"}', 1, "key 'messages'"),
    ('{"conversations": [{"from": "human"}]}', 1, "key 'conversations'"),
    ('{"messages": [{"content": "x"}]}', 1, "key 'messages'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', 1, "only an assistant turn"),
    ('{"prompt": "ab\\ud83d"}', 1, "not valid JSON .*surrogates not allowed"),
    ('{"prompt": "a"}\n' + "[" * 100_000, 2, "not valid JSON"),
]


@pytest.mark.parametrize(("text", "line", "message"), BAD_ROWS)
def test_a_row_that_cannot_be_understood_is_named(
    tmp_path: Path, tokenizer: Tokenizer, text: str, line: int, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(InputError, match=rf"p\.jsonl:{line}: .*({message})") as caught:
        read_prompts(str(path), tokenizer)
    assert "\n" not in str(caught.value)


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, bytes | None, str]] = [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "holds no rows"),
        ("all.jsonl", b'{"prompt": ""}', "none of its 1 rows can be used"),
        ("latin.jsonl", b'{"prompt": "\xe9"}', "not valid JSON"),
        ("p.csv", b"a,b", "unknown kind of file '.csv'"),
        ("bad.parquet", b"hello", "cannot be read"),
        ("", None, "is no file"),
    ]
    for name, text, message in cases:
        if text is not None:
            (tmp_path / name).write_bytes(text)
        with pytest.raises(InputError, match=message) as caught:
            read_prompts(str(tmp_path / name), tokenizer)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError, match="^no/such-set:test: no such file, and no dataset") as caught:
        read_prompts("no/such-set:test", tokenizer)
    assert "\n" not in str(caught.value)


def test_a_hub_dataset_is_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> Any:
        asked.append((name, split, streaming))
        return iter([{"prompt": "The"}, {"prompt": "fox"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_prompts("owner/name:validation", tokenizer).prompts) == 2
    assert len(read_prompts("owner/name", tokenizer, limit=1).prompts) == 1
    assert asked == [("owner/name", "validation", True), ("owner/name", "train", True)]


def test_what_was_skipped_is_one_line_per_reason() -> None:
    skipped = [
        Skipped(2, "key 'prompt' is empty"),
        Skipped(4, "700 tokens, more than the 512 that fit"),
        Skipped(7, "key 'prompt' is empty"),
        Skipped(9, "900 tokens, more than the 512 that fit"),
        Skipped(11, "text has only 5 of 32 tokens"),
    ]
    reasons = Reasons()
    for skip in skipped:
        reasons.add(skip.row, skip.reason)
    assert reasons.total() == 5
    assert reasons.lines("skipped") == [
        "2 skipped: key 'prompt' is empty (row 2, the first)",
        "2 skipped: 700 tokens, more than the 512 that fit (row 4, the first)",
        "1 skipped: text has only 5 of 32 tokens (row 11)",
    ]
    assert Reasons().lines("skipped") == []


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "The quick"}\r\n{"prompt": "dog"}\r\n')
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "The quick"}\n{"prompt": "dog"}\n')
    assert read_prompts(str(path), tokenizer).digest == read_prompts(str(plain), tokenizer).digest


@pytest.mark.parametrize(
    "row, named",
    [
        ({"prompt": "a", "text": "b"}, "text"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "tools"),
        ({"system": "be kind", "conversations": [{"from": "human", "value": "a"}]}, "system"),
        ({"prompt": "what is shown?", "images": ["a.png"]}, "images"),
    ],
)
def test_what_could_be_meant_for_the_prompt_and_is_not_read_is_named(
    tmp_path: Path, chat: Tokenizer, caplog: pytest.LogCaptureFixture, row: Any, named: str
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "first"}, row, row)
    read_prompts(path, chat)
    warning = f"{path}: key {named!r} is ignored; prompts do not contain it"
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_a_chat_without_a_chat_template_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "a"}]
    with pytest.raises(InputError, match=r"rows\.jsonl:1: key 'messages': .* no chat template; .*--chat_template FILE"):
        read_prompts(jsonl(tmp_path / "rows.jsonl", {"messages": turns}), tokenizer)


def test_a_chat_template_from_a_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    with_template = load_tokenizer(tokenizer.name_or_path, chat_template=str(tmp_path / "t.jinja"))
    source = jsonl(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "Who?"}]})
    assert with_template.decode(list(read_prompts(source, with_template).prompts[0].ids)) == "[user]Who?[assistant]"
    with pytest.raises(InputError, match="--chat_template .*cannot be read"):
        load_tokenizer(tokenizer.name_or_path, chat_template=str(tmp_path / "gone.jinja"))


def test_prompts_in_a_store_are_those_of_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = Path(jsonl(tmp_path / "rows.jsonl", *({"prompt": f"The {number}"} for number in range(5))))
    table = pa.Table.from_pylist([json.loads(line) for line in source.read_text().splitlines()])
    pq.write_table(table, tmp_path / "rows.parquet")
    there = {
        "rows.jsonl": source.read_bytes(),
        "rows.jsonl.gz": gzip.compress(source.read_bytes()),
        "rows.parquet": (tmp_path / "rows.parquet").read_bytes(),
        "cut.jsonl.gz": gzip.compress(source.read_bytes())[:-9],
        "cut.parquet": b"PAR1",
    }
    store = fsspec.filesystem("memory")
    for name, content in there.items():
        store.pipe_file(f"/prompts/{name}", content)
    expected = read_prompts(str(source), tokenizer).prompts
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        assert read_prompts(f"memory://prompts/{name}", tokenizer).prompts == expected
    for url, said in (
        ("memory://prompts/cut.jsonl.gz", "cannot be read ("),
        ("memory://prompts/cut.parquet", "cannot be read ("),
        ("memory://prompts/none.jsonl", "cannot be read (/prompts/none.jsonl)"),
        ("memory://prompts/rows.csv", "unknown kind of file '.csv'"),
        ("nonsense://rows.jsonl", "cannot be read (Protocol not known: nonsense)"),
    ):
        with pytest.raises(InputError) as error:
            read_prompts(url, tokenizer)
        assert str(error.value).startswith(f"{url}: {said}") and "\n" not in str(error.value)


def test_texts_that_the_target_begins_by_itself(target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    found = read_prompts("self:3", tokenizer, limit=2)
    assert [prompt.ids for prompt in found.prompts] == [(0,), (0,)] and found.more
    assert len({prompt.id for prompt in found.prompts}) == 2 and {prompt.domain for prompt in found.prompts} == {
        "general"
    }
    assert count_rows("self:3") == 3
    # A model without a BOS has its EOS between texts.
    tokenizer.bos_token = None
    assert read_prompts("self:1", tokenizer).prompts[0].ids == (1,)
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="self:1: the tokenizer has no BOS or EOS"):
        read_prompts("self:1", tokenizer)
    for source in ("self:", "self:0", "token:-1", "self:many", "token:1.5"):
        with pytest.raises(InputError, match=f"{source}: write {source.partition(':')[0]}:N"):
            read_prompts(source, tokenizer)


def test_texts_that_begin_with_any_token_of_the_vocabulary(target_dir: str) -> None:
    tokenizer = load_tokenizer(target_dir)
    found = read_prompts("token:600", tokenizer).prompts
    assert {prompt.ids[0] for prompt in found} == {0} and {len(prompt.ids) for prompt in found} == {2}
    tokens = [prompt.ids[1] for prompt in found]
    # Each of 288 that are not special, about as often as any other, and the same for the same number.
    assert set(tokens) <= set(range(2, 290)) and len(set(tokens)) > 230
    assert [prompt.ids for prompt in read_prompts("token:9", tokenizer).prompts] == [p.ids for p in found[:9]]
