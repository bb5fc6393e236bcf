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

# A text, token ids, or a chat: a list of {"role", "content"}.
OnePrompt = str | Sequence[int] | Sequence[Mapping[str, object]]
_OF_A_TURN = {"role", "from", "content", "value"}


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
        if isinstance(prompts, Mapping):
            row = _row(prompts, "prompts")
            return self._with_tools(row).read(row["prompts"])
        if isinstance(prompts, Integral):
            raise InputError(f"prompts: expected texts, token ids or chats, got {prompts}")
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
        if isinstance(prompt, Mapping):
            row = _row(prompt, where)
            return self._with_tools(row).encode(row["prompts"], where)
        tokenizer = self.tokenizer
        if self.chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template_of(self.chat_template)
        if isinstance(prompt, str):
            if self.raw or tokenizer.chat_template is None:
                return encode_text(tokenizer, prompt)
            prompt = [{"role": "user", "content": prompt}]
        # An array or tensor of ids has `tolist`.
        items: Any = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if items and isinstance(items[0], Mapping):
            chat = Chat(read_turns(items, where), self.tools)
            with at(where):
                return encode_messages(tokenizer, chat.question())
        for item in items:
            if not isinstance(item, Integral):
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


def is_one(prompts: Any) -> bool:
    """Whether this is a single prompt, not a list of prompts."""
    if isinstance(prompts, str):
        return True
    if shape := getattr(prompts, "shape", None):
        return len(shape) == 1
    if len(prompts) == 0:
        return False
    first = prompts[0]
    is_turn = isinstance(first, Mapping) and bool(first.keys() & _OF_A_TURN)
    return is_turn or isinstance(first, Integral)
