"""Chats as a server sees them: the prompt that it reads, and the answer that the target writes.

Both are cut from what the chat template writes. The prompt is the chat up to where an answer
begins. The answer is the rest of the same chat rendered with its answer, up to and with the first
of the target's end tokens. So an answer is spelled, trimmed and ended as the target does it.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.row_formats import CONTINUES
from draftsmith.core.template_date import dated_template
from draftsmith.core.tokenization import Tokenizer, encode, render, text_with_specials

_warn_once = cache(logging.getLogger(__name__).warning)

Turn = JsonObject
# A turn's thinking, by the names that templates read: Qwen, GLM, DeepSeek; vLLM; gpt-oss.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Marks around thinking in Qwen 3, DeepSeek R1 and models distilled from them.
THINKING = ("<think>", "</think>")
_CLOSE = THINKING[1]
# Roles of the API of servers. A template may name others.
_ROLES = ("system", "developer", "user", "assistant", "tool")
# The switch of templates: Qwen 3, SmolLM 3 and GLM read the first name, DeepSeek V3.1 and Granite
# the second.
_SWITCH = ("enable_thinking", "thinking")


class ChatRefused(InputError):
    """What a chat template does not write."""


@dataclass(frozen=True)
class Exchange:
    """An answer behind its prompt, as token ids; the answer ends with the target's end token.

    text: what a chat template wrote of the answer, without its end.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, the tools of a chat, and the switch for thinking.

    thinking: None leaves the switch as the template has it. arguments: the row's own, which reach
    the template as they do on a server.
    """

    tokenizer: Tokenizer
    tools: list[object] | None = None
    thinking: bool | None = None
    arguments: JsonObject = field(default_factory=dict)

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text up to where an answer begins.

        Raise ChatRefused if the template refuses, or leaves all of an earlier turn out.
        """
        self._check_history(turns)
        return self._prompt(turns)

    def chat(self, turns: Sequence[Turn]) -> str:
        """Return the text of a chat with its answer; ChatRefused if the template refuses."""
        whole = {"add_generation_prompt": False, CONTINUES: False}
        return self._render(turns, self.arguments | whole)

    def _prompt(self, turns: Sequence[Turn]) -> str:
        begins = {"add_generation_prompt": not self.arguments.get(CONTINUES)}
        return self._render(turns, begins | self.arguments)

    def _check_history(self, turns: Sequence[Turn]) -> None:
        """Refuse a chat whose calls, or thoughts without a text, the template does not write."""
        marked = []
        marks: dict[str, str] = {}
        for number, turn in enumerate(turns, 1):
            mark = f"mark_{number}_"
            if calls := turn.get("tool_calls"):
                names = [f"{mark}{place}_" for place in range(len(calls))]
                marks |= dict.fromkeys(names, f"tool calls of turn {number}")
                renamed = [_renamed(call, name) for call, name in zip(calls, names, strict=True)]
                turn = turn | {"tool_calls": renamed}
            elif not turn["content"].strip() and THINKING_KEYS[0] in turn:
                marks[mark] = f"thinking of turn {number}, which has no text"
                turn = turn | dict.fromkeys(THINKING_KEYS, mark)
            marked.append(turn)
        if marks:
            text = self._prompt(marked)
            for mark, what in marks.items():
                if mark not in text:
                    raise ChatRefused(f"the chat template does not write the {what}")

    def _render(self, turns: Sequence[Turn], arguments: JsonObject) -> str:
        if self.tokenizer.chat_template is None:
            raise ChatRefused(
                "the tokenizer has no chat template; name one with --chat_template FILE"
            )
        for turn in turns:
            self._check_role(turn["role"])
        switch: Any = {} if self.thinking is None else dict.fromkeys(_SWITCH, self.thinking)
        effort = arguments.get("reasoning_effort")
        if effort is not None:  # as vLLM, for templates that have the switch alone
            arguments = {_SWITCH[0]: effort != "none"} | arguments
        for name in self.arguments:
            if not self.reads(name):
                _warn_once(f"key {name!r} is ignored; the chat template does not read it")
        tools: Any = self.tools
        calls = any(turn.get("tool_calls") for turn in turns)
        dated = dated_template(self.tokenizer, self.tools)
        refusal: Exception | None = None
        # Servers pass arguments as objects; some templates join them to texts.
        for form in (_as_object, _as_text) if calls else (_as_object,):
            try:
                rendered = render(
                    self.tokenizer,
                    [_with_arguments(turn, form) for turn in turns],
                    tools=tools,
                    chat_template=dated,
                    **arguments | switch,
                )
                return self._text_of(rendered)
            # Besides its own errors a template raises whatever Python raises for a turn of a kind
            # that it did not expect.
            except Exception as error:
                refusal = refusal or error
        raise ChatRefused(f"the chat template refuses it ({refusal})")

    def _text_of(self, rendered: object) -> str:
        """Return a rendered chat. Some tokenizers give its tokens, alone or in a dict."""
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        if isinstance(ids, list):
            text = text_with_specials(self.tokenizer, ids)
            if encode_rendered(self.tokenizer, text) == ids:
                return text
        if not isinstance(rendered, str):
            raise ChatRefused(
                f"the tokenizer writes a chat as {type(rendered).__name__}, not as a text"
            )
        return rendered

    def reads(self, name: str) -> bool:
        """Whether the template names an argument, or it acts without that."""
        source = str(self.tokenizer.chat_template)
        names = {"reasoning_effort": rf"{name}|{_SWITCH[0]}"}
        return name == CONTINUES or bool(
            re.search(rf"\b({names.get(name, re.escape(name))})\b", source)
        )

    def _check_role(self, role: str) -> None:
        """Refuse a role that the template does not name: many write any role into the prompt."""
        source = str(self.tokenizer.chat_template)
        if role not in _ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
            raise ChatRefused(
                f"role {role!r} is unknown to the chat template; use user, assistant, system or "
                "tool"
            )


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Turn],
    where: str,
    tools: list[object] | None = None,
    arguments: JsonObject | None = None,
) -> list[int]:
    """Tokens of a chat up to where the assistant's answer begins, as a server makes them.

    arguments: the row's own, for the template.

    Raise ChatRefused, beginning with `where`, without a template and for a chat that it refuses.
    """
    return encode_rendered(tokenizer, chat_text(tokenizer, messages, where, tools, arguments))


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Turn],
    where: str,
    tools: list[object] | None = None,
    arguments: JsonObject | None = None,
) -> str:
    """Return the text that `encode_messages` tokenises; raise ChatRefused as it does."""
    template = Template(tokenizer, tools, arguments=arguments or {})
    try:
        return template.prompt([_one_thinking(turn) for turn in messages])
    except ChatRefused as error:
        raise ChatRefused(f"{where}: key 'messages': {error}") from None


def exchange(
    turns: Sequence[Turn],
    tools: list[object] | None,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    *,
    thinking: bool = True,
    arguments: JsonObject | None = None,
) -> Exchange:
    """Cut a chat that ends with an assistant turn into its prompt and its answer.

    ends: the target's end tokens; without any, the tokenizer's EOS. thinking: whether the answer
    keeps its thinking; if not, the template's switch is off. arguments: the row's own, for the
    template. Raise ChatRefused with the reason if the template does not write the answer behind the
    prompt, or leaves a part of it out.
    """
    arguments = arguments or {}
    if arguments.get(CONTINUES):
        raise ChatRefused(f"the row has no answer: its last turn is to go on ({CONTINUES})")
    turns = [_one_thinking(turn) if thinking else without_thinking(turn) for turn in turns]
    answer = turns[-1]
    if not ends and tokenizer.eos_token_id is not None:
        ends = (tokenizer.eos_token_id,)
    templates = [Template(tokenizer, tools, None if thinking else False, arguments)]
    # A template whose default is to think writes answers without thoughts when its switch is off,
    # and the other way round.
    if not arguments.keys() & {*_SWITCH, "reasoning_effort"}:
        templates.append(Template(tokenizer, tools, THINKING_KEYS[0] in answer, arguments))
    for template in templates:
        prompt, chat = template.prompt(turns[:-1]), template.chat(turns)
        if chat.startswith(prompt):
            written = chat[len(prompt) :]
            _check_whole(answer, written)
            prompt_ids = encode_rendered(tokenizer, prompt)
            ids = encode_behind(tokenizer, prompt, prompt_ids, written)
            for place, token in enumerate(ids):
                if token in ends:
                    text = written.partition(text_with_specials(tokenizer, [token]))[0]
                    return Exchange(prompt_ids, ids[: place + 1], text)
            # Such templates (GLM) let an answer end with the mark of whoever speaks next.
            text = _without_separator(answer, written)
            ids = encode_behind(tokenizer, prompt, prompt_ids, text)
            end = _end_before_next(template, turns, ends)
            return Exchange(prompt_ids, ids if end is None else [*ids, end], text)
    raise ChatRefused("the chat template does not write this answer behind the prompt of a server")


def exchanges(
    turns: Sequence[Turn],
    places: Sequence[int],
    tools: list[object] | None,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    *,
    thinking: bool = True,
    arguments: JsonObject | None = None,
) -> list[Exchange | ChatRefused]:
    """Cut a chat at each of these assistant turns as `exchange` does, with the turns before it.

    The reason stands in place of a turn that the template refuses, or that it writes otherwise
    once the chat goes on: of such a turn a chat may keep less than the target wrote.
    """
    cuts: list[Exchange | ChatRefused] = []
    for place in places:
        asked = turns[: place + 1]
        try:
            cut = exchange(asked, tools, tokenizer, ends, thinking=thinking, arguments=arguments)
            if place + 1 < len(turns):
                known = [
                    _one_thinking(turn) if thinking else without_thinking(turn) for turn in turns
                ]
                switch = None if thinking else False
                whole = Template(tokenizer, tools, switch, arguments or {}).chat(known)
                if cut.text.strip() not in whole:
                    raise ChatRefused("the chat template rewrites it once the chat goes on")
            cuts.append(cut)
        except ChatRefused as error:
            cuts.append(error)
    return cuts


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of what a chat template wrote, which has its special tokens itself."""
    return encode(tokenizer, text, add_special_tokens=False)


def encode_behind(tokenizer: Tokenizer, prompt: str, prompt_ids: list[int], text: str) -> list[int]:
    """Tokens of a text behind those of its prompt. Raise ChatRefused if there are none.

    A tokenizer of SentencePiece puts a space before a text that stands alone, and one of bytes
    joins line breaks on both sides of the border; neither happens to a target that writes on.
    """
    whole = encode_rendered(tokenizer, prompt + text)
    if whole[: len(prompt_ids)] == prompt_ids:
        return whole[len(prompt_ids) :]
    line_break = encode_rendered(tokenizer, "\n")
    behind_break = encode_rendered(tokenizer, "\n" + text)
    shown = text_with_specials(tokenizer, prompt_ids) + text
    for ids in (behind_break[len(line_break) :], encode_rendered(tokenizer, text)):
        if text_with_specials(tokenizer, [*prompt_ids, *ids]) == shown:
            return ids
    raise ChatRefused("no tokens behind the prompt's give the answer's text")


def end_of_answer(tokenizer: Tokenizer, ends: Sequence[int]) -> int | None:
    """Return the end token that the target writes behind a chat's answer; None without any."""
    if tokenizer.chat_template is not None:
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        try:
            last = exchange([question, answer], None, tokenizer, ends).answer_ids[-1]
        except ChatRefused:
            last = None
        if last in ends:
            return last
    return tokenizer.eos_token_id if tokenizer.eos_token_id in ends else next(iter(ends), None)


def _without_separator(answer: Turn, written: str) -> str:
    """Cut what a template without end tokens writes between an answer's text and the next turn."""
    text = answer["content"].rpartition(_CLOSE)[2].strip()
    if answer.get("tool_calls") or not text:
        return written.rstrip()
    return written[: written.rindex(text) + len(text)]


def _end_before_next(template: Template, turns: Sequence[Turn], ends: Sequence[int]) -> int | None:
    """Return the end token that the template writes between an answer and the next turn."""
    answer = {key: value for key, value in turns[-1].items() if key not in THINKING_KEYS}
    following: Turn = {"role": "user", "content": "?"}
    if calls := answer.get("tool_calls"):
        name, call_id = calls[-1]["function"]["name"], calls[-1].get("id", "")
        following = {"role": "tool", "content": "?", "name": name, "tool_call_id": call_id}
    fallback = next(iter(ends), None)
    try:
        answered = template.chat([*turns[:-1], answer]).rstrip()
        continued = template.chat([*turns[:-1], answer, following])
    except ChatRefused:
        return fallback
    if not continued.startswith(answered):
        return fallback
    behind = encode_rendered(template.tokenizer, continued[len(answered) :])
    return next((token for token in behind if token in ends), fallback)


def _check_whole(answer: Turn, written: str) -> None:
    """Raise ChatRefused if a part of the answer is missing in what the template wrote."""
    thought = str(answer.get(THINKING_KEYS[0], "")).strip()
    if thought not in written:
        raise ChatRefused(
            "the chat template does not write the answer's thinking; "
            "--thinking drop reads the answer without it"
        )
    for call in answer.get("tool_calls") or ():
        if call["function"]["name"] not in written:
            raise ChatRefused("the chat template does not write the answer's tool calls")
    if answer["content"].rpartition(_CLOSE)[2].strip() not in written:
        raise ChatRefused("the chat template does not write the answer's text")


def _one_thinking(turn: Turn) -> Turn:
    """Give a turn's thinking under every name that templates read."""
    thoughts = [turn[key] for key in THINKING_KEYS if str(turn.get(key) or "").strip()]
    rest = {key: value for key, value in turn.items() if key not in THINKING_KEYS}
    return rest | dict.fromkeys(THINKING_KEYS, thoughts[0]) if thoughts else rest


def without_thinking(turn: Turn) -> Turn:
    """Return a turn without its thinking, which stands under a key or between marks in its text."""
    rest = {key: value for key, value in turn.items() if key not in THINKING_KEYS}
    if turn["role"] == "assistant" and _CLOSE in turn["content"]:
        rest["content"] = turn["content"].rpartition(_CLOSE)[2].lstrip()
    return rest


def _renamed(call: JsonObject, name: str) -> JsonObject:
    return {**call, "function": {**call["function"], "name": name}}


def _with_arguments(turn: Turn, form: Callable[[object], object]) -> Turn:
    if not turn.get("tool_calls"):
        return dict(turn)
    calls = []
    for call in turn["tool_calls"]:
        function = dict(call["function"])
        function["arguments"] = form(function.get("arguments", {}))
        calls.append({**call, "function": function})
    return {**turn, "tool_calls": calls}


def _as_object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        raise ChatRefused("key 'tool_calls': arguments that are text must be valid JSON") from None


def _as_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
