"""Prompts as every command reads them: JSONL, Parquet or a dataset on the hub, tokenised; every row
is counted.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from draftsmith.core.asked_hash import asked_in_chat, asked_in_text
from draftsmith.core.chats import (
    ChatRefused,
    Template,
    encode_behind,
    encode_messages,
    encode_rendered,
    exchanges,
)
from draftsmith.core.errors import InputError, without_place, without_secrets
from draftsmith.core.io import JsonObject, hash_json
from draftsmith.core.prompt_rows import (
    TOKEN,
    Record,
    free_rows,
    iterate_records,
    parse_record,
    text_of,
)
from draftsmith.core.ranks import say
from draftsmith.core.reasons import Reasons
from draftsmith.core.row_formats import ARGUMENTS, CONTINUES, KEYS
from draftsmith.core.token_rows import ID_KEYS, answers_in_ids, prompt_in_ids
from draftsmith.core.tokenization import Tokenizer, decode_text, encode_text

_warn_once = cache(logging.getLogger(__name__).warning)

# Beside the weights of a checkpoint: hashes of the prompts it was trained on.
PROMPT_HASHES = "prompt_hashes.npy"
# Keys of a row that other tools put into the prompt; they are ignored here.
_CONTEXT = ("system", "functions", "documents", "chat_template")
# Keys that an answer stands under, in the order of preference: ids are the target's own tokens.
ANSWER_KEYS = (*ID_KEYS, "messages", "completion")

# With the keys role and content, and others that a chat template reads.
Message: TypeAlias = JsonObject


@dataclass(frozen=True)
class Chat:
    """A conversation with all its turns, the assistant's too, and the tools that it may call.

    arguments: what it asks of the chat template, such as `reasoning_effort`.
    """

    messages: tuple[Message, ...]
    tools: list[object] | None
    arguments: JsonObject = field(default_factory=dict)

    @classmethod
    def of(cls, row: JsonObject) -> "Chat":
        """Return the chat of a row with `messages`."""
        return cls(tuple(row["messages"]), row.get("tools") or None, row.get(ARGUMENTS) or {})

    @property
    def asks_once(self) -> bool:
        """Whether it asks for something else than the next turn: what no earlier turn asks."""
        return bool(self.arguments.keys() & {CONTINUES, "add_generation_prompt"})

    def asked(self, turns: int) -> int:
        """Hash what the first turns ask, 64 bits."""
        return asked_in_chat(self.messages[:turns], self.tools, self.arguments)

    def answered(self) -> list[int]:
        """Places of the assistant's turns behind the first user's."""
        roles = [message["role"] for message in self.messages]
        first = roles.index("user") if "user" in roles else len(roles)
        return [place for place in range(first, len(roles)) if roles[place] == "assistant"]


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. id: the row's explicit id (if `own_id`), else a hash of its tokens.
    row: from 1. asked: hash of what is asked, which tells equal prompts; of a prompt that
    is given as tokens, their hash.
    """

    id: str
    domain: str
    ids: tuple[int, ...]
    row: int = field(default=0, compare=False)
    own_id: bool = field(default=False, compare=False)
    chat: Chat | None = field(default=None, compare=False)
    asked: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not self.asked:
            object.__setattr__(self, "asked", prompt_hash(self.ids))

    @property
    def hashes(self) -> list[int]:
        """Hashes by which the prompt is known: of what it asks, and of its tokens."""
        return [self.asked, prompt_hash(self.ids)]


@dataclass(frozen=True)
class AskedAnswer:
    """An answer behind its prompt, as token ids, and the hash of what the prompt asks."""

    prompt_ids: list[int]
    answer_ids: list[int]
    asked: int


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
        return hash_json([[p.id, p.domain, list(p.ids)] for p in self.prompts])

    def say_skipped(self) -> None:
        """Print a line for each reason why rows were skipped."""
        for line in self.skipped_lines():
            say(line)

    def skipped_lines(self) -> list[str]:
        """Return one line for each reason: source, number of rows, reason and the first row."""
        reasons = Reasons()
        for skip in self.skipped:
            reasons.add(skip.row, skip.reason)
        return [f"{self.source}: {line}" for line in reasons.lines(f"of {self.rows} rows skipped")]


@dataclass
class PromptReader:
    """Turn the rows of one source into prompts, one at a time.

    A row has `messages` (chat; a final assistant turn is dropped), or `prompt`, or `text` (its
    first `prompt_tokens` tokens are the prompt), or token ids (a final answer is dropped); optional
    `id` and `domain`. `row_formats` lists what is read as `messages`.
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

    def read_or_skip(self, record: Record) -> Prompt | Skipped:
        """`read`, with a skip in place of an InputError."""
        try:
            return self.read(record)
        except InputError as error:
            where = f"{self.source}:{record.number}"
            return Skipped(record.number, without_place(error, where))

    def read(self, record: Record) -> Prompt | Skipped:
        """Return the prompt of a row, or why it is skipped. Raise InputError for a row that cannot
        be read.
        """
        row = parse_record(record, self.source)
        where = f"{self.source}:{record.number}"
        if free_rows(self.source) is not None:
            ids = self._start_ids(record.number)
            return Prompt(f"free-{record.number}", "general", ids, record.number, own_id=True)
        self._warn_of_ignored(row)
        encoded = _encode(row, where, self.tokenizer, self.prompt_tokens)
        row_id = text_of(row, "id")
        domain = text_of(row, "domain") or self.domain
        if isinstance(encoded, str):
            return Skipped(record.number, encoded)
        if not encoded:
            return Skipped(record.number, "empty prompt")
        chat = None if row.get("messages") is None else Chat.of(row)
        limited = self.whole_chats or chat is None
        if limited and self.max_tokens is not None and len(encoded) > self.max_tokens:
            return Skipped(
                record.number, f"{len(encoded)} tokens, more than the {self.max_tokens} that fit"
            )
        return Prompt(
            row_id or content_id(encoded),
            domain,
            tuple(encoded),
            record.number,
            own_id=bool(row_id),
            chat=chat,
            asked=asked_by(row, encoded, self.tokenizer),
        )

    def _warn_of_ignored(self, row: JsonObject) -> None:
        present = [key for key in KEYS if row.get(key) is not None]
        ignored = present[1:] + [key for key in _CONTEXT if row.get(key)]
        # Only a chat template knows what to do with tools, and not every one does.
        if row.get("tools"):
            if present[:1] != ["messages"] or not Template(self.tokenizer).reads("tools"):
                ignored.append("tools")
        for key in ignored:
            _warn_once(f"{self.source}: key {key!r} is ignored; prompts do not contain it")

    def _start_ids(self, number: int) -> tuple[int, ...]:
        """Return the first tokens of row `number` of `self:N` or `token:N`.

        They begin with BOS, or with EOS for models without a BOS. For `token:N`, append one
        uniformly random token, seeded by `number`.
        """
        first = self.tokenizer.bos_token_id
        if first is None:
            first = self.tokenizer.eos_token_id
        if first is None:
            raise InputError(
                f"{self.source}: the tokenizer has no BOS or EOS to begin with; use a file of "
                "prompts"
            )
        if not self.source.startswith(TOKEN):
            return (int(first),)
        special = set(self.tokenizer.all_special_ids)
        draw = 0
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
    before. Rows that cannot be read, or repeat the id of another, are skipped. limit: most rows to
    read. Raise InputError if no row is usable.
    """
    reader = PromptReader(source, tokenizer, domain, prompt_tokens, max_tokens)
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    first_rows: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    rows = 0
    more = False
    for record in iterate_records(source):
        if more := limit is not None and rows >= limit:
            break
        rows += 1
        prompt = reader.read_or_skip(record)
        if isinstance(prompt, Skipped):
            skipped.append(prompt)
        elif prompt.own_id:
            # Ids label the rows of outputs and seed answers, so no two rows may share one.
            first = first_rows.setdefault(prompt.id, prompt.row)
            if first == prompt.row:
                prompts.append(prompt)
            else:
                reason = (
                    f"key 'id': {prompt.id!r} is also the id of row {first}; give one another id"
                )
                skipped.append(Skipped(prompt.row, reason))
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
    starts = range(len(ids) - length + 1)
    return {tuple(ids[start : start + length]) for start in starts}


def content_id(ids: Sequence[int]) -> str:
    """Id of a prompt without an explicit one: its `prompt_hash` as 16 hex digits."""
    return f"{prompt_hash(ids):016x}"


def unique_id(content: str, repeats: Counter[str]) -> str:
    """Return `content`, with its count if it came before; update the counts in `repeats`."""
    repeats[content] += 1
    return content if repeats[content] == 1 else f"{content}-{repeats[content]}"


def prompt_hash(ids: Sequence[int]) -> int:
    """Hash a tokenised prompt: the first 64 bits of the sha256 of its ids as 32-bit integers."""
    content = np.asarray(ids, dtype="<i4").tobytes()
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8], "big")


def write_prompt_hashes(directory: Path, hashes: Iterable[int]) -> None:
    """Save the hashes of a checkpoint's training prompts beside it, sorted, eight bytes each: of
    what they ask, and of their tokens.
    """
    values = np.fromiter(hashes, dtype=np.uint64)
    np.save(directory / PROMPT_HASHES, np.unique(values))


def read_prompt_hashes(checkpoint: Path) -> npt.NDArray[np.uint64] | None:
    """Read what `write_prompt_hashes` saved; None for other checkpoints."""
    path = checkpoint / PROMPT_HASHES
    return np.load(path, allow_pickle=False) if path.is_file() else None


def _encode(
    row: JsonObject, where: str, tokenizer: Tokenizer, prompt_tokens: int
) -> list[int] | str:
    """Tokens of a row, or the reason to skip it."""
    present = [key for key in KEYS if row.get(key) is not None]
    if not present:
        keys = ", ".join(map(repr, row)) or "none"
        raise InputError(f"{where}: needs one of the keys {', '.join(KEYS)}; has {keys}")
    key = present[0]
    value = row[key]
    if key == "messages":
        arguments = row.get(ARGUMENTS)
        turns = asked(value, where, arguments)
        return encode_messages(tokenizer, turns, where, row.get("tools") or None, arguments)
    if key in ID_KEYS:
        return prompt_in_ids(row, where, len(tokenizer))
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, got {type(value).__name__}")
    if not value.strip():
        return f"key {key!r} is empty"
    if key == "prompt":
        return encode_text(tokenizer, value)
    # Nearly always enough characters for `prompt_tokens` tokens, so that no book is tokenised for
    # its start.
    start = value[: 64 + 16 * prompt_tokens]
    ids = encode_text(tokenizer, start)[:prompt_tokens]
    if len(ids) < prompt_tokens and len(start) < len(value):
        ids = encode_text(tokenizer, value)[:prompt_tokens]
    if len(ids) < prompt_tokens:
        return f"text has only {len(ids)} of {prompt_tokens} tokens"
    return ids


def asked(
    turns: Sequence[Message], where: str, arguments: JsonObject | None = None
) -> list[Message]:
    """Return a chat without a final assistant turn, unless the row's `arguments` say that the
    target goes on with it. Raise InputError if nothing is left.
    """
    ends = turns[-1]["role"] == "assistant" and not (arguments or {}).get(CONTINUES)
    kept = list(turns[:-1] if ends else turns)
    if not kept:
        raise InputError(
            f"{where}: key 'messages': holds only an assistant turn; the prompt is missing"
        )
    return kept


def asked_by(row: JsonObject, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Hash what a row asks, 64 bits. ids: the tokens of its prompt, which count for rows of ids.

    Of a row of `text` the part counts that its prompt stands for, not the whole book.
    """
    key = next(key for key in KEYS if row.get(key) is not None)
    if key == "messages":
        arguments = row.get(ARGUMENTS)
        return asked_in_chat(asked(row[key], "", arguments), row.get("tools"), arguments)
    if key in ID_KEYS:
        return prompt_hash(ids)
    return asked_in_text(row[key] if key == "prompt" else decode_text(tokenizer, list(ids)))


@dataclass(frozen=True)
class RowAnswers:
    """The answers of a row, in their order. left_out: the reason of each that has no tokens."""

    kept: list[AskedAnswer]
    left_out: list[str] = field(default_factory=list)


def answers(
    row: JsonObject,
    where: str,
    tokenizer: Tokenizer,
    ends: Sequence[int] = (),
    *,
    thinking: bool = True,
) -> RowAnswers:
    """Split a row into prompts and answers: all that are the target's, or that a mask allows.

    Token ids: one for each run of trained tokens. Chat: each assistant turn behind a user's, but
    those of `weight` 0. Otherwise: prompt and completion.

    ends, thinking: passed to `exchange` for chats. Raise InputError for a row without an answer,
    and ChatRefused if the chat template writes none.
    """
    key = next((key for key in ANSWER_KEYS if row.get(key) is not None), None)
    if key in ID_KEYS:
        kept = []
        for cut in answers_in_ids(row, where, len(tokenizer)):
            kept.append(AskedAnswer(cut.prompt_ids, cut.answer_ids, prompt_hash(cut.prompt_ids)))
        return RowAnswers(kept)
    if key == "completion":
        return RowAnswers([_completed(row, where, tokenizer)])
    if key is None:
        raise InputError(f"{where}: has no answer; add one of the keys {', '.join(ANSWER_KEYS)}")
    return _in_chat(row, where, tokenizer, ends, thinking=thinking)


def _in_chat(
    row: JsonObject, where: str, tokenizer: Tokenizer, ends: Sequence[int], *, thinking: bool
) -> RowAnswers:
    chat = Chat.of(row)
    turns = chat.messages
    asked(turns, where)
    places = [] if chat.asks_once else chat.answered()
    if not places and turns[-1]["role"] == "assistant":
        places = [len(turns) - 1]
    places = [place for place in places if turns[place].get("weight") != 0]
    if not places:
        raise InputError(f"{where}: the chat does not end with an assistant turn; add the answer")
    cuts = exchanges(
        turns,
        places,
        chat.tools,
        tokenizer,
        ends,
        thinking=thinking,
        arguments=chat.arguments,
    )
    kept = []
    left_out = []
    for place, cut in zip(places, cuts, strict=True):
        if isinstance(cut, ChatRefused):
            left_out.append(f"{where}: key 'messages': {cut}")
        else:
            kept.append(AskedAnswer(cut.prompt_ids, cut.answer_ids, chat.asked(place)))
    if not kept:
        raise ChatRefused(left_out[-1])
    return RowAnswers(kept, left_out)


def _completed(row: JsonObject, where: str, tokenizer: Tokenizer) -> AskedAnswer:
    """Tokens of a prompt and of the text behind it, up to and with EOS."""
    for key in ("prompt", "completion"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise InputError(
                f"{where}: key {key!r}: must be text, as 'prompt' and 'completion' both are"
            )
    prompt = row["prompt"]
    ids = encode_behind(tokenizer, prompt, encode_rendered(tokenizer, prompt), row["completion"])
    return AskedAnswer(
        encode_text(tokenizer, prompt), with_eos(ids, tokenizer), asked_in_text(prompt)
    )


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text's tokens, and EOS if the tokenizer has one."""
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]
