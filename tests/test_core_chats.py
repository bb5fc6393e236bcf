"""Chats become the tokens that a server sees and that the target writes (law 12)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.core.chats import Chat, ChatRefused, encode_messages, end_of_answer, exchange
from draftsmith.core.prompts import read_prompts
from draftsmith.core.row_formats import read_turns
from draftsmith.distill.engines import RemoteTarget
from draftsmith.train.data import load_examples
from tests.chat_families import CHATS, FAMILIES, TOOL
from tests.distilled import write_rows

CASES = [(family, case) for family in FAMILIES for case in CHATS]


def ends_of(family):
    tokenizer = FAMILIES[family].tokenizer
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[end] for end in FAMILIES[family].ends]


def test_there_are_twelve_families_with_all_cases():
    assert len(FAMILIES) >= 12
    assert all(family.cases.keys() == CHATS.keys() for family in FAMILIES.values())


@pytest.mark.parametrize(("name", "case"), CASES)
def test_prompt_and_answer_are_those_of_serving(name, case, golden):
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    tools: list[object] | None = [TOOL] if "tool" in case else None
    chat = Chat(read_turns(CHATS[case]), tools)
    thinking = "dropped" not in case
    wanted = family.cases[case]
    if isinstance(wanted, str):
        with golden.raises(ChatRefused):
            exchange(chat, tokenizer, ends_of(name), thinking=thinking)
        return
    prompt, answer = wanted
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # SentencePiece would put a space before an answer that stands alone.
    whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    behind = whole[len(prompt_ids) :]
    if not family.sentencepiece:
        behind = tokenizer(answer, add_special_tokens=False)["input_ids"]
    cut = exchange(chat, tokenizer, ends_of(name), thinking=thinking)
    assert cut.prompt_ids == prompt_ids
    assert cut.answer_ids == behind
    assert cut.answer_ids[-1] in ends_of(name)
    if thinking and case != "reasoning":
        assert encode_messages(tokenizer, chat.first(-1)) == prompt_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_that_a_server_leaves_out_is_the_templates(name, tmp_path):
    family = FAMILIES[name]
    wanted = family.cases["plain"]
    assert not isinstance(wanted, str)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends_of(name)}))
    end = end_of_answer(family.tokenizer, ends_of(name))
    assert end is not None and wanted[1].endswith(str(family.tokenizer.decode([end])))
    target = RemoteTarget(str(tmp_path), family.tokenizer)
    assert target.eos_ids[0] == end and sorted(target.eos_ids) == sorted(ends_of(name))


def test_sentencepiece_puts_no_space_before_an_answer():
    tokenizer = FAMILIES["zephyr"].tokenizer
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He is."}]
    cut = exchange(Chat(turns), tokenizer, ends_of("zephyr"))
    assert tokenizer.convert_ids_to_tokens(cut.answer_ids)[:2] == ["H", "e"]
    alone = tokenizer("He is.", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(alone)[0] == "▁He"


def test_line_breaks_on_both_sides_of_the_border_stay_apart(golden):
    """Together they are one token, which a target that writes on cannot have drawn."""
    tokenizer = FAMILIES["chatml"].tokenizer
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\nHello"}]
    cut = exchange(Chat(turns), tokenizer, ends_of("chatml"))
    shown = str(tokenizer.decode(cut.prompt_ids + cut.answer_ids))
    assert tokenizer.convert_ids_to_tokens(cut.answer_ids)[0] == "Ċ"
    golden(shown)


def test_a_target_that_thinks_by_default_writes_short_answers_with_its_switch_off(golden):
    """Without a thought the answer stands behind the prompt of a chat whose thinking is off."""
    tokenizer = copy.deepcopy(FAMILIES["qwen3"].tokenizer)
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ '<|im_start|>' ~ turn.role ~ '\n' }}"
        "{% if turn.role == 'assistant' %}"
        "{{ '<think>\n' ~ turn.reasoning_content ~ '\n</think>\n' if turn.reasoning_content "
        "else '<think></think>' }}{% endif %}{{ turn.content ~ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{{ '<think></think>' if enable_thinking is defined and not enable_thinking "
        "else '<think>\n' }}{% endif %}"
    )
    question = {"role": "user", "content": "2+2?"}
    ends = ends_of("qwen3")
    answer = {"role": "assistant", "content": "4"}
    short = exchange(Chat([question, answer]), tokenizer, ends)
    golden(str(tokenizer.decode(short.prompt_ids)))
    assert tokenizer.decode(short.answer_ids) == "4<|im_end|>"
    thought = {"role": "assistant", "content": "4", "reasoning": "Twice two."}
    long = exchange(Chat([question, thought]), tokenizer, ends)
    golden(str(tokenizer.decode(long.prompt_ids)))
    golden(tokenizer.decode(long.answer_ids))


@pytest.mark.parametrize("thinking", [True, False])
def test_training_rows_are_those_tokens_and_the_others_are_counted(
    thinking, tmp_path, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tokenizer = FAMILIES["gemma3"].tokenizer
    rows = [{"messages": CHATS[case]} for case in ("plain", "reasoning", "system")]
    write_rows(Path("chats.jsonl"), *rows)
    ends = ends_of("gemma3")
    examples = load_examples(["chats.jsonl"], tokenizer, 512, ends=ends, thinking=thinking)
    answers = [tokenizer.decode(row["response_ids"]) for row in examples.rows]
    # The target ends its turn; it never writes <eos> there.
    expected = ["Blue.<end_of_turn>", "4<end_of_turn>", "Blue.<end_of_turn>"]
    assert answers == ([expected[0], expected[2]] if thinking else expected)
    assert ("1 of 3 rows skipped" in caplog.text) == thinking


ASK = [{"role": "user", "content": "2+2?"}]
FOUR = {"role": "assistant", "content": "4"}


def shown(source, name):
    """The prompts of a file, as text."""
    tokenizer = FAMILIES[name].tokenizer
    prompts = read_prompts(source, tokenizer).prompts
    return [str(tokenizer.decode(list(prompt.ids))) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "arguments", "without", "wanted"),
    [
        ("gpt_oss", {"reasoning_effort": "high"}, "Reasoning: medium", "Reasoning: high"),
        ("qwen3", {"enable_thinking": False}, "t\n", "t\n<think>\n\n</think>\n\n"),
        # As vLLM: no effort switches thinking off.
        ("qwen3", {"reasoning_effort": "none"}, "t\n", "t\n<think>\n\n</think>\n\n"),
        ("qwen3", {"add_generation_prompt": False}, "<|im_start|>assistant\n", ""),
    ],
)
def test_what_a_row_asks_of_the_template_reaches_it(name, arguments, without, wanted, tmp_path):
    """Wherever clients write it, for prompts and for the answers that train a draft."""
    kwargs = {"chat_template_kwargs": arguments}
    rows = [
        {"messages": ASK, **arguments},
        {"messages": ASK, **kwargs},
        {"messages": ASK, "chat_template_kwargs": json.dumps(arguments)},
        {"messages": ASK, "extra_body": kwargs},
        {"body": {"messages": ASK, **arguments}},
        {"request": {"messages": ASK, "extra_body": kwargs}},
        {"request": {"body": {"messages": ASK, **kwargs}}},
        {"messages": ASK, "request": kwargs, "enable_thinking": None},
    ]
    plain = {"messages": ASK, "chat_template_kwargs": None, "continue_final_message": False}
    plain["add_generation_prompt"] = True
    source = write_rows(tmp_path / "p.jsonl", plain, *rows)
    first, *others = shown(source, name)
    assert others == [first.replace(without, wanted)] * len(rows) and first not in others
    answered = [{"messages": [*ASK, FOUR], **arguments}, {"messages": [*ASK, FOUR]}]
    source = write_rows(tmp_path / "a.jsonl", *answered)
    tokenizer = FAMILIES[name].tokenizer
    asked, other = load_examples([source], tokenizer, 512, ends=ends_of(name)).rows
    assert tokenizer.decode(asked["prompt_ids"]) == others[0]
    assert tokenizer.decode(other["prompt_ids"]) == first


def test_a_turn_that_goes_on(tmp_path, caplog, golden):
    """The prompt ends in the open turn, which is no answer to train on."""
    turns = [*ASK, {"role": "assistant", "content": "Well, "}]
    row = {"messages": turns, "continue_final_message": True}
    source = write_rows(tmp_path / "p.jsonl", row)
    golden(shown(source, "qwen25")[0])
    with golden.raises():
        load_examples([source], FAMILIES["qwen25"].tokenizer, 512)


def test_what_the_template_does_not_read_is_named(tmp_path, caplog, golden):
    rows = [
        {"messages": ASK, "reasoning_effort": "low"},
        {"prompt": "2+2", "enable_thinking": True},
    ]
    rows.append({"messages": ASK, "chat_template_kwargs": {"persona": "a pirate"}})
    rows.append({"messages": ASK, "chat_template": "{{ messages }}"})
    rows.append({"messages": ASK, "chat_template_kwargs": {"chat_template": "{{ messages }}"}})
    prompts = read_prompts(write_rows(tmp_path / "p.jsonl", *rows), FAMILIES["chatml"].tokenizer)
    for key in ("reasoning_effort", "enable_thinking", "persona", "chat_template"):
        assert caplog.text.count(repr(key)) == 1
    (refused,) = prompts.skipped
    golden(refused.reason)


EARLIER = {
    "calls": (
        [CHATS["tool result"][1], CHATS["tool result"][2]],
        "does not write the tool calls of turn 2",
    ),
    "a thought alone": (
        [{"role": "assistant", "content": "", "reasoning": "Two and two."}],
        "does not write the thinking of turn 2, which has no text",
    ),
    "a thought beside text": ([FOUR | {"reasoning": "Two and two."}], ""),
}


@pytest.mark.parametrize("case", EARLIER)
def test_a_turn_that_the_template_leaves_empty_is_skipped(case, tmp_path):
    """As `train` does it; a template that names the tool elsewhere does not write the call."""
    turns, reason = EARLIER[case]
    row = {"messages": [*ASK, *turns, {"role": "user", "content": "And?"}], "tools": [TOOL]}
    source = write_rows(tmp_path / "p.jsonl", row, {"messages": ASK})
    tokenizer = copy.deepcopy(FAMILIES["chatml"].tokenizer)
    tokenizer.chat_template = "{{ tools | tojson }}" + str(tokenizer.chat_template)
    prompts = read_prompts(source, tokenizer)
    assert len(prompts.skipped) == bool(reason)
    assert all(reason in skip.reason for skip in prompts.skipped)


@pytest.mark.parametrize("gives", ["dict", "ids"])
def test_a_tokenizer_that_gives_tokens_for_text(gives, monkeypatch, golden):
    """Some of the hub ignore `tokenize=False`: the prompt is those tokens."""
    tokenizer = copy.copy(FAMILIES["qwen25"].tokenizer)
    wanted = encode_messages(tokenizer, Chat(ASK))

    def tokens(turns, tokenize=True, **others):
        given: Any = type(tokenizer).apply_chat_template(tokenizer, turns, tokenize=True, **others)
        return given if gives == "dict" else given["input_ids"]

    monkeypatch.setattr(tokenizer, "apply_chat_template", tokens)
    assert encode_messages(tokenizer, Chat(ASK)) == wanted
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda turns, **others: {1, 2})
    with golden.raises(ChatRefused):
        encode_messages(tokenizer, Chat(ASK))
