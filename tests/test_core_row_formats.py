"""Rows as other tools write them: what they are read as, and why others are skipped."""

import json

import pytest

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
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
TOOL = {"type": "function", "function": WEATHER}


def chat(*turns, **others):
    return {"messages": [{"role": role, "content": text} for role, text in turns], **others}


ASKED = chat(("user", "Hi"), ("assistant", "Yo"))
CALLED = {
    "messages": [
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "21 C"},
        {"role": "assistant", "content": "Warm."},
    ],
    "tools": [TOOL],
}
SPOKEN = [
    ("human", "Rome?"),
    ("function_call", json.dumps(CALL)),
    ("observation", "21 C"),
    ("gpt", "Warm."),
]


def sharegpt(*turns, **others):
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **others}


SAME = {
    "ShareGPT": (sharegpt(("human", "Hi"), ("gpt", "Yo"), id="twice"), ASKED),
    "roles in conversations": ({"conversations": ASKED["messages"]}, ASKED),
    "speakers in messages": (
        {"messages": sharegpt(("user", "Hi"), ("bot", "Yo"))["conversations"]},
        ASKED,
    ),
    "model": (chat(("human", "Hi"), ("model", "Yo")), ASKED),
    "developer": (chat(("developer", "Be kind"), ("user", "Hi")),) * 2,
    "system beside the turns": (
        sharegpt(("human", "Hi"), ("gpt", "Yo"), system="Be kind"),
        chat(("system", "Be kind"), ("user", "Hi"), ("assistant", "Yo")),
    ),
    "the rest of an answer, and one speaker twice": (
        sharegpt(("gpt", "the end."), ("human", "Hi"), ("human", "there"), ("gpt", "Yo")),
        chat(("user", "Hi\n\nthere"), ("assistant", "Yo")),
    ),
    "LLaMA-Factory's calls": (sharegpt(*SPOKEN, tools=json.dumps([WEATHER])), CALLED),
    "tools as JSON, nothing in them": (ASKED | {"tools": ""}, ASKED | {"tools": []}),
    "null keys of turns": (
        {"messages": [turn | {"tool_calls": None, "name": None} for turn in ASKED["messages"]]},
        ASKED,
    ),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Yo", "text": "Below: Hi"}, ASKED),
    "Alpaca with an input": ({"instruction": "Add", "input": "1 2"}, chat(("user", "Add\n\n1 2"))),
    "Alpaca with system and history": (
        {
            "instruction": "Bye",
            "output": "Ciao",
            "system": "Be kind",
            "history": [["Hi", "Yo"]],
        },
        chat(
            ("system", "Be kind"),
            ("user", "Hi"),
            ("assistant", "Yo"),
            ("user", "Bye"),
            ("assistant", "Ciao"),
        ),
    ),
    "OpenAI's batch": (
        {"custom_id": "1", "body": {"model": "m", **ASKED}},
        ASKED | {"model": "m", "custom_id": "1"},
    ),
    "TRL's prompt and completion": (
        {"prompt": ASKED["messages"][:1], "completion": ASKED["messages"][1:]},
        ASKED,
    ),
    "parts of text": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"text": "i"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm"},
                        {"type": "text", "text": "Yo"},
                    ],
                },
            ]
        },
        {"messages": [ASKED["messages"][0], ASKED["messages"][1] | {"reasoning_content": "Hm"}]},
    ),
    "texts as they are": ({"prompt": "Hi", "completion": "Yo"},) * 2,
    "ids as they are": ({"input_ids": [1], "labels": [1]},) * 2,
}


@pytest.mark.parametrize("name", SAME)
def test_what_a_row_is_read_as(name):
    row, expected = SAME[name]
    before = json.dumps(row)
    assert as_known(row) == expected
    assert json.dumps(row) == before


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
# A row, and a part of the message: its key and the fix.
SKIPPED = [
    (user(None), "key 'messages': turn 1: 'content' must be text, got null"),
    (user(3), "key 'messages': turn 1: 'content' must be text, got int"),
    (user(["a"]), "key 'messages': turn 1: 'content' must be text, or a list of parts with 'text'"),
    (user([IMAGE]), "turn 1: 'content' holds a part 'image_url'; only texts are read"),
    (user([{"type": "text", "text": "What?"}, IMAGE]), "'image_url'; only texts are read"),
    (chat(("user", "Hi")) | {"images": ["a.png"]}, "key 'images': only texts are read; leave"),
    (
        chat(("user", "Hi"), ("judge", "9")),
        "role 'judge' is unknown to the chat template; use user",
    ),
    (sharegpt(("human", "Hi"), ("narrator", "9")), "role 'narrator' is unknown"),
    ({"messages": [{"content": "Hi"}]}, "key 'messages': turn 1: needs 'role' (or 'from')"),
    ({"messages": ["Hi"]}, "key 'messages': turn 1: expected an object with 'role' and"),
    ({"messages": "Hi"}, "key 'messages': must be a list of at least one turn"),
    ({"conversations": []}, "key 'conversations': must be a list of at least one turn"),
    (sharegpt(("gpt", "Yo")), "key 'conversations': no user asks anything"),
    ({"conversations": [{"from": "human", "value": None}]}, "turn 1: 'value' must be text, got"),
    (sharegpt(("human", "Hi"), ("function_call", "Rome")), "'value' must be JSON of a call with"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "'tool_calls' must be a list of"),
    (chat(("user", "Hi")) | {"tools": "[weather"}, "key 'tools': must be a list of objects, or"),
    (chat(("user", "Hi")) | {"system": 3}, "key 'system': must be text, got int"),
    ({"instruction": " "}, "key 'instruction': is empty"),
    ({"instruction": 3}, "key 'instruction': must be text, got int"),
    ({"instruction": "Hi", "history": ["Hi"]}, "key 'history': expected a list of pairs"),
    ({"prompt": 3}, "key 'prompt': expected text, got int"),
    ({"prompt": [3]}, "key 'prompt': turn 1: expected an object"),
    ({"prompt": ["Hi"], "completion": "Yo"}, "key 'prompt': turn 1: expected an object"),
    ({"question": "Hi"}, "needs one of the keys messages, conversations, prompt, instruction, "),
    ({"input_ids": "1"}, "key 'input_ids': must be a list of token ids"),
    ({"input_ids": [5, 999]}, "key 'input_ids': holds a token that the tokenizer, with 290,"),
    ({"input_ids": [5, 6], "labels": [5, 6]}, "key 'input_ids': no token stands before the"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "key 'loss_mask': must be a list as long as"),
    (
        {"input_ids": [5, 6], "labels": [6, -100]},
        "key 'labels': must repeat 'input_ids' or be -100",
    ),
    ({"input_ids": [5, 6], "labels": [-100, -100]}, "key 'input_ids': no token is trained"),
    (b'{"prompt": \n', "not valid JSON"),
    (b"[1]\n", "a row must be a JSON object with one of the keys messages, "),
]


@pytest.fixture
def tokenizer(target_dir, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML)
    return load_tokenizer(target_dir, chat_template=str(tmp_path / "t.jinja"))


def with_good_rows(path, row):
    """A file with this row between two that train and prompt."""
    good = json.dumps(ASKED).encode() + b"\n"
    line = row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n"
    path.write_bytes(good + line + good)
    return str(path)


def adds_up(prompts):
    return len(prompts.prompts) + len(prompts.skipped) == prompts.rows


@pytest.mark.parametrize(("row", "said"), SKIPPED)
def test_a_row_that_cannot_be_read_is_skipped_with_key_and_fix(
    tokenizer, tmp_path, row, said, golden
):
    source = with_good_rows(tmp_path / "p.jsonl", row)
    prompts = read_prompts(source, tokenizer)
    assert adds_up(prompts) and prompts.rows == 3
    (line,) = prompts.skipped_lines()
    golden(line)
    assert said in line and "\n" not in line


@pytest.mark.parametrize(("row", "said"), SKIPPED)
def test_training_skips_it_too(tokenizer, tmp_path, caplog, row, said, golden):
    # Only a prompt needs tokens before the answer.
    if "no token stands before" in said:
        return
    source = with_good_rows(tmp_path / "p.jsonl", row)
    assert len(load_examples([source], tokenizer, 64)) == 2
    (warned,) = caplog.messages
    golden(warned)


def test_a_role_that_the_template_names_is_read(tokenizer, tmp_path):
    tokenizer.chat_template += "{% if messages[-1].role == 'judge' %}!{% endif %}"
    source = write_rows(tmp_path / "p.jsonl", chat(("user", "Hi"), ("judge", "9")))
    (prompt,) = read_prompts(source, tokenizer).prompts
    assert tokenizer.decode(prompt.ids) == "<user>Hi;<judge>9;<assistant>!"


ANSWERS = [
    (
        {"input_ids": [0, 5, 6, 7, 8, 1], "loss_mask": [0, 0, 1, 0, 1, 1]},
        [([0, 5], [6]), ([0, 5, 6, 7], [8, 1])],
    ),
    (
        {"input_ids": [0, 5, 6, 1], "labels": [-100, -100, 6, 1], "attention_mask": [1] * 4},
        [([0, 5], [6, 1])],
    ),
    ({"input_ids": [0, 5, 6], "loss_mask": [0, 1, 1], **ASKED}, [([0], [5, 6])]),
    ({"prompt_ids": [0, 5], "response_ids": [6, 1]}, [([0, 5], [6, 1])]),
]


@pytest.mark.parametrize(("row", "expected"), ANSWERS)
def test_ids_are_trained_as_they_are_each_run_behind_all_before_it(
    tokenizer, tmp_path, row, expected
):
    source = write_rows(tmp_path / "ids.jsonl", row)
    examples = load_examples([source], tokenizer, 64)
    trained = [(list(item["prompt_ids"]), list(item["response_ids"])) for item in examples.rows]
    assert trained == expected
    (prompt,) = read_prompts(source, tokenizer).prompts
    if "messages" not in row:
        assert list(prompt.ids) == expected[-1][0]


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
