"""Prompts as every command reads them: JSONL, Parquet or a dataset on the hub, tokenised; every row
is counted.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith_core.errors import InputError, without_secrets
from draftsmith_core.io import canonical_json
from draftsmith_core.prompt_rows import (
    KEYS,
    TOKEN,
    Record,
    free_rows,
    iterate_records,
    parse_record,
    text_of,
)
from draftsmith_core.ranks import say
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text

_warn_once = cache(logging.getLogger(__name__).warning)

# Beside the weights of a checkpoint: hashes of the prompts it was trained on.
PROMPT_HASHES = "prompt_hashes.npy"
# Keys of a row that other tools put into the prompt; they are ignored here.
_CONTEXT = ("system", "functions", "documents", "images", "image", "audio", "video", "videos")


@dataclass(frozen=True)
class Chat:
    """A conversation with all its turns, the assistant's too, and the tools that it may call."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. id: the row's explicit id (if `own_id`), else a hash of its tokens.
    row: from 1.
    """

    id: str
    domain: str
    ids: tuple[int, ...]
    row: int = field(default=0, compare=False)
    own_id: bool = field(default=False, compare=False)
    chat: Chat | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Skipped:
    """A skipped row and its reason."""

    row: int
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source. `len(prompts) + len(skipped) == rows`. more: whether it has rows
    beyond the limit.
    """

    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]
    rows: int
    more: bool = False

    @property
    def digest(self) -> str:
        """sha256 over ids, domains and tokens: equal for equal prompts, however they were
        stored.
        """
        text = canonical_json([[p.id, p.domain, list(p.ids)] for p in self.prompts])
        return hashlib.sha256(text.encode()).hexdigest()

    def say_skipped(self) -> None:
        """Print how many rows were skipped, if any, and why the first was."""
        if self.skipped:
            first, count = self.skipped[0], f"{len(self.skipped)} of {self.rows}"
            say(f"{self.source}: {count} rows skipped (row {first.row}: {first.reason})")


class Reasons:
    """Counts of reasons. Reasons that differ only in their numbers count as one."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[Any]] = {}  # count, first row, its reason

    def add(self, row: int, reason: str) -> None:
        self._kinds.setdefault(re.sub(r"\d+", "N", reason), [0, row, reason])[0] += 1

    def total(self) -> int:
        return sum(count for count, _, _ in self._kinds.values())

    def lines(self, outcome: str) -> list[str]:
        """One line per reason: the number of rows with this `outcome`, and the first of them."""
        return [
            f"{count} {outcome}: {reason} (row {row}{', the first' if count > 1 else ''})"
            for count, row, reason in self._kinds.values()
        ]


@dataclass
class PromptReader:
    """Turn the rows of one source into prompts, one at a time.

    A row has `messages` (chat; a final assistant turn is dropped), or `prompt`, or `text` (its
    first `prompt_tokens` tokens are the prompt); optional `id` and `domain`. ShareGPT and Alpaca
    rows are read as `messages`.
    whole_chats: whether a chat must fit `max_tokens`; if not, the caller generates turn by turn.
    """

    source: str
    tokenizer: Tokenizer
    domain: str = "default"
    prompt_tokens: int = 32
    max_tokens: int | None = None
    whole_chats: bool = True

    def __post_init__(self) -> None:
        self.source = without_secrets(self.source)

    def read(self, record: Record) -> Prompt | Skipped:
        """Return the prompt of a row, or why it is skipped. Raise InputError for a row that cannot
        be read.
        """
        row, where = parse_record(record, self.source), f"{self.source}:{record.number}"
        if free_rows(self.source) is not None:
            return Prompt(
                f"free-{record.number}", "general", self._begun(record.number), record.number, True
            )
        present = [key for key in KEYS if row.get(key) is not None]
        unread = present[1:] + [key for key in _CONTEXT if row.get(key)]
        # Only a chat template knows what to do with tools.
        for key in unread + ["tools"] * (bool(row.get("tools")) and present[:1] != ["messages"]):
            _warn_once(f"{self.source}: key {key!r} is ignored; prompts do not contain it")
        ids, short = _encode(row, where, self.tokenizer, self.prompt_tokens)
        row_id = text_of(row, "id")
        domain = text_of(row, "domain") or self.domain
        if short or not ids:
            return Skipped(record.number, short or "empty prompt")
        limited = self.whole_chats or row.get("messages") is None
        if limited and self.max_tokens is not None and len(ids) > self.max_tokens:
            return Skipped(
                record.number, f"{len(ids)} tokens, more than the {self.max_tokens} that fit"
            )
        is_chat = row.get("messages") is not None
        chat = (
            Chat(tuple(check_turns(row["messages"], where)), row.get("tools") or None)
            if is_chat
            else None
        )
        return Prompt(
            row_id or content_id(ids), domain, tuple(ids), record.number, bool(row_id), chat
        )

    def _begun(self, number: int) -> tuple[int, ...]:
        """Return the start of free text `number`: BOS, or EOS for models without a BOS.

        For `token:N`, append one uniformly random token, seeded by `number`.
        """
        first = next(
            (
                i
                for i in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
                if i is not None
            ),
            None,
        )
        if first is None:
            raise InputError(
                f"{self.source}: the tokenizer has no BOS or EOS to begin with; use a file of "
                "prompts"
            )
        if not self.source.startswith(TOKEN):
            return (int(first),)
        special, draw = set(self.tokenizer.all_special_ids), 0
        while (token := prompt_hash((number, draw)) % len(self.tokenizer)) in special:
            draw += 1
        return int(first), token


def read_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    domain: str = "default",
    prompt_tokens: int = 32,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> PromptSet:
    """Read all prompts of `source` (a file, `owner/name[:split]` on the hub or a suite), as
    `PromptReader` makes them.

    The id of a row without one is a hash of its tokens, with a count if the same prompt came
    before. limit: most rows to read. If a row cannot be read, raise InputError with its file, line
    and key.
    """
    reader = PromptReader(source, tokenizer, domain, prompt_tokens, max_tokens)
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    first_rows: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    rows, more = 0, False
    for record in iterate_records(source):
        if more := limit is not None and rows >= limit:
            break
        rows += 1
        prompt = reader.read(record)
        if isinstance(prompt, Skipped):
            skipped.append(prompt)
        elif prompt.own_id:
            # Ids label the rows of outputs and seed answers, so no two rows may share one.
            if (first := first_rows.setdefault(prompt.id, prompt.row)) != prompt.row:
                raise InputError(
                    f"{source}:{prompt.row}: key 'id': {prompt.id!r} is also the id of row {first}"
                )
            prompts.append(prompt)
        else:
            prompts.append(replace(prompt, id=unique_id(prompt.id, repeats)))
    if not prompts:
        reason = f"holds no rows; a row needs one of the keys {', '.join(KEYS)}"
        if skipped:
            reason = (
                f"none of its {rows} rows can be used (row {skipped[0].row}: {skipped[0].reason})"
            )
        raise InputError(f"{source}: {reason}")
    return PromptSet(reader.source, tuple(prompts), tuple(skipped), rows, more)


def room_for_prompts(
    context: int | None, new_tokens: int, key: str = "max_new_tokens"
) -> int | None:
    """Return how long a prompt may be if `new_tokens` follow it, None if unlimited; raise
    InputError for no room.
    """
    room = None if context is None else context - new_tokens
    if room is not None and room < 1:
        raise InputError(f"{key}: {new_tokens} leaves no room in a context of {context}")
    return room


def token_runs(ids: Sequence[int], length: int) -> set[tuple[int, ...]]:
    """All runs of `length` tokens of a prompt."""
    return {tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)}


def content_id(ids: Sequence[int]) -> str:
    """Id of a prompt without an explicit one: its `prompt_hash` as 16 hex digits."""
    return f"{prompt_hash(ids):016x}"


def unique_id(content: str, repeats: Counter[str]) -> str:
    """Return `content`, with its count if it came before; update the counts in `repeats`."""
    repeats[content] += 1
    return content if repeats[content] == 1 else f"{content}-{repeats[content]}"


def prompt_hash(ids: Sequence[int]) -> int:
    """Hash a tokenised prompt: the first 64 bits of the sha256 of its ids as 32-bit integers."""
    return int.from_bytes(
        hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()[:8], "big"
    )


def write_prompt_hashes(directory: Path, hashes: Iterable[int]) -> None:
    """Save the hashes of a checkpoint's training prompts beside it, sorted, eight bytes each."""
    np.save(directory / PROMPT_HASHES, np.unique(np.fromiter(hashes, dtype=np.uint64)))


def read_prompt_hashes(checkpoint: Path) -> npt.NDArray[np.uint64] | None:
    """Read what `write_prompt_hashes` saved; None for other checkpoints."""
    path = checkpoint / PROMPT_HASHES
    return np.load(path, allow_pickle=False) if path.is_file() else None


def _encode(
    row: dict[str, Any], where: str, tokenizer: Tokenizer, prompt_tokens: int
) -> tuple[list[int], str]:
    """Tokens of a row, and the reason to skip it ('' if there is none)."""
    key = next((key for key in KEYS if row.get(key) is not None), None)
    if key is None:
        raise InputError(
            f"{where}: needs one of the keys {', '.join(KEYS)}; has "
            f"{', '.join(map(repr, row)) or 'none'}"
        )
    value = row[key]
    if key == "messages":
        return encode_messages(
            tokenizer, check_messages(value, where), where, row.get("tools") or None
        ), ""
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, got {type(value).__name__}")
    if not value.strip():
        return [], f"key {key!r} is empty"
    if key == "prompt":
        return encode_text(tokenizer, value), ""
    # Nearly always enough characters for `prompt_tokens` tokens, so that no book is tokenised for
    # its start.
    start = value[: 64 + 16 * prompt_tokens]
    ids = encode_text(tokenizer, start)[:prompt_tokens]
    if len(ids) < prompt_tokens and len(start) < len(value):
        ids = encode_text(tokenizer, value)[:prompt_tokens]
    return ids, f"text has only {len(ids)} of {prompt_tokens} tokens" if len(
        ids
    ) < prompt_tokens else ""


def check_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages that make the prompt, without a final assistant turn; InputError if there are
    none.
    """
    messages = check_turns(value, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError(
            f"{where}: key 'messages': holds only an assistant turn; the prompt is missing"
        )
    return messages


def answered(
    value: Any, where: str, tokenizer: Tokenizer, tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Split a chat that ends with an assistant turn into prompt ids and answer ids, with EOS;
    InputError for others.
    """
    messages, turns = check_messages(value, where), check_turns(value, where)
    if len(messages) == len(turns) or turns[-1].get("tool_calls"):
        raise InputError(
            f"{where}: key 'messages': does not end with an assistant turn of text to train on"
        )
    response: list[int] = tokenizer(turns[-1]["content"], add_special_tokens=False)["input_ids"]
    return encode_messages(tokenizer, messages, where, tools), with_eos(response, tokenizer)


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text's tokens, and EOS if the tokenizer has one."""
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def check_turns(value: Any, where: str) -> list[dict[str, Any]]:
    """All messages without null keys; InputError if `value` is not a chat. Only tool calls may lack
    content.
    """
    try:
        turns = [{key: item for key, item in turn.items() if item is not None} for turn in value]
        turns = [{**({"content": ""} if turn.get("tool_calls") else {}), **turn} for turn in turns]
        if turns and all(
            isinstance(turn["role"], str) and isinstance(turn["content"], str) for turn in turns
        ):
            return turns
    except (TypeError, AttributeError, KeyError):
        pass
    raise InputError(
        f"{where}: key 'messages': expected a list of {{role, content}} objects with texts"
    )
