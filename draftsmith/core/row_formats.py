"""Rows as other tools write them, read as one kind: chats become `messages`.

| row | tools |
|---|---|
| `messages`, `conversations`; turns of `role`/`content` or `from`/`value` | OpenAI, ShareGPT |
| `prompt` and `completion` as lists of turns | TRL |
| `instruction`, `input`, `output`, `system`, `history` | Alpaca, LLaMA-Factory |
| `request` or `body` with a chat | logs and batch files of OpenAI's API |

Prompts, texts and rows of token ids stay as they are. Every error begins with the key at fault.

What a row asks of the chat template becomes one mapping, `chat_template_kwargs`. It may stand in
the row, in its `request` or `body`, and in an `extra_body` of these, as clients of servers have it.
"""

import json
from collections.abc import Mapping
from typing import Any

from draftsmith.core.errors import InputError, at, warn_once
from draftsmith.core.io import JsonObject, read_words

# The row's own arguments of the chat template, and those that servers also take beside them.
ARGUMENTS = "chat_template_kwargs"
CONTINUES = "continue_final_message"
BESIDE = ("reasoning_effort", "enable_thinking", "add_generation_prompt", CONTINUES)
# What they ask for without it.
_DEFAULTS = {"add_generation_prompt": True, CONTINUES: False}
_WORDS = read_words(__file__)
# A row needs one of these; the first that it has is read.
KEYS: tuple[str, ...] = tuple(_WORDS["keys"])


def as_known(row: JsonObject) -> JsonObject:
    """Return the row with `messages` in place of another tool's chat, and `tools` as a list.

    Raise InputError that begins with the key at fault.
    """
    arguments = _arguments(row)
    for key in ("request", "body"):
        if isinstance(row.get(key), dict):
            arguments = _arguments(row[key]) | arguments
            if row.get("messages") is None:
                row = {name: value for name, value in row.items() if name != key} | row[key]
    if arguments or ARGUMENTS in row:
        row = row | {ARGUMENTS: arguments}
    for key in _WORDS["media"]:
        if row.get(key):
            raise InputError(f"key '{key}': only texts are read; leave the row out")
    if row.get("tools") is not None:
        row = row | {"tools": _tools(row["tools"])}
    key = next(iter(given_keys(row)), "")
    if key == "messages":
        turns = read_turns(row[key])
    elif key == "conversations":
        turns = _sharegpt(row)
    elif key == "prompt" and isinstance(row[key], list):
        turns = read_turns(row[key], "key 'prompt'")
        if row.get("completion") is not None:
            turns += read_turns(row["completion"], "key 'completion'")
    elif key == "instruction":
        turns = _alpaca(row)
    else:
        for name in arguments:
            warn_once(f"key {name!r} is ignored; only chats have a template")
        return row
    if row.get("system"):
        turns.insert(0, {"role": "system", "content": _text(row, "system")})
    read = (key, *_WORDS["read_with"][key])
    return {name: value for name, value in row.items() if name not in read} | {"messages": turns}


def given_keys(row: JsonObject) -> list[str]:
    """Return those of `KEYS` that a row has; the first is read."""
    return [key for key in KEYS if row.get(key) is not None]


def required_keys(row: JsonObject) -> list[str]:
    """Return `given_keys`. Raise InputError if there is none."""
    if given := given_keys(row):
        return given
    has = ", ".join(map(repr, row)) or "none"
    raise InputError(f"needs one of the keys {', '.join(KEYS)}; has {has}")


def _arguments(request: JsonObject) -> JsonObject:
    """Return what a row, or a request in it, asks of the chat template."""
    arguments: JsonObject = {}
    for holder in (request, request.get("extra_body")):
        if not isinstance(holder, dict):
            continue
        given = from_json(holder.get(ARGUMENTS) or {})
        if not isinstance(given, Mapping) or "chat_template" in given:
            raise InputError(
                f"key '{ARGUMENTS}': must be an object of a template's arguments; another template "
                "is for --chat_template"
            )
        given = dict(given) | {key: holder[key] for key in BESIDE if holder.get(key) is not None}
        for name, value in given.items():
            if value is not None and value != _DEFAULTS.get(name):
                arguments[name] = value
    return arguments


def read_turns(value: object, where: str = "key 'messages'") -> list[JsonObject]:
    """Return the turns of a chat with `role` and `content`, a text, and without null keys.

    Raise InputError that begins with `where` if `value` is not a chat of texts.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{where}: must be a list of at least one turn")
    turns = []
    for number, turn in enumerate(value, 1):
        with at(f"{where}: turn {number}"):
            turns.append(_turn(turn))
    return turns


def _turn(turn: object) -> JsonObject:
    if not isinstance(turn, Mapping):
        raise InputError("expected an object with 'role' and 'content'")
    speaker = turn.get("role") or turn.get("from")
    if not isinstance(speaker, str):
        raise InputError(f"needs 'role' (or 'from'), a text; it has {_keys(turn)}")
    key = "value" if turn.get("content") is None and "value" in turn else "content"
    if key not in turn and "tool_calls" not in turn:
        raise InputError(f"needs 'content', a text; it has {_keys(turn)}")
    content = turn.get(key)
    read = {
        name: value
        for name, value in turn.items()
        if name not in ("role", "from", "content", "value") and value not in (None, [])
    }
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, Mapping) and "thinking" in part]
        if text := "".join(str(thought["thinking"] or "") for thought in thoughts):
            read["reasoning_content"] = text
        content = _joined(content, key)
    if speaker == "function_call":
        read["tool_calls"] = _calls(content, key)
        content = ""
    if "tool_calls" in read:
        if isinstance(read["tool_calls"], Mapping):
            read["tool_calls"] = [read["tool_calls"]]
        _check_calls(read["tool_calls"])
        content = "" if content is None else content
    if not isinstance(content, str):
        raise InputError(f"'{key}' must be text, got {_kind(content)}")
    return {"role": _WORDS["roles"].get(speaker, speaker), "content": content} | read


def _keys(turn: Mapping[object, object]) -> str:
    return ", ".join(f"'{key}'" for key in turn) or "no keys"


def _joined(parts: list[Any], key: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind is None or kind == "text":
            raise InputError(f"'{key}' must be text, or a list of parts with 'text'")
        elif kind != "thinking":
            raise InputError(f"'{key}' holds a part {kind!r}; only texts are read")
    return "".join(texts)


def _calls(content: object, key: str) -> list[JsonObject]:
    """Return the calls of the speaker `function_call`: JSON of one call, or of a list."""
    calls = from_json(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise InputError(f"'{key}' must be JSON of a call with 'name' and 'arguments'")
    return [{"type": "function", "function": call} for call in calls]


def _check_calls(calls: object) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                "'tool_calls' must be a list of objects with a 'function' that has a 'name'"
            )


def _sharegpt(row: JsonObject) -> list[JsonObject]:
    """Return the turns as chat templates want them: a user's first, no two of one speaker in a row.

    ShareGPT cuts long chats into rows, so a row can begin with the rest of an answer.
    """
    turns: list[JsonObject] = []
    asked = False
    for turn in read_turns(row["conversations"], "key 'conversations'"):
        asked = asked or turn["role"] == "user" and bool(turn["content"].strip())
        if turn["role"] == "assistant" and not any(before["role"] == "user" for before in turns):
            continue
        is_plain = turn.keys() == {"role", "content"} and turn["role"] != "tool"
        if is_plain and turns and turns[-1] == turn | {"content": turns[-1]["content"]}:
            turns[-1]["content"] += f"\n\n{turn['content']}"
        else:
            turns.append(turn)
    if not asked:
        raise InputError("key 'conversations': no user asks anything")
    return turns


def _alpaca(row: JsonObject) -> list[JsonObject]:
    parts = [_text(row, key).strip() for key in ("instruction", "input")]
    question = "\n\n".join(filter(None, parts))
    if not question:
        raise InputError("key 'instruction': is empty")
    spoken: list[object] = []
    for pair in row.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError("key 'history': expected a list of pairs, question and answer")
        spoken += pair
    spoken += [question, _text(row, "output")]
    turns = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(spoken)
        if text != ""
    ]
    return read_turns(turns, "key 'history'")


def _tools(value: object) -> list[JsonObject]:
    """Return tools from a list or its JSON; a bare function is wrapped as in OpenAI's API."""
    tools = from_json(value or [])
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("key 'tools': must be a list of objects, or JSON of such a list")
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        for tool in tools
    ]


def from_json(value: object) -> object:
    """Return what a JSON text holds; None if it is not JSON; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _text(row: JsonObject, key: str) -> str:
    value = "" if row.get(key) is None else row[key]
    if not isinstance(value, str):
        raise InputError(f"key '{key}': must be text, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
