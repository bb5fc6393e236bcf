"""Conversations: every assistant turn is the target's own, after its own history, by the tokens
that it drew.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from draftsmith.core.chats import Chat
from draftsmith.core.prompts import prompt_hash, read_prompts
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.conversations import answer_text, answered_turns, turn_prompt
from draftsmith.distill.engines import Answer
from draftsmith.distill.filters import why_dropped
from tests.distilled import errors, manifest, rows_of, write_rows

# How three families of models write a chat, in the essentials: roles, separators, and what they do
# to history.
TEMPLATES = {
    # Earlier thinking is dropped from history, and an empty block stands where an answer begins
    # that is to have none.
    "qwen3": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% "
    "endif %}{% endif %}",
    # The system turn is put into the first user turn; roles must alternate.
    "llama2": "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and s %}<<SYS>>\n{{ s "
    "}}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    # Tools are listed first, and only the last answer keeps its thinking.
    "deepseek": "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m "
    "in messages %}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|output|>{{ "
    "m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{% if m.tool_calls is defined %}<|call|>{{ "
    "m.tool_calls | tojson }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ eos_token }}{% else %}{{ "
    "m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
}


def with_template(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


WORDS = st.text("abc .\n<>/é", min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
ANSWERS = st.lists(st.integers(2, 289), min_size=1, max_size=8)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=25)
@given(
    system=st.none() | WORDS,
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4),
    last=st.booleans(),
    answers=st.lists(ANSWERS, min_size=5, max_size=5),
)
def test_each_prompt_is_the_template_s_own_for_the_target_s_history(
    tokenizer, name, system, turns, last, answers
):
    """What the driver makes turn by turn is what a client would send that keeps the chat as
    text.
    """
    with_template(tokenizer, name)
    messages: list[dict[str, Any]] = (
        [] if system is None else [{"role": "system", "content": system}]
    )
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    chat = Chat(tuple(messages if last else messages[:-1]), None)
    assert len(answered_turns(chat)) == len(turns)
    history = messages[: len(messages) - 2 * len(turns)]
    texts: list[str] = []
    for (asked, _), ids in zip(turns, answers, strict=False):
        history = [*history, {"role": "user", "content": asked}]
        prompt = turn_prompt(chat, texts, tokenizer) or []
        encoded: Any = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_dict=True
        )
        assert prompt == list(encoded["input_ids"])
        texts.append(answer_text(tokenizer, [*ids, 1]))
        history = [*history, {"role": "assistant", "content": texts[-1]}]
    assert turn_prompt(chat, texts, tokenizer) is None


def test_tool_calls_and_their_results_stay(tokenizer, golden):
    with_template(tokenizer, "deepseek")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
    messages = (
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "dry"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Wind?"},
    )
    chat = Chat(messages, [{"type": "function", "function": {"name": "weather", "parameters": {}}}])
    assert answered_turns(chat) == [3, 5]
    first = str(tokenizer.decode(turn_prompt(chat, [], tokenizer) or []))
    golden(first)
    assert first.endswith("<|output|>dry<|Assistant|><think>\n")
    second = str(tokenizer.decode(turn_prompt(chat, ["hm</think>None."], tokenizer) or []))
    # The template drops the thinking of the earlier answer.
    assert second.endswith("<|Assistant|>None.</s><|User|>Wind?<|Assistant|><think>\n")


def test_a_turn_that_goes_on_is_asked_once(tokenizer, golden):
    """Earlier turns stay: they are what the client sent."""
    with_template(tokenizer, "qwen3")
    said = [("user", "Hi"), ("assistant", "Yo"), ("user", "Who?"), ("assistant", "I am")]
    messages = tuple({"role": role, "content": text} for role, text in said)
    chat = Chat(messages, None, {"continue_final_message": True})
    first = str(tokenizer.decode(turn_prompt(chat, [], tokenizer) or []))
    golden(first)
    assert turn_prompt(chat, ["."], tokenizer) is None


def test_thinking_is_switched_off_by_the_template(words, door, target_dir):
    Path("chat.jinja").write_text(TEMPLATES["qwen3"])
    door.ok(*words, "--thinking", "drop")
    rows = rows_of("set")
    tokenizer = load_tokenizer(target_dir)
    ends = (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "The",
    )  # the second of the row that is no chat
    assert all(str(tokenizer.decode(row["prompt_ids"])).endswith(ends) for row in rows)
    door.ok(*words, "--out", "kept")
    assert not any("<think>" in tokenizer.decode(row["prompt_ids"]) for row in rows_of("kept"))
    # The set brings the template along, with which `eval` asks the same prompts.
    asked = read_prompts(
        "p.jsonl", load_tokenizer(target_dir, chat_template="set/chat_template.jinja")
    ).prompts
    assert {int(row["prompt_hash"], 16) for row in rows} == {
        prompt_hash(prompt.ids) for prompt in asked
    }
    assert not Path("kept/chat_template.jinja").exists()
    door.refused(*words)


def test_a_template_without_the_switch(words, door, caplog, tokenizer, golden):
    door.ok(*words, "--thinking", "drop")
    golden("\n".join(caplog.messages), having="--thinking")
    Path("chat.jinja").write_text(TEMPLATES["deepseek"])
    door.refused(*words, "--thinking", "drop", "--out", "o")
    door.refused(*words[:-2], "--thinking", "drop", "--out", "o")
    assert not Path("o").exists()
    config = DistillConfig(target="t", prompts="p", out="o", thinking="drop")
    for text, why in (("<think>hm</think>No.", "thinks"), ("hm</think>No.", "thinks"), ("No.", "")):
        answer = Answer(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), "stop")
        assert why_dropped(config, tokenizer, answer) == why
        assert why_dropped(replace(config, thinking="keep"), tokenizer, answer) == ""


def test_thinking_whose_marks_are_special_tokens_is_not_history(target_dir):
    """Its text would look like the answer's, and the template could not find it."""
    tokenizer = load_tokenizer(target_dir)
    assert (
        answer_text(tokenizer, tokenizer("hm</think>No.", add_special_tokens=False)["input_ids"])
        == "hm</think>No."
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = tokenizer("<think>hm</think>No.", add_special_tokens=False)["input_ids"]
    assert answer_text(tokenizer, [*ids, 1]) == "No."


@pytest.fixture
def words(target_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    turns = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "e"),
        ("assistant", "f"),
    ]
    chat = [{"role": role, "content": said} for role, said in turns]
    rows = [
        {"messages": chat, "id": "long"},
        {"prompt": "The"},
        {"messages": chat[:3]},
        {"messages": chat[:2]},
    ]
    write_rows("p.jsonl", *rows)
    command = f"distill --target {target_dir} --prompts p.jsonl --out set --max_new_tokens 8"
    return [*command.split(), "--chat_template", "chat.jinja"]


def test_all_turns_are_rows_with_the_target_s_own_history(words, door, target_dir, golden):
    out, _ = door.ok(*words, "--num_samples", 2)
    golden(out.splitlines()[0])
    rows = rows_of("set")
    assert [(row["sample_index"], row["turn"]) for row in rows[:6]] == [
        (s, t) for s in range(2) for t in range(3)
    ]
    tokenizer = load_tokenizer(target_dir, chat_template="chat.jinja")
    for sample in range(2):
        history = ""
        for row, asked in zip(rows[3 * sample : 3 * sample + 3], "ace", strict=True):
            history += f"[user]{asked}[assistant]"
            assert tokenizer.decode(row["prompt_ids"]) == history
            history += answer_text(tokenizer, row["response_ids"])
    assert len({tuple(row["response_ids"]) for row in rows}) > 10
    # Every turn belongs to the prompt that `eval` makes of its row, so that a test on it is
    # noticed.
    asked_ids = [prompt.ids for prompt in read_prompts("p.jsonl", tokenizer).prompts]
    assert {int(row["prompt_hash"], 16) for row in rows} == {prompt_hash(ids) for ids in asked_ids}
    # `last` answers once, after the turns as the file has them.
    door.ok(*words, "--turns", "last", "--out", "last")
    assert [row["prompt_ids"] for row in rows_of("last")] == [list(ids) for ids in asked_ids]


def test_a_chat_that_outgrows_the_context_is_shortened_and_counted(words, door):
    out, _ = door.ok(*words, "--max_new_tokens", 40, "--ignore_eos")
    assert any(
        "shortened: turn 2: " in line and "more than the 56 that fit" in line
        for line in out.splitlines()
    )
    assert {line["outcome"] for line in errors()} == {"shortened"} and manifest()["counts"][
        "prompts_done"
    ] == 4


def test_a_template_that_refuses_costs_its_row_alone(words, door, golden):
    Path("chat.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'c' %}{{ raise_exception('no c') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    out, _ = door.ok(*words)
    # The first and the third row hold the turn that is refused.
    golden(out)


def test_a_chat_whose_answers_all_call_tools_is_skipped(words, door, golden):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    Path("chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}[assist]"
    )
    question = {"role": "user", "content": "a"}
    calling = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write_rows("p.jsonl", {"messages": calling}, {"messages": [question]})
    out, _ = door.ok(*words)
    golden(out.splitlines()[0])
    golden(out)
