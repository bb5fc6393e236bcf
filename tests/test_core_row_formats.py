"""Rows as other tools write them: what they are read as, and why others are skipped."""

import json
from pathlib import Path

import pytest
import yaml

from draftsmith.core.prompts import read_prompts
from draftsmith.core.row_formats import as_known
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.train.data import load_examples
from tests.distilled import write_rows

# As ChatML: writes whatever role and content it gets.
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


ASKED = chat(("user", "Hi"), ("assistant", "Yo"))
# Rows as other tools write them with what they are read as, rows that cannot be read, rows of ids.
ROWS = yaml.safe_load(Path(__file__).with_name("row_formats.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ROWS["same"])
def test_what_a_row_is_read_as(name):
    case = ROWS["same"][name]
    before = json.dumps(case["row"])
    assert as_known(case["row"]) == case["is"]
    assert json.dumps(case["row"]) == before


@pytest.fixture
def tokenizer(target_dir, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML)
    return load_tokenizer(target_dir, chat_template=str(tmp_path / "t.jinja"))


def test_rows_that_cannot_be_read_are_skipped_with_key_and_fix(tokenizer, tmp_path, caplog, golden):
    for row in ROWS["skipped"]:
        source = write_rows(tmp_path / "p.jsonl", ASKED, row, ASKED)
        prompts = read_prompts(source, tokenizer)
        assert len(prompts.prompts) == 2 and prompts.rows == 3
        (line,) = prompts.skipped_lines()
        golden(line)
        caplog.clear()
        # Only a prompt needs tokens before the answer.
        assert len(load_examples([source], tokenizer, 64)) == 2 + ("no token stands before" in line)
        golden("\n".join(caplog.messages))


def test_a_role_that_the_template_names_is_read(tokenizer, tmp_path):
    tokenizer.chat_template += "{% if messages[-1].role == 'judge' %}!{% endif %}"
    source = write_rows(tmp_path / "p.jsonl", chat(("user", "Hi"), ("judge", "9")))
    (prompt,) = read_prompts(source, tokenizer).prompts
    assert tokenizer.decode(prompt.ids) == "<user>Hi;<judge>9;<assistant>!"


@pytest.mark.parametrize("case", ROWS["ids"])
def test_ids_are_trained_as_they_are_each_run_behind_all_before_it(tokenizer, tmp_path, case):
    source = write_rows(tmp_path / "ids.jsonl", case["row"])
    examples = load_examples([source], tokenizer, 64)
    trained = [[list(item["prompt_ids"]), list(item["response_ids"])] for item in examples.rows]
    assert trained == case["trains"]
    (prompt,) = read_prompts(source, tokenizer).prompts
    if "messages" not in case["row"]:
        assert list(prompt.ids) == trained[-1][0]


def test_a_completion_is_trained_behind_its_prompt(tokenizer, tmp_path):
    source = write_rows(tmp_path / "p.jsonl", {"prompt": "The quick", "completion": " fox"})
    (row,) = load_examples([source], tokenizer, 64).rows
    prompt = tokenizer("The quick")["input_ids"]
    assert row["prompt_ids"] == prompt
    assert row["prompt_ids"] + row["response_ids"] == [*tokenizer("The quick fox")["input_ids"], 1]


def test_a_json_file_may_be_one_list(tokenizer, tmp_path, golden):
    rows = [ASKED, {"prompt": "Hi"}, {"question": "Hi"}]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows, indent=2))
    listed = read_prompts(str(path), tokenizer)
    lines = read_prompts(write_rows(tmp_path / "rows.jsonl", *rows), tokenizer)
    assert listed.digest == lines.digest and listed.skipped == lines.skipped
    path.write_text('[{"prompt": "Hi"},')
    with golden.raises():
        read_prompts(str(path), tokenizer)
