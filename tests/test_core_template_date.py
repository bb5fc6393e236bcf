"""A date that a chat template prints belongs to a set: it is what the template sees ever after."""

import datetime
import json
from copy import deepcopy
from pathlib import Path

import pytest

from draftsmith.core import template_date
from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.train.data import divide, load_examples
from tests.distilled import write_rows

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TURNS += "{% if add_generation_prompt %}[assistant]{% endif %}"
# As Llama 3.2 and 3.3, SmolLM 3, gpt-oss and Llama 3.1 write it.
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
    '{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}'
    "{{ date_string }}\n"
)
SMOL = '{%- set today = strftime_now("%d %B %Y") -%}{{ today }}\n'
GPT = (
    "{%- macro system() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro -%}"
    "{% if true %}{{ system() }}{% endif %}\n"
)
FIXED = (
    '{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
    "{{ date_string }}\n"
)
USER = {"role": "user", "content": "fox"}


@pytest.fixture
def today(monkeypatch):
    """Set the day of the clock."""

    def is_now(day):
        class Clock(datetime.date):
            @classmethod
            def today(cls):
                return datetime.date.fromisoformat(day)

        monkeypatch.setattr(template_date, "date", Clock)

    return is_now


def written(tokenizer):
    text = tokenizer.decode(encode_messages(tokenizer, Chat([USER])))
    return str(text).partition("[user]")[0]


@pytest.mark.parametrize(
    ("template", "line"),
    [(LLAMA, "03 Feb 2024"), (SMOL, "03 February 2024"), (GPT, "2024-02-03")],
)
def test_a_template_prints_the_date_that_is_given(tokenizer, today, template, line):
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template + TURNS
    assert fix_date(tokenizer, "2024-02-03") == "2024-02-03"
    assert line in written(tokenizer)
    assert fix_date(tokenizer, None, "2024-02-03") == "2024-02-03"
    today("2024-02-04")
    assert fix_date(tokenizer, None) == "2024-02-04"
    assert line not in written(tokenizer)


def test_a_date_in_the_template_stays_and_one_that_nothing_reads_is_refused(tokenizer, golden):
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = FIXED + TURNS
    assert fix_date(tokenizer, None) is None
    golden(written(tokenizer))
    assert fix_date(tokenizer, "2025-01-02")
    golden(written(tokenizer))
    plain = deepcopy(tokenizer)
    plain.chat_template = TURNS
    assert fix_date(plain, None) is None
    with golden.raises():
        fix_date(plain, "2025-01-02")


@pytest.fixture
def chats(tmp_path, target_dir, monkeypatch):
    """The words of `distill` of eight chats in a template that prints the date."""
    monkeypatch.chdir(tmp_path)
    Path("dated.jinja").write_text(LLAMA + TURNS)
    rows = [{"messages": [{"role": "user", "content": f"The {n}"}]} for n in range(8)]
    write_rows("p.jsonl", *rows)
    words = f"distill --target {target_dir} --prompts p.jsonl --chat_template dated.jinja"
    return f"{words} --max_new_tokens 4 --part_rows 4 --device cpu".split()


def parts_of(directory):
    return [path.read_bytes() for path in sorted(Path(directory).glob("part-*.parquet"))]


def test_a_set_that_is_resumed_on_another_day_has_one_date(chats, door, today, target_dir, golden):
    today("2026-11-26")
    _, said = door.ok(*chats, "--out", "set")
    golden(said)
    manifest = json.loads(Path("set/manifest.json").read_text())
    assert manifest["identity"]["date"] == "2026-11-26"
    whole = parts_of("set")
    # As a kill would have left it.
    Path("set/run.json").write_text(json.dumps({"identity": manifest["identity"]}))
    Path("set/manifest.json").unlink()
    Path("set/part-00001.parquet").unlink()
    today("2026-11-27")
    door.ok(*chats, "--out", "set")
    assert parts_of("set") == whole
    door.refused(*chats, *"--out set --date 2026-11-27".split())
    # The same can be asked for on any day, and a set of the next day holds out the same chats.
    door.ok(*chats, *"--out again --date 2026-11-26".split())
    assert parts_of("again") == whole
    door.ok(*chats, "--out", "next")
    tokenizer = load_tokenizer(target_dir)
    training, heldout = divide(load_examples(["set", "next"], tokenizer, 64), 0.25)
    assert len(heldout.rows) == 4 and len(training.rows) == 12
    sides = [{row["asked"] for row in side.rows} for side in (training, heldout)]
    assert sides[0].isdisjoint(sides[1])


def test_training_and_evaluation_go_on_with_the_date_of_the_set(
    chats, door, today, draft_dir, target_dir, undrawn, golden
):
    today("2026-11-26")
    door.ok(*chats, "--out", "set")
    answered = [
        {
            "messages": [
                {"role": "user", "content": f"Who {n}"},
                {"role": "assistant", "content": "I"},
            ]
        }
        for n in range(4)
    ]
    write_rows("text.jsonl", *answered)
    today("2026-11-27")
    pair = f"--target {target_dir} --chat_template dated.jinja --device cpu".split()
    words = ["train", *pair, *f"--draft {draft_dir} --out draft --data set text.jsonl".split()]
    _, said = door.ok(*words, *"--steps 2 --max_length 64 --batch_size 2".split())
    golden(said)
    assert json.loads(Path("draft/draftsmith.json").read_text())["date"] == "2026-11-26"
    words = ["eval", *pair, *"--draft draft --id p.jsonl --out eval".split()]
    words += "--max_new_tokens 4 --tree none".split()
    _, said = door.ok(*words)
    golden(said)
    # Under another date the questions are still those of the training.
    said = door.refused(*words, "--date", "2026-11-28", "--strict")
