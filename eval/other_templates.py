"""The same chats as another server would send them. `template:PROMPTS` names such a set.

What is asked stays; what stands around it changes, to which some drafts are less robust than their
target (arXiv 2605.09992). Prompts take turns: each is changed in one of the ways that the target's
chat template allows.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

from draftsmith.core.chats import Chat, ChatRefused, encode_messages
from draftsmith.core.errors import InputError
from draftsmith.core.prompt_rows import IN_OTHER_TEMPLATES
from draftsmith.core.prompts import PromptSet, Skipped, read_prompts
from draftsmith.core.template_date import date_of
from draftsmith.core.tokenization import Tokenizer, encode_text

_SENTENCE = "Answer in plain words, and do not repeat the question."
_DAYS = 200


def _under_a_sentence(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Behind a system sentence, in place of its own."""
    turns = [turn for turn in chat.messages if turn["role"] != "system"]
    system = {"role": "system", "content": _SENTENCE}
    return encode_messages(tokenizer, replace(chat, messages=[system, *turns]))


def _as_a_transcript(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """In a template of plain words, which every tokenizer can write."""
    turns = [f"{turn['role'].title()}: {turn['content']}\n\n" for turn in chat.messages]
    return encode_text(tokenizer, "".join(turns) + "Assistant:")


def _on_another_day(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    printed = date_of(tokenizer)
    if printed is None:
        raise ChatRefused("the chat template prints no date")
    tokenizer.template_date = str(date.fromisoformat(printed) + timedelta(days=_DAYS))
    try:
        return encode_messages(tokenizer, chat)
    finally:
        tokenizer.template_date = printed


def _thinking_otherwise(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """With the template's switch for thinking set to what it is not by itself."""
    own = encode_messages(tokenizer, chat)
    for thinking in (False, True):
        changed = encode_messages(tokenizer, chat, thinking)
        if changed != own:
            return changed
    raise ChatRefused("the chat template has no switch for thinking")


CHANGES: dict[str, Callable[[Tokenizer, Chat], list[int]]] = {
    "system": _under_a_sentence,
    "transcript": _as_a_transcript,
    "date": _on_another_day,
    "thinking": _thinking_otherwise,
}


def read_set(source: str, tokenizer: Tokenizer, **options: Any) -> PromptSet:
    """Read a prompt set as `read_prompts` does, `template:PROMPTS` too. Of the latter, rows that
    are no chats are skipped; raise InputError if none is left.
    """
    found = read_prompts(source.removeprefix(IN_OTHER_TEMPLATES), tokenizer, **options)
    if not source.startswith(IN_OTHER_TEMPLATES):
        return found
    changed = []
    skipped = list(found.skipped)
    for index, prompt in enumerate(found.prompts):
        if prompt.chat is None:
            skipped.append(Skipped(prompt.row, "it is no chat; only chats have a template"))
            continue
        ways = _ways(tokenizer, prompt.chat.question())
        way = list(ways)[index % len(ways)]
        name = f"{prompt.id}-{way}"
        changed.append(replace(prompt, id=name, ids=tuple(ways[way])))
    if not changed:
        raise InputError(f"{source}: none of its rows is a chat; only chats have a template")
    return replace(found, source=source, prompts=tuple(changed), skipped=tuple(skipped))


def _ways(tokenizer: Tokenizer, chat: Chat) -> dict[str, list[int]]:
    """The tokens of a chat after each change that the target's template allows."""
    ways = {}
    for way, change in CHANGES.items():
        with suppress(ChatRefused):
            ways[way] = change(tokenizer, chat)
    return ways
