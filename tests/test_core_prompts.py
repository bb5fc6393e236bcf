"""Every row of a prompt source is accounted for; what cannot be understood is named by file, line
and key.
"""

import copy
import gzip
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.core.errors import warn_once
from draftsmith.core.prompt_rows import check_rows, count_rows
from draftsmith.core.prompts import Prompt, read_prompts
from draftsmith.core.tokenization import load_tokenizer
from tests.distilled import write_rows

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('no judges here') "
    "}}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% "
    "endif %}"
)


@pytest.fixture
def chat(target_dir, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return load_tokenizer(target_dir, chat_template=str(tmp_path / "t.jinja"))


def adds_up(prompts):
    return len(prompts.prompts) + len(prompts.skipped) == prompts.rows


def test_every_kind_of_row(tmp_path, chat):
    text = "The quick brown fox jumps over the lazy dog. " * 3
    source = write_rows(
        tmp_path / "p.jsonl",
        {"prompt": "The fox"},
        {"text": text, "id": 7, "domain": "books"},
        {"messages": [{"role": "user", "content": "The"}, {"role": "assistant", "content": "fox"}]},
        {"prompt": None, "text": None, "messages": [{"role": "user", "content": "The"}]},
    )
    prompts = read_prompts(source, chat, domain="d", prompt_tokens=5)
    assert adds_up(prompts)
    first, book, answered, same = prompts.prompts
    assert first.ids == tuple(chat("The fox")["input_ids"]) and first.ids[0] == chat.bos_token_id
    assert book == Prompt("7", "books", tuple(chat(text)["input_ids"][:5]))
    # The assistant's answer is not part of the prompt.
    assert chat.decode(list(answered.ids)) == "[user]The[assistant]"
    assert (answered.ids, same.id) == (same.ids, f"{answered.id}-2")
    assert {prompt.domain for prompt in (first, answered, same)} == {"d"}


def test_rows_that_cannot_be_used_are_counted_with_their_reasons(tmp_path, tokenizer, golden):
    path = tmp_path / "p.jsonl"
    long = "The quick brown fox jumps over the lazy dog and more"
    # Blank lines are no rows, and lines keep their numbers.
    path.write_text(
        f'\n{{"prompt": "  "}}\n{{"text": "short"}}\n\n  '
        f'\n{{"prompt": "{long}"}}\n{{"prompt": "fox"}}\n'
    )
    prompts = read_prompts(str(path), tokenizer, max_tokens=8)
    assert adds_up(prompts) and prompts.rows == 4
    assert [skipped.row for skipped in prompts.skipped] == [2, 3, 6]
    golden("\n".join(skipped.reason for skipped in prompts.skipped))


def test_any_unicode_goes_through(tmp_path, tokenizer):
    texts = ["é λ 漢字 🙂👩‍🚀", "a\u2028b\u2029c\x85d", "\u202eabc", "x\x00y"]
    prompts = read_prompts(
        write_rows(tmp_path / "p.jsonl", *({"prompt": text} for text in texts)), tokenizer
    ).prompts
    assert [
        tokenizer.decode(list(prompt.ids), skip_special_tokens=True) for prompt in prompts
    ] == texts


BAD_ROWS = [
    '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}',
    '{"messages": [{"role": "judge", "content": "x"}]}',
    '{"prompt": "a"}\n' + "[" * 100_000,
]


@pytest.mark.parametrize("text", BAD_ROWS)
def test_a_row_that_cannot_be_understood_is_named(tmp_path, chat, text, golden):
    source = write_rows(tmp_path / "p.jsonl", text, {"prompt": "good"})
    (said,) = read_prompts(source, chat).skipped_lines()
    golden(said)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("all.jsonl", b'{"prompt": ""}'),
        ("p.csv", b"a,b"),
        ("bad.parquet", b"hello"),
        ("", None),
        ("no/such-set:test", None),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, tokenizer, name, content, golden):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with golden.raises():
        read_prompts(name if ":" in name else str(tmp_path / name), tokenizer)


def test_a_hub_dataset_is_read_by_name_and_split(monkeypatch, tokenizer):
    calls = []

    def load_dataset(name, split, streaming):
        calls.append((name, split, streaming))
        return iter([{"prompt": "The"}, {"prompt": "fox"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(read_prompts("owner/name:validation", tokenizer).prompts) == 2
    assert len(read_prompts("owner/name", tokenizer, limit=1).prompts) == 1
    assert calls == [("owner/name", "validation", True), ("owner/name", "train", True)]


@pytest.mark.parametrize(
    "row, key",
    [
        ({"prompt": "a", "text": "b"}, "text"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "tools"),
        ({"prompt": "a", "system": "be kind"}, "system"),
        # The template of `chat` writes no tools.
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}, "tools"),
    ],
)
def test_a_key_that_could_be_meant_for_the_prompt_and_is_not_read_is_named_once(
    tmp_path, chat, caplog, row, key
):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "first"}, row, row)
    read_prompts(path, chat)
    warning = f"{path}: key {key!r} is ignored; prompts do not contain it"
    messages = [record.getMessage() for record in caplog.records]
    asks = f"{path}: key 'prompt' is continued as text; to ask it in the target's chat template"
    assert [line for line in messages if not line.startswith(asks)] == [warning]
    # Without a template nothing else is meant.
    assert sum(line.startswith(asks) for line in messages) == 1
    caplog.clear()
    read_prompts(path, copy_without_template(chat))
    assert not any("continued as text" in record.getMessage() for record in caplog.records)


def copy_without_template(tokenizer):
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    return plain


def test_a_template_of_another_model_is_one_remark(target_dir, caplog, golden):
    """Its marks are no tokens of the target."""
    warn_once.cache_clear()
    marked = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    for _ in range(2):
        load_tokenizer(target_dir, chat_template=marked)
    (record,) = caplog.records
    golden(record.getMessage())
    caplog.clear()
    load_tokenizer(target_dir, chat_template="{% for m in messages %}[{{ m['role'] }}]{% endfor %}")
    assert not caplog.records


def test_the_same_rows_are_the_same_prompts_wherever_they_are(
    tokenizer, tmp_path, monkeypatch, golden
):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    rows = [{"id": f"r{number}", "prompt": f"The {number}", "domain": None} for number in range(5)]
    source = Path(write_rows(tmp_path / "rows.jsonl", *rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines, parquet = source.read_bytes(), (tmp_path / "rows.parquet").read_bytes()
    store = fsspec.filesystem("memory")
    for name, content in {
        "rows.jsonl": lines,
        "windows.jsonl": b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"),
        "rows.jsonl.gz": gzip.compress(lines),
        "rows.parquet": parquet,
        "cut.jsonl.gz": gzip.compress(lines)[:-9],
        "cut.parquet": b"PAR1",
    }.items():
        store.pipe_file(f"/prompts/{name}", content)
    expected = read_prompts(str(source), tokenizer)
    for place in ("rows.jsonl", "windows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        prompts = read_prompts(f"memory://prompts/{place}", tokenizer)
        assert (prompts.prompts, prompts.digest) == (expected.prompts, expected.digest)
    assert (
        read_prompts(str(tmp_path / "rows.parquet"), tokenizer, limit=4).digest != expected.digest
    )
    for url in (
        "memory://prompts/cut.jsonl.gz",
        "memory://prompts/cut.parquet",
        "memory://prompts/none.jsonl",
        "memory://prompts/rows.csv",
        "nonsense://rows.jsonl",
        "https://127.0.0.1/rows.jsonl",
    ):
        with golden.raises():
            read_prompts(url, tokenizer)


def test_a_mistyped_path_is_compared_with_its_neighbours(tmp_path, monkeypatch, golden):
    """A path of several parts is no name on the hub, whatever it ends with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/mine/data").mkdir(parents=True)
    for name in ("out/mine/dataa", "out/mine/other", "a--b:train"):
        with golden.raises():
            check_rows(name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("array", [False, True])
def test_another_encoding_is_refused_by_name(tokenizer, tmp_path, encoding, array, golden):
    text = '[{"prompt": "é"}]' if array else '{"prompt": "é"}\n{"prompt": "b"}\n'
    file = tmp_path / "p.jsonl"
    file.write_bytes(
        ("" if encoding[-2:] != "be" else "\ufeff").encode(encoding) + text.encode(encoding)
    )
    with golden.raises():
        read_prompts(str(file), tokenizer)
    name = encoding[:6].upper()
    # Without its mark it is no row, and never another text.
    file.write_bytes(text.encode(f"{name}-LE"))
    with golden.raises():
        read_prompts(str(file), tokenizer)
    file.write_bytes(text.encode("utf-8-sig"))
    assert read_prompts(str(file), tokenizer).prompts[0].ids == tuple(tokenizer("é")["input_ids"])


def test_texts_that_the_target_begins_by_itself(target_dir, golden):
    tokenizer = load_tokenizer(target_dir)
    prompts = read_prompts("self:3", tokenizer, limit=2)
    assert [(prompt.ids, prompt.domain) for prompt in prompts.prompts] == [((0,), "general")] * 2
    assert len({prompt.id for prompt in prompts.prompts}) == 2 and count_rows("self:3") == 3
    # A model without a BOS has its EOS between texts.
    tokenizer.bos_token = None
    assert read_prompts("self:1", tokenizer).prompts[0].ids == (1,)
    tokenizer.eos_token = None
    with golden.raises():
        read_prompts("self:1", tokenizer)
    for source in ("self:", "token:-1"):
        with golden.raises():
            read_prompts(source, tokenizer)


def test_texts_that_begin_with_any_token_of_the_vocabulary(tokenizer):
    prompts = read_prompts("token:600", tokenizer).prompts
    assert {prompt.ids[0] for prompt in prompts} == {0} and {
        len(prompt.ids) for prompt in prompts
    } == {2}
    tokens = {prompt.ids[1] for prompt in prompts}
    # Any of 288 that are not special, about as often as any other, and the same for the same
    # number.
    assert tokens <= set(range(2, 290)) and len(tokens) > 230
    assert read_prompts("token:9", tokenizer).prompts == prompts[:9]
