"""The same chats as another server would send them, as a prompt set of an evaluation."""

import json
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.cli.named_inputs import check_named
from draftsmith.core.template_date import date_of, fix_date
from draftsmith.core.tokenization import text_with_specials
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.groups import groups_of
from draftsmith.eval.loading import load
from draftsmith.eval.other_templates import read_set
from draftsmith.eval.remarks import of_prompts
from draftsmith.eval.request import check
from tests.distilled import write_rows

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
)
DATED = "{{ strftime_now('%d %B') }}" + TURNS
QUESTIONS = ["What is the fox?", "Who jumps over the dog?", "Where is the lazy dog?"]


@pytest.fixture
def chats(tmp_path):
    rows = []
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        rows.append({"messages": [*asked, {"role": "assistant", "content": "A dog."}]})
    # A chat with a system sentence and an earlier answer.
    earlier = [{"role": "system", "content": "Be terse."}, *rows[0]["messages"]]
    rows.append({"messages": [*earlier, {"role": "user", "content": "Why is that so?"}]})
    file = tmp_path / "chats.jsonl"
    write_rows(file, *rows)
    return str(file)


def texts(tokenizer, found):
    return [text_with_specials(tokenizer, prompt.ids) for prompt in found.prompts]


def test_chats_take_turns_and_ask_what_they_asked(chats, tokenizer, golden, caplog):
    tokenizer.chat_template = TURNS
    plain = read_set(chats, tokenizer, domain="own")
    found = read_set(f"template:{chats}", tokenizer, domain="own")
    sentence = "[system]Answer in plain words, and do not repeat the question."
    first, second, third, last = texts(tokenizer, found)
    assert first == f"{sentence}[user]{QUESTIONS[0]}" and third == f"{sentence}[user]{QUESTIONS[2]}"
    assert second == f"<s>User: {QUESTIONS[1]}\n\nAssistant:"
    golden(last)
    assert [prompt.asked for prompt in found.prompts] == [prompt.asked for prompt in plain.prompts]
    assert [prompt.id.rpartition("-")[2] for prompt in found.prompts] == [
        "system",
        "transcript",
    ] * 2
    numbers = groups_of([*plain.prompts, *found.prompts])
    assert numbers[: len(plain.prompts)] == numbers[len(plain.prompts) :]
    assert found.source == f"template:{chats}" and found.rows == plain.rows
    assert not caplog.messages


def test_what_a_template_allows_is_changed(chats, tokenizer, golden):
    tokenizer.chat_template = STRICT
    found = read_set(f"template:{chats}", tokenizer)
    assert all("User: " in text for text in texts(tokenizer, found))
    tokenizer.chat_template = DATED
    fix_date(tokenizer, "2026-01-02")
    printed = texts(tokenizer, read_set(f"template:{chats}", tokenizer))
    golden(printed[0])
    golden(printed[2])
    assert date_of(tokenizer) == "2026-01-02"
    for default in ("true", "false"):
        thought = f"{{% if enable_thinking|default({default}) %}}Think.{{% endif %}}"
        tokenizer.chat_template = thought + DATED
        plain = texts(tokenizer, read_set(chats, tokenizer))
        switched = texts(tokenizer, read_set(f"template:{chats}", tokenizer))[3]
        assert switched != plain[3]
        assert switched.replace("Think.", "") == plain[3].replace("Think.", "")


def test_only_chats_have_a_template(tmp_path, tokenizer, golden):
    tokenizer.chat_template = TURNS
    file = tmp_path / "mixed.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "The fox"}]
    rows.append({"messages": [{"role": "user", "content": "Why?"}]})
    write_rows(file, *rows)
    found = read_set(f"template:{file}", tokenizer)
    assert len(found.prompts) == 1
    golden(found.skipped[0].reason)
    file.write_text(json.dumps(rows[0]) + "\n")
    with golden.raises():
        read_set(f"template:{file}", tokenizer)


def test_eval_reads_such_a_set(chats, target_dir, draft_dir, golden):
    config = EvalConfig(
        target=target_dir,
        draft=[f"small={draft_dir}"],
        id=[f"own={chats}"],
        ood=[f"other=template:{chats}"],
        chat_template=TURNS,
        out="out",
        max_new_tokens=2,
        device="cpu",
    )
    check_named(config)
    with golden.raises():
        check_named(replace(config, ood=["other=template:none.jsonl"]))
    request = check(config)
    (own, other), _ = load(config, request.drafts, request.id_sets, request.ood_sets)
    assert not list(of_prompts([own, other])) and list(of_prompts([own, own]))
    assert (own.kind, other.kind, other.source) == ("id", "ood", f"template:{chats}")
    assert all(a.ids != b.ids for a, b in zip(own.prompts, other.prompts, strict=True))
