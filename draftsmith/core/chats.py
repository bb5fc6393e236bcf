"""Chats as a server sees them: the prompt that it reads, and the answer that the target writes.

Both are cut from what the chat template writes. The prompt is the chat up to where an answer
begins. The answer is the rest of the same chat rendered with its answer, up to and with the first
of the target's end tokens. So an answer is spelled, trimmed and ended as the target does it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from draftsmith.core.errors import InputError, at, warn_once
from draftsmith.core.io import JsonObject
from draftsmith.core.row_formats import ARGUMENTS, CONTINUES
from draftsmith.core.template_date import dated_template
from draftsmith.core.tokenization import Tokenizer, encode, render, text_with_specials

# With the keys role and content, and others that a chat template reads.
Turn: TypeAlias = JsonObject
# A turn's thinking, by the names that templates read: Qwen, GLM, DeepSeek; vLLM; gpt-oss.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Marks around thinking in Qwen 3, DeepSeek R1 and models distilled from them.
THINKING = ("<think>", "</think>")
_CLOSE = THINKING[1]
# Roles of the API of servers. A template may name others.
_ROLES = ("system", "developer", "user", "assistant", "tool")
# The switch of templates: Qwen 3, SmolLM 3 and GLM read the first name, DeepSeek V3.1 and Granite
# the second.
SWITCH = ("enable_thinking", "thinking")


class ChatRefused(InputError):
    """What a chat template does not write."""


@dataclass(frozen=True)
class Chat:
    """A conversation with all its turns, the assistant's too, and the tools that it may call.

    arguments: what it asks of the chat template, such as `reasoning_effort`; they reach it as they
    do on a server.
    """

    messages: Sequence[Turn]
    tools: list[object] | None = None
    arguments: JsonObject = field(default_factory=dict)

    @classmethod
    def of(cls, row: JsonObject) -> "Chat":
        """Return the chat of a row with `messages`."""
        return cls(tuple(row["messages"]), row.get("tools") or None, row.get(ARGUMENTS) or {})

    def first(self, turns: int) -> "Chat":
        """Return its first turns; without the last one for -1."""
        return replace(self, messages=self.messages[:turns])

    def question(self) -> "Chat":
        """Return it without a final assistant turn, unless the target is to go on with that. Raise
        InputError if nothing is left.
        """
        if self.messages[-1]["role"] != "assistant" or self.arguments.get(CONTINUES):
            return self
        if len(self.messages) == 1:
            raise InputError("key 'messages': holds only an assistant turn; the prompt is missing")
        return self.first(-1)

    @property
    def asks_once(self) -> bool:
        """Whether it asks for something else than the next turn: what no earlier turn asks."""
        return bool(self.arguments.keys() & {CONTINUES, "add_generation_prompt"})

    def answered(self) -> list[int]:
        """Indices of the assistant's turns behind the first user's."""
        roles = [message["role"] for message in self.messages]
        first = roles.index("user") if "user" in roles else len(roles)
        return [index for index in range(first, len(roles)) if roles[index] == "assistant"]


@dataclass(frozen=True)
class Exchange:
    """An answer behind its prompt, as token ids; the answer ends with the target's end token.

    text: what a chat template wrote of the answer, without its end. asked: hash of what the prompt
    asks.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    text: str = field(default="", compare=False)
    asked: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, and the switch for thinking; None leaves it as the template
    has it.
    """

    tokenizer: Tokenizer
    thinking: bool | None = None

    def prompt(self, chat: Chat) -> str:
        """Return the text up to where an answer begins.

        Raise ChatRefused if the template refuses, or leaves all of an earlier turn out.
        """
        self._check_history(chat)
        return self._prompt(chat)

    def whole(self, chat: Chat) -> str:
        """Return the text of a chat with its answer; ChatRefused if the template refuses."""
        whole = {"add_generation_prompt": False, CONTINUES: False}
        return self._render(chat, chat.arguments | whole)

    def _prompt(self, chat: Chat) -> str:
        begins = {"add_generation_prompt": not chat.arguments.get(CONTINUES)}
        return self._render(chat, begins | chat.arguments)

    def _check_history(self, chat: Chat) -> None:
        """Refuse a chat whose calls, or thoughts without a text, the template does not write."""
        marked = []
        marks = {}
        for number, turn in enumerate(chat.messages, 1):
            mark = f"mark_{number}_"
            if turn.get("tool_calls"):
                calls: list[JsonObject] = []
                for call in turn["tool_calls"]:
                    name = f"{mark}{len(calls)}_"
                    marks[name] = f"tool calls of turn {number}"
                    calls.append({**call, "function": {**call["function"], "name": name}})
                turn = turn | {"tool_calls": calls}
            elif not turn["content"].strip() and THINKING_KEYS[0] in turn:
                marks[mark] = f"thinking of turn {number}, which has no text"
                turn = turn | dict.fromkeys(THINKING_KEYS, mark)
            marked.append(turn)
        text = self._prompt(replace(chat, messages=marked)) if marks else ""
        for mark, what in marks.items():
            if mark not in text:
                raise ChatRefused(f"the chat template does not write the {what}")

    def _render(self, chat: Chat, arguments: JsonObject) -> str:
        if self.tokenizer.chat_template is None:
            raise ChatRefused(
                "the tokenizer has no chat template; name one with --chat_template FILE"
            )
        for turn in chat.messages:
            self._check_role(turn["role"])
        effort = arguments.get("reasoning_effort")
        if effort is not None:  # as vLLM, for templates that have the switch alone
            arguments = {SWITCH[0]: effort != "none"} | arguments
        if self.thinking is not None:
            arguments |= dict.fromkeys(SWITCH, self.thinking)
        for name in chat.arguments:
            if not self.reads(name):
                warn_once(f"key {name!r} is ignored; the chat template does not read it")
        has_calls = any(turn.get("tool_calls") for turn in chat.messages)
        dated = dated_template(self.tokenizer, chat.tools)
        refusal: Exception | None = None
        # Servers pass arguments as objects; some templates join them to texts.
        for as_text in (False, True) if has_calls else (False,):
            try:
                turns = [_with_arguments(turn, as_text) for turn in chat.messages]
                rendered = render(
                    self.tokenizer, turns, tools=chat.tools, chat_template=dated, **arguments
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
        names = {"reasoning_effort": rf"{name}|{SWITCH[0]}"}
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


def encode_messages(tokenizer: Tokenizer, chat: Chat, thinking: bool | None = None) -> list[int]:
    """Tokens of a chat up to where the assistant's answer begins, as a server makes them.

    thinking: as of `Template`. Raise ChatRefused without a template and for a chat that it refuses.
    """
    return encode_rendered(tokenizer, chat_text(tokenizer, chat, thinking))


def chat_text(tokenizer: Tokenizer, chat: Chat, thinking: bool | None = None) -> str:
    """Return the text that `encode_messages` tokenises; raise ChatRefused as it does."""
    with at("key 'messages'"):
        return Template(tokenizer, thinking).prompt(_as_read(chat))


def exchange(
    chat: Chat, tokenizer: Tokenizer, ends: Sequence[int], *, thinking: bool = True
) -> Exchange:
    """Cut a chat that ends with an assistant turn into its prompt and its answer.

    ends: the target's end tokens; without any, the tokenizer's EOS. thinking: whether the answer
    keeps its thinking; if not, the template's switch is off. Raise ChatRefused with the reason if
    the template does not write the answer behind the prompt, or leaves a part of it out.
    """
    if chat.arguments.get(CONTINUES):
        raise ChatRefused(f"the row has no answer: its last turn is to go on ({CONTINUES})")
    chat = _as_read(chat, thinking)
    answer = chat.messages[-1]
    if not ends and tokenizer.eos_token_id is not None:
        ends = (tokenizer.eos_token_id,)
    templates = [Template(tokenizer, None if thinking else False)]
    # A template whose default is to think writes answers without thoughts when its switch is off,
    # and the other way round.
    if not chat.arguments.keys() & {*SWITCH, "reasoning_effort"}:
        templates.append(Template(tokenizer, THINKING_KEYS[0] in answer))
    for template in templates:
        prompt = template.prompt(chat.first(-1))
        whole = template.whole(chat)
        if whole.startswith(prompt):
            written = whole.removeprefix(prompt)
            _check_whole(answer, written)
            prompt_ids = encode_rendered(tokenizer, prompt)
            ids = encode_behind(tokenizer, prompt, prompt_ids, written)
            for length, token in enumerate(ids, 1):
                if token in ends:
                    text = written.partition(text_with_specials(tokenizer, [token]))[0]
                    return Exchange(prompt_ids, ids[:length], text)
            # Such templates (GLM) let an answer end with the mark of whoever speaks next.
            text = _without_separator(answer, written)
            ids = encode_behind(tokenizer, prompt, prompt_ids, text)
            end = _end_before_next(template, chat, ends)
            return Exchange(prompt_ids, ids if end is None else [*ids, end], text)
    raise ChatRefused("the chat template does not write this answer behind the prompt of a server")


def exchange_at(
    chat: Chat, index: int, tokenizer: Tokenizer, ends: Sequence[int], *, thinking: bool = True
) -> Exchange:
    """Cut a chat at one of its assistant turns as `exchange` does, with the turns before it.

    Raise ChatRefused also for a turn that the template writes otherwise once the chat goes on: of
    such a turn a chat may keep less than the target wrote.
    """
    cut = exchange(chat.first(index + 1), tokenizer, ends, thinking=thinking)
    if index + 1 < len(chat.messages):
        template = Template(tokenizer, None if thinking else False)
        if cut.text.strip() not in template.whole(_as_read(chat, thinking)):
            raise ChatRefused("the chat template rewrites it once the chat goes on")
    return cut


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
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            last = exchange(Chat(answered), tokenizer, ends).answer_ids[-1]
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


def _end_before_next(template: Template, chat: Chat, ends: Sequence[int]) -> int | None:
    """Return the end token that the template writes between an answer and the next turn."""
    *before, answer = chat.messages
    answer = _spoken(answer)
    following: Turn = {"role": "user", "content": "?"}
    if calls := answer.get("tool_calls"):
        name, call_id = calls[-1]["function"]["name"], calls[-1].get("id", "")
        following = {"role": "tool", "content": "?", "name": name, "tool_call_id": call_id}
    fallback = next(iter(ends), None)
    try:
        answered = template.whole(replace(chat, messages=[*before, answer])).rstrip()
        continued = template.whole(replace(chat, messages=[*before, answer, following]))
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


def _as_read(chat: Chat, thinking: bool = True) -> Chat:
    """Give each turn's thinking under every name that templates read, or leave it out."""
    read = _one_thinking if thinking else without_thinking
    return replace(chat, messages=list(map(read, chat.messages)))


def _one_thinking(turn: Turn) -> Turn:
    thoughts = [turn[key] for key in THINKING_KEYS if str(turn.get(key) or "").strip()]
    rest = _spoken(turn)
    return rest | dict.fromkeys(THINKING_KEYS, thoughts[0]) if thoughts else rest


def _spoken(turn: Turn) -> Turn:
    return {key: value for key, value in turn.items() if key not in THINKING_KEYS}


def without_thinking(turn: Turn) -> Turn:
    """Return a turn without its thinking, which stands under a key or between marks in its text."""
    rest = _spoken(turn)
    if turn["role"] == "assistant" and _CLOSE in turn["content"]:
        rest["content"] = turn["content"].rpartition(_CLOSE)[2].lstrip()
    return rest


def _with_arguments(turn: Turn, as_text: bool) -> Turn:
    """Give the arguments of a turn's calls as objects or as texts."""
    calls = []
    for call in turn.get("tool_calls") or ():
        arguments = call["function"].get("arguments", {})
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not as_text:
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise ChatRefused(
                    "key 'tool_calls': arguments that are text must be valid JSON"
                ) from None
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return turn | {"tool_calls": calls} if calls else turn
