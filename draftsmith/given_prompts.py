"""Prompts as Python callers give them: texts, token ids, chats, and what a tokenizer returns."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.errors import InputError, at
from draftsmith.core.prompts import Prompt, content_id, unique_id
from draftsmith.core.row_formats import read_turns
from draftsmith.core.tokenization import Tokenizer, chat_template_of, encode_text
from draftsmith.transformers_names import in_our_names

# A text, token ids, or a chat: a list of {"role", "content"}, or a dict that holds it.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, object]] | Mapping[str, object]
_OF_A_TURN = {"role", "from", "content", "value"}
_BYTES = (bytes, bytearray, memoryview)


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
        """Encode one prompt, or each of a list; those of a list are named by their tokens. Return
        also whether a single prompt was given, not a list.
        """
        prompts = listed(prompts, "prompts", "texts, token ids or chats")
        if isinstance(prompts, Mapping):
            row = _row(prompts, "prompts")
            return self._with_tools(row).read(row["prompts"])
        if is_one(prompts):
            return [Prompt("prompt", "default", tuple(self.encode(prompts)))], True
        repeats = Counter[str]()
        named = []
        for i, prompt in enumerate(prompts):
            ids = self.encode(prompt, f"prompts[{i}]")
            named.append(Prompt(unique_id(content_id(ids), repeats), "default", tuple(ids)))
        return named, False

    def encode(self, prompt: OnePrompt, where: str = "prompt") -> list[int]:
        """Return the token ids of a prompt. Token ids are returned as they are."""
        items: Any = listed(prompt, where, "a text, token ids or a chat")
        if isinstance(items, Mapping):
            row = _row(items, where)
            return self._with_tools(row).encode(row["prompts"], where)
        tokenizer = self.tokenizer
        if self.chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template_of(self.chat_template)
        is_text = isinstance(items, str)
        if is_text and not self.raw and tokenizer.chat_template is not None:
            items = [{"role": "user", "content": items}]
        if items and isinstance(items[0], Mapping):
            chat = Chat(read_turns(items, where), self.tools)
            with at(where):
                return encode_messages(tokenizer, chat.question())
        for name in ("tools",) if self.raw else ("tools", "chat_template"):
            if getattr(self, name):
                raise InputError(f"{name}: no chat template renders {where}; leave {name} out")
        if is_text:
            return encode_text(tokenizer, items)
        for item in items:
            if not _is_token(item):
                got = type(item).__name__
                raise InputError(f"{where}: expected a text, token ids or a chat; it holds a {got}")
        return [int(item) for item in items]

    def _with_tools(self, row: Mapping[str, Any]) -> "PromptEncoder":
        return replace(self, tools=row.get("tools", self.tools))


def _row(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return a dict's prompt as `prompts`, and its `tools`. Raise InputError without a prompt."""
    if not given.keys() & {"messages", "input_ids"}:
        line = f"{where}: a dict needs 'messages' or 'input_ids'"
        for key in ("text", "prompt"):
            if key in given:
                raise InputError(f"{line}, not '{key}'; give its text alone, without the dict")
        if given.keys() & _OF_A_TURN:
            raise InputError(
                f"{line}; a turn stands in a list, as [{{'role': ..., 'content': ...}}]"
            )
        raise InputError(line)
    return in_our_names(where, dict(given), ("prompts", "tools"))


def listed(prompts: Any, where: str, expected: str) -> Any:
    """Return an array, a tensor or a series as a list; texts, lists and dicts as they are.

    Raise InputError for what else cannot hold prompts in an order, bytes among them.
    """
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return prompts
    # Of a table, indices are names of columns.
    table = hasattr(prompts, "columns")
    if isinstance(prompts, _BYTES) or table or not hasattr(prompts, "__getitem__"):
        raise InputError(f"{where}: expected {expected}, got {type(prompts).__name__}")
    return prompts


def is_one(prompts: Any) -> bool:
    """Whether this is a single prompt, not a list of prompts; both as `listed` returns them."""
    if isinstance(prompts, str):
        return True
    if len(prompts) == 0:
        return False
    first = prompts[0]
    is_turn = isinstance(first, Mapping) and bool(first.keys() & _OF_A_TURN)
    return is_turn or _is_token(first)


def _is_token(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)
