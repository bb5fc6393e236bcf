"""What a prompt asks, as a number: the messages, tools and template arguments of a chat, or a text.

Tokens change with the chat template and the date that it prints; what is asked does not. Rows of
one prompt, and turns of one chat, are one group.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from draftsmith.core.chats import Chat, without_thinking
from draftsmith.core.io import JsonObject, canonical_json, hash_64
from draftsmith.core.row_formats import from_json


def asked_in_chat(chat: Chat) -> int:
    """Hash the turns up to an answer, 64 bits, with the tools and what the template is asked for.

    A turn counts by its role, its text without thinking or outer spaces, and its tool calls
    without their ids.
    """
    said = []
    for turn in chat.messages:
        calls = [_call(call["function"]) for call in turn.get("tool_calls") or ()]
        said.append([turn["role"], without_thinking(turn)["content"].strip(), calls])
    return _hash([said, chat.tools or [], chat.arguments])


def asked_in_text(text: str) -> int:
    """Hash a text that the target goes on from, 64 bits. A chat that says the same is another."""
    return _hash(text.strip())


class Groups:
    """Sets that share an element, directly or over others, are one group. They are known by their
    indices, and a group by its first one.
    """

    def __init__(self, sets: Sequence[Iterable[Hashable]]) -> None:
        self._parents = list(range(len(sets)))
        owners: dict[Hashable, int] = {}
        for index, elements in enumerate(sets):
            for element in elements:
                self.join(owners.setdefault(element, index), index)

    def first(self, index: int) -> int:
        """Return the first index of a group."""
        parents = self._parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def join(self, one: int, other: int) -> None:
        """Make the groups of two indices one."""
        low, high = sorted((self.first(one), self.first(other)))
        self._parents[high] = low

    def numbers(self) -> list[int]:
        """Return the group of each index, numbered in the order of their first indices."""
        numbers: dict[int, int] = {}
        indices = range(len(self._parents))
        return [numbers.setdefault(self.first(index), len(numbers)) for index in indices]


def group_ranks(keys_of_rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank of each row's group, from 0; rows that share a key, also through others, are
    one group. Groups are in the order of a hash of their first keys, whatever the order of rows.
    """
    groups = Groups(keys_of_rows).numbers()
    members: dict[int, set[int]] = {}
    for group, keys in zip(groups, keys_of_rows, strict=True):
        members.setdefault(group, set()).add(keys[0])

    def place(group: int) -> int:
        firsts = sorted(members[group])
        return firsts[0] if len(firsts) == 1 else _hash(firsts)

    ranks = {group: rank for rank, group in enumerate(sorted(members, key=place))}
    return [ranks[group] for group in groups]


def earlier_turns(
    prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]]
) -> list[list[int]]:
    """Return for each prompt the rows, as indices, whose prompt and answer it begins with, as a
    later turn of a chat does. The last token of an answer may differ: it ends the answer.
    """
    asked = [np.asarray(ids, dtype=">i4").tobytes() for ids in prompts]
    said = [np.asarray(ids, dtype=">i4").tobytes() for ids in answers]
    token = 4  # bytes
    # Sorted by bytes, a text stands directly before those that begin with it.
    texts = [(ids, True, row) for row, ids in enumerate(asked)]
    for row, ids in enumerate(said):
        if ids:
            texts.append((asked[row] + ids[: max(token, len(ids) - token)], False, row))
    earlier: list[list[int]] = [[] for _ in asked]
    begins: list[tuple[bytes, int]] = []
    for text, is_prompt, row in sorted(texts):
        while begins and not text.startswith(begins[-1][0]):
            begins.pop()
        if is_prompt:
            earlier[row] = [begun for _, begun in begins]
        else:
            begins.append((text, row))
    return earlier


def _call(function: JsonObject) -> list[object]:
    arguments = function.get("arguments", {})
    # The template will refuse what is no JSON.
    return [function["name"], from_json("{}" if arguments == "" else arguments)]


def _hash(content: object) -> int:
    return hash_64(canonical_json(content).encode())
