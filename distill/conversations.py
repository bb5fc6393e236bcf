"""Conversations whose assistant turns the target writes anew, each after its own earlier answers.

Every turn is a row: its prompt is what the chat template makes of the history, its response the
target's tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from draftsmith.core.chats import THINKING, Chat, chat_text, encode_messages
from draftsmith.core.errors import InputError, at
from draftsmith.core.tokenization import Tokenizer, decode_text

log = logging.getLogger(__name__)

# The switch in templates: the first name in Qwen3, SmolLM3 and GLM, the second in Granite and
# DeepSeek-V3.1. Jinja removes the line break with the block.
_OFF = "{% set enable_thinking = false %}{% set thinking = false %}\n"


def answered_turns(chat: Chat) -> list[int]:
    """Return the positions at which the target answers: assistant turns, and the end of a chat that
    a user ends.

    Turns before the first user's stay, and so do turns that call tools, because the results belong
    to those calls.
    """
    messages = chat.messages
    if chat.asks_once:
        return [len(chat.question().messages)]
    roles = [message["role"] for message in messages]
    first_user = roles.index("user") if "user" in roles else 0
    positions = []
    for position in range(first_user + 1, len(messages)):
        if roles[position] == "assistant" and not messages[position].get("tool_calls"):
            positions.append(position)
    return positions if roles[-1] == "assistant" else [*positions, len(messages)]


def turn_prompt(chat: Chat, answers: Sequence[str], tokenizer: Tokenizer) -> list[int] | None:
    """Return the prompt of the turn after these answers; None after the last. Raise InputError if
    the template does.
    """
    positions = answered_turns(chat)
    if len(answers) == len(positions):
        return None
    history = list(chat.messages[: positions[len(answers)]])
    for position, answer in zip(positions, answers, strict=False):
        history[position] = {"role": "assistant", "content": answer}
    return encode_messages(tokenizer, replace(chat, messages=history))


def switch_thinking_off(tokenizer: Tokenizer) -> None:
    """Set the template's switch for answers without thinking. Raise InputError if it opens a
    thought by itself.
    """
    option = "--thinking drop"
    question = Chat([{"role": "user", "content": "?"}])
    if not isinstance(tokenizer.chat_template, str):
        raise InputError(
            f"{option}: the tokenizer has no single chat template; name one with --chat_template "
            "FILE"
        )
    with at(option):
        before = chat_text(tokenizer, question)
        tokenizer.chat_template = _OFF + tokenizer.chat_template
        after = chat_text(tokenizer, question)
    begin, end = THINKING
    if after.rfind(begin) > after.rfind(end):
        raise InputError(
            f"{option}: the chat template begins every answer with {begin}; name another, or use "
            "--thinking keep"
        )
    if after == before:
        log.warning(
            "%s: the chat template has no switch for it; answers that think all the same are "
            "left out",
            option,
        )


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return an answer as text for the history of the next turn. Templates cut thinking at its
    marks; if these are special tokens, which the text lacks, it is cut here.
    """
    kept = list(ids)
    _, end = THINKING
    if end in tokenizer.all_special_tokens:
        mark = tokenizer.convert_tokens_to_ids(end)
        for position, token in enumerate(ids, 1):
            if token == mark:
                kept = list(ids[position:])
    return decode_text(tokenizer, kept)
