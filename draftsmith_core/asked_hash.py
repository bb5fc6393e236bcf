"""What a prompt asks, as a number: the messages, tools and template arguments of a chat, or a text.

Tokens change with the chat template and the date that it prints; what is asked does not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from draftsmith_core.chats import without_thinking
from draftsmith_core.io import JsonObject, canonical_json


def asked_in_chat(
    turns: Sequence[JsonObject],
    tools: list[object] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> int:
    """Hash the turns up to an answer, 64 bits. arguments: the row's own, for the template.

    A turn counts by its role, its text without thinking or outer spaces, and its tool calls
    without their ids.
    """
    said = []
    for turn in turns:
        calls = [_call(call["function"]) for call in turn.get("tool_calls") or ()]
        said.append([turn["role"], without_thinking(turn)["content"].strip(), calls])
    return _hash_64([said, tools or [], arguments or {}])


def asked_in_text(text: str) -> int:
    """Hash a text that the target goes on from, 64 bits. A chat that says the same is another."""
    return _hash_64(text.strip())


def _call(function: JsonObject) -> list[object]:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass  # the template will refuse it
    return [function["name"], arguments]


def _hash_64(content: object) -> int:
    digest = hashlib.sha256(canonical_json(content).encode()).digest()
    return int.from_bytes(digest[:8], "big")
