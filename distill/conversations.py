"""Conversations whose assistant turns the target writes anew, each after its own earlier answers.

Every turn becomes a row: its prompt is what the chat template makes of the history, as a server would be sent it, and
its response is the target's tokens. So what is trained on is marked by the tokens themselves, also where a template
rewrites history (drops earlier thinking, adds a date), and no text is ever tokenised to find it.
"""

from collections.abc import Sequence
from typing import Any

from draftsmith_core.prompts import Chat
from draftsmith_core.tokenization import Tokenizer, decode_text, encode_messages


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


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """An answer as the history of the next turn has it: its text, without the tokens that end a turn."""
    return decode_text(tokenizer, list(ids))
