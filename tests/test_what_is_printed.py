"""What comes from models, rows, servers and records is printed as text: no character of it controls
the terminal, no value floods it, and looking for secrets in it takes no time.
"""

import json
import logging
import time

import pytest

from draftsmith.core.errors import InputError, RunError, printable, without_secrets
from draftsmith.core.io import JsonObject, write_sealed
from draftsmith.core.ranks import say
from draftsmith.core.records import RUN
from draftsmith.core.terminal import Formatter
from draftsmith.drafts.cards import checkpoint_card
from tests.distilled import write_rows

# Sets the title, clears the screen, goes to the start of the line, and does so in one character.
ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b2J\x08"


def has_controls(text):
    return any(c < " " and c not in "\n\t" or "\x7f" <= c < "\xa0" for c in text)


def test_every_door_removes_what_controls_a_terminal(capsys):
    say(f"a{ESCAPES}b")
    record = logging.LogRecord("x", logging.WARNING, "", 1, "%s", (f"c{ESCAPES}d",), None)
    said = capsys.readouterr().err + Formatter().format(record)
    for kind in (InputError, RunError):
        said += str(kind(f"e{ESCAPES}f"))
    assert not has_controls(said) and said.count("title") == 4


def test_texts_ids_and_skips_of_decode_do_not_act(door, tmp_path, target_dir, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"a{ESCAPES}", "prompt": "The quick"},
        {"id": ESCAPES, "prompt": "b"},
        {"\x1b[1m": 1},
    ]
    write_rows(prompts, *rows)
    monkeypatch.setattr("draftsmith.pair.decode_text", lambda tokenizer, ids: f"text{ESCAPES}")
    words = f"decode --target {target_dir} --max_new_tokens 4".split()
    for more in (["--prompts", prompts], "--prompt a --num_samples 2".split()):
        out, err = door.ok(*words, *more)
        # The bar goes to the start of its line by itself.
        assert not has_controls(out + err.replace("\rdecode:", "")) and "text" in out
        (*_, last) = door.ok(*words, *more, "--json")[0].splitlines()
        assert json.loads(last)["outputs"][0]["text"] == f"text{ESCAPES}"
    door.ok(*words, *f"--prompts {prompts} --out {tmp_path}/rows.jsonl".split())
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in written] == [f"a{ESCAPES}", ESCAPES]


def test_status_does_not_act(door, tmp_path):
    record: JsonObject = {"command": f"draftsmith train{ESCAPES}", "stage": "draft"}
    record |= {"identity": {}, "inputs": {}, "paths": {}, "progress": None, "finished": False}
    write_sealed(tmp_path / RUN, record)
    out, err = door.ok("status", tmp_path)
    assert not has_controls(out + err) and "title" in out


def test_a_line_break_in_a_name_begins_no_line_of_a_card(golden):
    record = {
        "kind": "draft-lm",
        "target": "owner/name\n# Free weights",
        "config": {"draft": "a\n## Licence\n\nMIT", "data": ["b\n# c"]},
    }
    body = checkpoint_card(record).split("---\n", 2)[2]
    headings = [line for line in body.splitlines() if line.startswith("#")]
    golden(headings[0])
    assert not [line for line in headings if "Free" in line or "MIT" in line][1:]
    assert sum("Licence" in line for line in headings) == 1


@pytest.mark.parametrize(
    "text",
    ["k" * 60_000, "a://" * 20_000, "://" * 20_000, "a://b?" + ":1" * 30_000, "x" * 60_000 + "@"],
)
def test_the_filter_of_secrets_is_linear(text):
    began = time.process_time()
    without_secrets(text)
    assert time.process_time() - began < 2


def test_a_secret_behind_a_long_word_is_found_and_long_values_are_cut():
    assert without_secrets("k" * 5000 + "://me:pw@host/a?b=c") == "k" * 5000 + "://host/a"
    whole = printable(f"rows.jsonl:2: key {'k' * 60_000!r} is unknown; remove it")
    assert len(whole) < 1300
