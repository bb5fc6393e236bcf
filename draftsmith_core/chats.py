"""Chats as a server sees them: the prompt that it reads, and the answer that the target writes.

Both are cut from what the chat template writes. The prompt is the chat up to where an answer
begins. The answer is the rest of the same chat rendered with its answer, up to and with the first
of the target's end tokens. So an answer is spelled, trimmed and ended as the target does it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from draftsmith_core.errors import InputError
from draftsmith_core.io import JsonObject
from draftsmith_core.tokenization import Tokenizer, text_with_specials

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
    """An answer behind its prompt, as token ids; the answer ends with the target's end token."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, the tools of a chat, and the switch for thinking.

    thinking: None leaves the switch as the template has it.
    """

    tokenizer: Tokenizer
    tools: list[object] | None = None
    thinking: bool | None = None

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Return the text up to where an answer begins; ChatRefused if the template refuses."""
        return self._render(turns, add_generation_prompt=True)

    def chat(self, turns: Sequence[Turn]) -> str:
        """Return the text of a chat with its answer; ChatRefused if the template refuses."""
        return self._render(turns, add_generation_prompt=False)

    def _render(self, turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise ChatRefused(
                "the tokenizer has no chat template; name one with --chat_template FILE"
            )
        for turn in turns:
            self._check_role(turn["role"])
        switch: Any = {} if self.thinking is None else dict.fromkeys(_SWITCH, self.thinking)
        tools: Any = self.tools
        calls = any(turn.get("tool_calls") for turn in turns)
        refusal: Exception | None = None
        # Servers pass arguments as objects; some templates join them to texts.
        for arguments in (_as_object, _as_text) if calls else (_as_object,):
            try:
                text = self.tokenizer.apply_chat_template(
                    [_with_arguments(turn, arguments) for turn in turns],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **switch,
                )
                return str(text)
            # Besides its own errors a template raises whatever Python raises for a turn of a kind
            # that it did not expect.
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
                refusal = refusal or error
        raise ChatRefused(f"the chat template refuses it ({refusal})")

    @property
    def writes_tools(self) -> bool:
        """Whether the template reads a list of tools."""
        return "tools" in str(self.tokenizer.chat_template)

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
) -> list[int]:
    """Tokens of a chat up to where the assistant's answer begins, as a server makes them.

    Raise ChatRefused, beginning with `where`, without a template and for a chat that it refuses.
    """
    return encode_rendered(tokenizer, chat_text(tokenizer, messages, where, tools))


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Turn],
    where: str,
    tools: list[object] | None = None,
) -> str:
    """Return the text that `encode_messages` tokenises; raise ChatRefused as it does."""
    try:
        return Template(tokenizer, tools).prompt([_one_thinking(turn) for turn in messages])
    except ChatRefused as error:
        raise ChatRefused(f"{where}: key 'messages': {error}") from None


def exchange(
    turns: Sequence[Turn],
    tools: list[object] | None,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    *,
    thinking: bool = True,
) -> Exchange:
    """Cut a chat that ends with an assistant turn into its prompt and its answer.

    ends: the target's end tokens; without any, the tokenizer's EOS. thinking: whether the answer
    keeps its thinking; if not, the template's switch is off. Raise ChatRefused with the reason if
    the template does not write the answer behind the prompt, or leaves a part of it out.
    """
    turns = [_one_thinking(turn) if thinking else without_thinking(turn) for turn in turns]
    answer = turns[-1]
    if not ends and tokenizer.eos_token_id is not None:
        ends = (tokenizer.eos_token_id,)
    default = Template(tokenizer, tools, None if thinking else False)
    # A template whose default is to think writes answers without thoughts when its switch is off,
    # and the other way round.
    switched = Template(tokenizer, tools, thinking=THINKING_KEYS[0] in answer)
    for template in (default, switched):
        prompt, chat = template.prompt(turns[:-1]), template.chat(turns)
        if chat.startswith(prompt):
            written = chat[len(prompt) :]
            _check_whole(answer, written)
            prompt_ids = encode_rendered(tokenizer, prompt)
            ids = encode_behind(tokenizer, prompt, prompt_ids, written)
            for place, token in enumerate(ids):
                if token in ends:
                    return Exchange(prompt_ids, ids[: place + 1])
            # Such templates (GLM) let an answer end with the mark of whoever speaks next.
            text = _without_separator(answer, written)
            ids = encode_behind(tokenizer, prompt, prompt_ids, text)
            end = _end_before_next(template, turns, ends)
            return Exchange(prompt_ids, ids if end is None else [*ids, end])
    raise ChatRefused("the chat template does not write this answer behind the prompt of a server")


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of what a chat template wrote, which has its special tokens itself."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


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
