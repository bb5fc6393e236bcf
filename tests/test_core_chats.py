"""Chats become the tokens that a server sees and that the target writes (law 12)."""

import copy
import json
from pathlib import Path

import pytest

from distill.engines import RemoteTarget
from draftsmith_core.chats import ChatRefused, encode_messages, end_of_answer, exchange
from draftsmith_core.row_formats import read_turns
from tests.chat_families import CHATS, FAMILIES, TOOL
from train.data import load_examples

CASES = [(family, case) for family in FAMILIES for case in CHATS]


def ends_of(family: str) -> list[int]:
    tokenizer = FAMILIES[family].tokenizer
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[end] for end in FAMILIES[family].ends]


def test_there_are_twelve_families_with_all_cases():
    assert len(FAMILIES) >= 12
    assert all(family.cases.keys() == CHATS.keys() for family in FAMILIES.values())


@pytest.mark.parametrize(("name", "case"), CASES)
def test_prompt_and_answer_are_those_of_serving(name, case):
    family = FAMILIES[name]
    tokenizer = family.tokenizer
    tools: list[object] | None = [TOOL] if "tool" in case else None
    turns = read_turns(CHATS[case])
    thinking = "dropped" not in case
    wanted = family.cases[case]
    if isinstance(wanted, str):
        with pytest.raises(ChatRefused, match=wanted):
            exchange(turns, tools, tokenizer, ends_of(name), thinking=thinking)
        return
    prompt, answer = wanted
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # SentencePiece would put a space before an answer that stands alone.
    whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    behind = whole[len(prompt_ids) :]
    if not family.sentencepiece:
        behind = tokenizer(answer, add_special_tokens=False)["input_ids"]
    cut = exchange(turns, tools, tokenizer, ends_of(name), thinking=thinking)
    assert cut.prompt_ids == prompt_ids
    assert cut.answer_ids == behind
    assert cut.answer_ids[-1] in ends_of(name)
    if thinking and case != "reasoning":
        assert encode_messages(tokenizer, turns[:-1], "row", tools) == prompt_ids


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
    cut = exchange(turns, None, tokenizer, ends_of("zephyr"))
    assert tokenizer.convert_ids_to_tokens(cut.answer_ids)[:2] == ["H", "e"]
    alone = tokenizer("He is.", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(alone)[0] == "▁He"


def test_line_breaks_on_both_sides_of_the_border_stay_apart():
    """Together they are one token, which a target that writes on cannot have drawn."""
    tokenizer = FAMILIES["chatml"].tokenizer
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\nHello"}]
    cut = exchange(turns, None, tokenizer, ends_of("chatml"))
    shown = str(tokenizer.decode(cut.prompt_ids + cut.answer_ids))
    assert tokenizer.convert_ids_to_tokens(cut.answer_ids)[0] == "Ċ"
    assert shown.endswith("assistant\n\nHello<|im_end|>")


def test_a_target_that_thinks_by_default_writes_short_answers_with_its_switch_off():
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
    short = exchange([question, {"role": "assistant", "content": "4"}], None, tokenizer, ends)
    assert str(tokenizer.decode(short.prompt_ids)).endswith("assistant\n<think></think>")
    assert tokenizer.decode(short.answer_ids) == "4<|im_end|>"
    thought = {"role": "assistant", "content": "4", "reasoning": "Twice two."}
    long = exchange([question, thought], None, tokenizer, ends)
    assert str(tokenizer.decode(long.prompt_ids)).endswith("assistant\n<think>\n")
    assert tokenizer.decode(long.answer_ids) == "Twice two.\n</think>\n4<|im_end|>"


@pytest.mark.parametrize("thinking", [True, False])
def test_training_rows_are_those_tokens_and_the_others_are_counted(
    thinking, tmp_path, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tokenizer = FAMILIES["gemma3"].tokenizer
    rows = [{"messages": CHATS[case]} for case in ("plain", "reasoning", "system")]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = ends_of("gemma3")
    examples = load_examples(["chats.jsonl"], tokenizer, 512, ends=ends, thinking=thinking)
    answers = [tokenizer.decode(row["response_ids"]) for row in examples.rows]
    # The target ends its turn; it never writes <eos> there.
    expected = ["Blue.<end_of_turn>", "4<end_of_turn>", "Blue.<end_of_turn>"]
    assert answers == ([expected[0], expected[2]] if thinking else expected)
    assert ("1 of 3 rows skipped" in caplog.text) == thinking
