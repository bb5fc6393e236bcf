"""Prompts as Python callers give them: texts, token ids and chats."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.errors import InputError, at
from draftsmith.core.prompts import Prompt, content_id, unique_id
from draftsmith.core.row_formats import read_turns
from draftsmith.core.tokenization import Tokenizer, chat_template_of, encode_text

# A text, token ids, or a chat: a list of {"role", "content"}, or a dict that holds it.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, object]] | Mapping[str, object]


@dataclass(frozen=True)
class PromptEncoder:
    """How prompts become tokens.

    raw: texts are continued as they are; else they are what the user says to a chat model.
    """

    tokenizer: Tokenizer
    raw: bool = False
    chat_template: str | None = None
    tools: list[object] | None = None

    def read(self, prompts: Any) -> tuple[list[Prompt], bool]:
        """Encode one prompt, or each of a list; name them by their tokens. Return also whether a
        single prompt was given, not a list.
        """
        prompts = _plain(prompts)
        one = _is_one(prompts)
        repeats = Counter[str]()
        named = []
        for i, prompt in enumerate([prompts] if one else prompts):
            ids = self.encode(prompt, "prompt" if one else f"prompts[{i}]")
            named.append(Prompt(unique_id(content_id(ids), repeats), "default", tuple(ids)))
        return named, one

    def encode(self, prompt: OnePrompt, where: str = "prompt") -> list[int]:
        """Return the token ids of a prompt. Token ids are returned as they are."""
        items = _plain(prompt)
        tools = self.tools
        if isinstance(items, Mapping) and "messages" in items:
            tools = items.get("tools", tools)
            items = items["messages"]
        if items in ("", []):
            raise InputError(f"{where}: is empty")
        if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray):
            raise _no_prompt(where, items)
        tokenizer = self.tokenizer
        if self.chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template_of(self.chat_template)
        is_text = isinstance(items, str)
        if is_text and not self.raw and tokenizer.chat_template is not None:
            items = [{"role": "user", "content": items}]
        if items and isinstance(items[0], Mapping):
            chat = Chat(read_turns(items, where), tools)
            with at(where):
                return encode_messages(tokenizer, chat.question())
        if tools:
            raise InputError(f"tools: no chat template renders {where}; leave tools out")
        if is_text:
            return encode_text(tokenizer, items)
        if not all(map(_is_token, items)):
            raise _no_prompt(where, items)
        return [int(item) for item in items]


def _no_prompt(where: str, given: object) -> InputError:
    return InputError(f"{where}: expected a text, token ids or a chat, got {given!r:.60}")


def _plain(prompts: Any) -> Any:
    """Return an array, a tensor or a series as a list, all else as it is."""
    return prompts.tolist() if hasattr(prompts, "tolist") else prompts


def _is_one(prompts: Any) -> bool:
    """Whether this is a single prompt, not a list of prompts."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        return True
    first = prompts[0] if prompts else None
    return _is_token(first) or (isinstance(first, Mapping) and "messages" not in first)


def _is_token(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)
