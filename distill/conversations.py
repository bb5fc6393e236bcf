"""Conversations whose assistant turns the target writes anew, each after its own earlier answers.

Every turn becomes a row: its prompt is what the chat template makes of the history, as a server would be sent it, and
its response is the target's tokens. So what is trained on is marked by the tokens themselves, also where a template
rewrites history (drops earlier thinking, adds a date), and no text is ever tokenised to find it.
"""

import logging
from collections.abc import Sequence
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.prompts import Chat
from draftsmith_core.tokenization import Tokenizer, chat_text, decode_text, encode_messages

log = logging.getLogger(__name__)

# What begins and ends thinking in the text of Qwen3, DeepSeek-R1 and others that learned from them.
THINKING = ("<think>", "</think>")
# What templates call the switch: Qwen3, SmolLM3 and GLM the first, Granite and DeepSeek-V3.1 the second. The line break
# is removed with the block, so that what follows still stands at the beginning of a line.
_OFF = "{% set enable_thinking = false %}{% set thinking = false %}\n"


def answered_turns(chat: Chat) -> list[int]:
    """Where the target answers: the assistant turns to write anew, and the end of a chat that another role ends.

    Turns that call tools stay as they are, because the results that follow belong to those calls, and so does what the
    assistant says before anybody has asked.
    """
    messages = chat.messages
    asked = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    own = [
        place
        for place, message in enumerate(messages)
        if place > asked and message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return own if messages[-1]["role"] == "assistant" else [*own, len(messages)]


def turn_prompt(chat: Chat, answers: Sequence[str], tokenizer: Tokenizer, where: str) -> list[int] | None:
    """The prompt of the turn that follows these answers, None when none does; InputError if the template refuses."""
    places = answered_turns(chat)
    if len(answers) == len(places):
        return None
    own = dict(zip(places, answers, strict=False))
    history: list[dict[str, Any]] = [
        {"role": "assistant", "content": own[place]} if place in own else message
        for place, message in enumerate(chat.messages[: places[len(answers)]])
    ]
    return encode_messages(tokenizer, history, where, chat.tools)


def switch_thinking_off(tokenizer: Tokenizer) -> None:
    """Make the chat template ask for answers without thinking; InputError for one that opens a thought by itself."""
    option, question = "--thinking drop", [{"role": "user", "content": "?"}]
    if not isinstance(tokenizer.chat_template, str):
        raise InputError(f"{option}: the tokenizer has no single chat template; name one with --chat_template FILE")
    before = chat_text(tokenizer, question, option)
    tokenizer.chat_template = _OFF + tokenizer.chat_template
    after = chat_text(tokenizer, question, option)
    begin, end = THINKING
    if after.rfind(begin) > after.rfind(end):
        raise InputError(
            f"{option}: the chat template begins every answer with {begin}; name another template, or keep"
        )
    if after == before:
        log.warning("%s: the chat template has no switch for it; answers that think all the same are left out", option)


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """An answer as the history of the next turn has it: its text, without the tokens that end a turn.

    Templates find thinking by its marks. Where those are special tokens they are not in the text, so it is cut here.
    """
    end = THINKING[1]
    mark: Any = tokenizer.convert_tokens_to_ids(end) if end in tokenizer.all_special_tokens else None
    if mark in ids:
        ids = ids[len(ids) - list(reversed(ids)).index(mark) :]
    return decode_text(tokenizer, list(ids))
