"""Odd inputs and a machine at its limits end in one line, or are read; no traceback, no waiting."""

import os
import shutil
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from draftsmith import __main__
from draftsmith.core.chats import Chat, ChatRefused, Template
from draftsmith.core.prompts import read_prompts
from draftsmith.core.signals import limited
from draftsmith.core.tokenization import encode, load_tokenizer
from draftsmith.distill.manifest import _finish
from tests.distilled import write_rows

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["[" * 100_000, '[{"prompt": ' + "[" * 100_000])
def test_json_that_is_nested_too_deeply_is_one_line(tmp_path, tokenizer, content, golden):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with golden.raises():
        read_prompts(str(path), tokenizer)


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("s", "UTC")])
def test_a_date_that_python_cannot_hold_does_not_stop_a_column_that_is_read(
    tmp_path, tokenizer, kind
):
    late = pa.array([10**7 if kind == pa.date32() else 10**12, 1, None]).cast(pa.int64())
    if kind == pa.date32():
        late = late.cast(pa.int32())
    table = pa.table({"made": late.cast(kind), "prompt": ["The quick", "brown", "fox"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    found = read_prompts(str(tmp_path / "rows.parquet"), tokenizer)
    assert (len(found.prompts), len(found.skipped)) == (3, 0)


def test_a_pipe_is_refused_at_once(tmp_path, tokenizer, golden):
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    for source in (str(pipe), "-"):
        with golden.raises():
            read_prompts(source, tokenizer)


@pytest.mark.parametrize(
    ("end", "grows"), [("", True), ("\n", False), ('\n{"prompt": "b"}', False)]
)
def test_a_last_line_that_is_half_written_is_said_to_grow(tmp_path, tokenizer, end, grows):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "tor' + end)
    found = read_prompts(str(path), tokenizer)
    (skipped,) = found.skipped
    assert ("is it still being written?" in skipped.reason) == grows


@pytest.mark.parametrize(
    "template", ["{{ 2.0 ** 99999 }}", "{{ 1 // 0 }}", "{{ [][3] + 1 }}", "{{ range(10 ** 9) }}"]
)
def test_whatever_a_template_raises_is_a_refusal(target_dir, template, golden):
    tokenizer = load_tokenizer(target_dir, chat_template=template)
    with golden.raises(ChatRefused):
        Template(tokenizer).prompt(Chat([{"role": "user", "content": "a"}]))


def test_a_template_without_end_is_refused_before_the_work(door, target_dir, monkeypatch, golden):
    monkeypatch.setattr("draftsmith.core.tokenization._RENDER_S", 0.2)
    door.refused(*("decode", "--target", target_dir, "--prompt", "a", "--chat_template", ENDLESS))
    # One that does not end for some chats alone refuses those.
    some = "{% if messages | length > 1 %}" + ENDLESS + "{% endif %}"
    tokenizer = load_tokenizer(target_dir, chat_template=some)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with golden.raises(ChatRefused):
        Template(tokenizer).prompt(Chat([*turns, turns[0]]))


def test_a_bound_ends_with_its_block_and_is_for_the_main_thread():
    with limited(0.05):
        pass
    sum(range(3_000_000))
    with pytest.raises(TimeoutError), limited(0.05):
        while True:
            pass
    ended = []

    def work():
        with limited(0.001):
            ended.append(sum(range(300_000)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended


def test_a_tokenizer_that_panics_skips_the_row(tmp_path, target_dir, golden):
    tokenizer = load_tokenizer(target_dir)
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex(r"^(\w+\s?)*$"), "isolated")
    with golden.raises():
        encode(tokenizer, "word " * 30 + "!")
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "word " * 30 + "!"}, {"prompt": "word"}]
    write_rows(path, *rows)
    found = read_prompts(str(path), tokenizer)
    assert [skip.row for skip in found.skipped] == [1] and len(found.prompts) == 1


FULL = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), RuntimeError(FULL)]
)
def test_a_machine_without_memory_is_one_line(monkeypatch, capsys, error, golden):
    def fail(*_):
        raise error

    monkeypatch.setattr(__main__, "run", fail)
    assert __main__.main(["status", "x"]) == 1
    golden(capsys.readouterr().err)


def test_an_out_that_is_deleted_meanwhile_is_one_line(
    door, tmp_path, target_dir, prompts_file, monkeypatch
):
    out = tmp_path / "set"

    def finish_what_is_gone(*words):
        shutil.rmtree(out)
        _finish(*words)

    monkeypatch.setattr("draftsmith.distill.manifest._finish", finish_what_is_gone)
    words = ["distill", "--target", target_dir, "--prompts", prompts_file, "--max_new_tokens", 4]
    door.refused(*words, "--out", out, code=1)
