"""What a prompt asks tells equal prompts, whatever template, date or key they have (law 13)."""

from copy import deepcopy

import pytest

from draftsmith.core.asked_hash import asked_in_chat, earlier_turns, group_ranks
from draftsmith.core.chats import Chat
from draftsmith.core.prompts import prompt_hash, read_prompts
from tests.distilled import write_rows

TEMPLATE = (
    "{{ date | default('') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "Who?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}
SAME_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "b", "function": {"name": "f", "arguments": {"x": 1}}}],
}


def asked_of(source, tokenizer):
    return [prompt.asked for prompt in read_prompts(source, tokenizer, prompt_tokens=8).prompts]


def test_the_same_question_is_known_under_another_template(tmp_path, tokenizer):
    tokenizer = deepcopy(tokenizer)
    source = write_rows(
        tmp_path / "p.jsonl",
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "Who? "}, {"from": "gpt", "value": "I."}]},
        {"instruction": "Who?", "id": "mine"},
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"prompt": "Who?"},
    )
    tokenizer.chat_template = TEMPLATE
    asked = asked_of(source, tokenizer)
    assert len(set(asked[:3])) == 1 and len(set(asked)) == 4
    tokenizer.chat_template = "Today is another day. " + TEMPLATE
    assert asked_of(source, tokenizer) == asked


def test_a_text_asks_what_its_prompt_stands_for(tmp_path, tokenizer):
    book = "The quick brown fox jumps over the lazy dog. "
    rows = [{"text": book * 3}, {"text": book * 9}, {"text": "A" + book}, {"input_ids": [5, 6]}]
    source = write_rows(tmp_path / "p.jsonl", *rows)
    same, again, other, ids = asked_of(source, tokenizer)
    assert same == again != other
    assert ids == prompt_hash([5, 6])


def test_rows_that_share_a_key_are_one_group_in_an_order_of_their_own():
    keys = [[9, 1], [3, 2], [4, 1], [3], [7]]
    ranks = group_ranks(keys)
    assert ranks[0] == ranks[2] and ranks[1] == ranks[3] and sorted(set(ranks)) == [0, 1, 2]
    assert group_ranks(keys[::-1]) == ranks[::-1]


def test_a_later_turn_begins_with_the_earlier_one():
    prompts = [[1, 5, 2, 8], [1, 5], [], [1, 5, 2, 8, 9, 0, 3], [1, 6, 5], [1, 5, 3]]
    answers = [[9, 7], [2, 0], [1, 6, 5, 4, 0], [4, 0], [5], []]
    assert earlier_turns(prompts, answers) == [[1], [], [], [1, 0], [], []]


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        (([USER, CALL],), ([USER, SAME_CALL],), True),
        (([USER],), ([USER], [], {}), True),
        (([USER],), ([USER], [{"function": {"name": "f"}}]), False),
        (([USER],), ([USER], None, {"enable_thinking": False}), False),
        (
            ([{"role": "assistant", "content": "<think>Hm</think>\nI."}],),
            ([{"role": "assistant", "content": "I.", "reasoning_content": "Well"}],),
            True,
        ),
    ],
)
def test_turns_tools_and_arguments_count(one, two, equal):
    assert (asked_in_chat(Chat(*one)) == asked_in_chat(Chat(*two))) == equal
