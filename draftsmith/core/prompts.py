"""Prompts as every command reads them: JSONL, Parquet or a dataset on the hub, tokenised; every row
is counted.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from draftsmith.core.asked_hash import asked_in_chat, asked_in_text
from draftsmith.core.chats import (
    Chat,
    ChatRefused,
    Exchange,
    Template,
    encode_behind,
    encode_messages,
    encode_rendered,
    exchange_at,
)
from draftsmith.core.errors import InputError, warn_once, without_secrets
from draftsmith.core.io import JsonObject, hash_64, hash_json
from draftsmith.core.prompt_rows import (
    TOKEN,
    Record,
    free_rows,
    iterate_records,
    parse_record,
    text_of,
)
from draftsmith.core.ranks import say
from draftsmith.core.row_formats import required_keys
from draftsmith.core.row_reasons import Reasons
from draftsmith.core.token_rows import ID_KEYS, answers_in_ids, prompt_in_ids
from draftsmith.core.tokenization import Tokenizer, decode_text, encode_text

# Beside the weights of a checkpoint: hashes of the prompts it was trained on.
PROMPT_HASHES = "prompt_hashes.npy"
# Keys of a row that other tools put into the prompt; they are ignored here.
_CONTEXT = ("system", "functions", "documents", "chat_template")
# Keys that an answer stands under, in the order of preference: ids are the target's own tokens.
ANSWER_KEYS = (*ID_KEYS, "messages", "completion")


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
class Skipped:
    """A skipped row and its reason."""

    row: int
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source. `len(prompts) + len(skipped) == rows`."""

    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]
    rows: int

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
            return Skipped(record.number, str(error))

    def read(self, record: Record) -> Prompt | Skipped:
        """Return the prompt of a row, or why it is skipped. Raise InputError for a row that cannot
        be read.
        """
        row = parse_record(record)
        if free_rows(self.source) is not None:
            start = self._start_ids(record.number)
            return Prompt(f"free-{record.number}", "general", start, record.number, own_id=True)
        given = required_keys(row)
        self._warn_of_ignored(row, given)
        key = given[0]
        chat = Chat.of(row) if key == "messages" else None
        what_is_asked = 0
        ids: list[int] | str
        if chat is not None:
            question = chat.question()
            ids = encode_messages(self.tokenizer, question)
            what_is_asked = asked_in_chat(question)
        elif key in ID_KEYS:
            ids = prompt_in_ids(row, len(self.tokenizer))
        elif not isinstance(row[key], str):
            raise InputError(f"key {key!r}: expected text, got {type(row[key]).__name__}")
        else:
            ids = self._text_ids(key, row[key])
        row_id = text_of(row, "id")
        domain = text_of(row, "domain") or self.domain
        if isinstance(ids, str):
            return Skipped(record.number, ids)
        if not ids:
            return Skipped(record.number, "empty prompt")
        limited = self.whole_chats or chat is None
        if limited and self.max_tokens is not None and len(ids) > self.max_tokens:
            return Skipped(
                record.number, f"{len(ids)} tokens, more than the {self.max_tokens} that fit"
            )
        if chat is None and key not in ID_KEYS:
            # Of a `text` the part counts that its prompt stands for, not the whole book.
            text = row[key] if key == "prompt" else decode_text(self.tokenizer, ids)
            what_is_asked = asked_in_text(text)
        return Prompt(
            row_id or content_id(ids),
            domain,
            tuple(ids),
            record.number,
            own_id=bool(row_id),
            chat=chat,
            asked=what_is_asked,
        )

    def _warn_of_ignored(self, row: JsonObject, given: list[str]) -> None:
        ignored = given[1:] + [key for key in _CONTEXT if row.get(key)]
        # Only a chat template knows what to do with tools, and not every one does.
        if row.get("tools"):
            if given[0] != "messages" or not Template(self.tokenizer).reads("tools"):
                ignored.append("tools")
        for key in ignored:
            warn_once(f"{self.source}: key {key!r} is ignored; prompts do not contain it")

    def _text_ids(self, key: str, text: str) -> list[int] | str:
        """Return the tokens of a text, or of its start, or the reason to skip it."""
        if not text.strip():
            return f"key {key!r} is empty"
        if key == "prompt":
            if self.tokenizer.chat_template is not None and not self.source.startswith("@"):
                warn_once(
                    f"{self.source}: key 'prompt' is continued as text; to ask it in the target's "
                    "chat template, write 'messages'"
                )
            return encode_text(self.tokenizer, text)
        # Nearly always enough characters for `prompt_tokens` tokens, so that no book is tokenised
        # for its start.
        length = self.prompt_tokens
        for start in (text[: 64 + 16 * length], text):
            ids = encode_text(self.tokenizer, start)[:length]
            if len(ids) == length:
                return ids
        return f"text has only {len(ids)} of {length} tokens"

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
    prompts = []
    skipped = []
    first_rows: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    rows = 0
    for record in islice(iterate_records(source), limit):
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
                twice = f"{prompt.id!r} is also the id of row {first}; give one another id"
                skipped.append(Skipped(prompt.row, f"key 'id': {twice}"))
        else:
            prompts.append(replace(prompt, id=unique_id(prompt.id, repeats)))
    if not prompts:
        why = f" (row {skipped[0].row}: {skipped[0].reason})" if skipped else ""
        raise InputError(f"{source}: none of its {rows} rows can be used{why}")
    return PromptSet(reader.source, tuple(prompts), tuple(skipped), rows)


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


def content_id(ids: Sequence[int]) -> str:
    """Id of a prompt without an explicit one: its `prompt_hash` as 16 hex digits."""
    return f"{prompt_hash(ids):016x}"


def unique_id(content: str, repeats: Counter[str]) -> str:
    """Return `content`, with its count if it came before; update the counts in `repeats`."""
    repeats[content] += 1
    return content if repeats[content] == 1 else f"{content}-{repeats[content]}"


def prompt_hash(ids: Sequence[int]) -> int:
    """Hash a tokenised prompt: the first 64 bits of the sha256 of its ids as 32-bit integers."""
    return hash_64(np.asarray(ids, dtype="<i4").tobytes())


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


@dataclass(frozen=True)
class RowAnswers:
    """The answers of a row, in their order. left_out: the reason of each that has no tokens."""

    kept: list[Exchange]
    left_out: list[str] = field(default_factory=list)


def answers(
    row: JsonObject,
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
        cuts = answers_in_ids(row, len(tokenizer))
        return RowAnswers([replace(cut, asked=prompt_hash(cut.prompt_ids)) for cut in cuts])
    if key == "completion":
        return RowAnswers([_completed(row, tokenizer)])
    if key is None:
        raise InputError(f"has no answer; add one of the keys {', '.join(ANSWER_KEYS)}")
    return _in_chat(Chat.of(row), tokenizer, ends, thinking=thinking)


def _in_chat(
    chat: Chat, tokenizer: Tokenizer, ends: Sequence[int], *, thinking: bool
) -> RowAnswers:
    turns = chat.messages
    chat.question()  # refuses an answer without a question
    indices = [] if chat.asks_once else chat.answered()
    if not indices and turns[-1]["role"] == "assistant":
        indices = [len(turns) - 1]
    indices = [index for index in indices if turns[index].get("weight") != 0]
    if not indices:
        raise InputError("the chat does not end with an assistant turn; add the answer")
    kept = []
    left_out = []
    for index in indices:
        try:
            cut = exchange_at(chat, index, tokenizer, ends, thinking=thinking)
        except ChatRefused as error:
            left_out.append(f"key 'messages': {error}")
        else:
            kept.append(replace(cut, asked=asked_in_chat(chat.first(index))))
    if not kept:
        raise ChatRefused(left_out[-1])
    return RowAnswers(kept, left_out)


def _completed(row: JsonObject, tokenizer: Tokenizer) -> Exchange:
    """Tokens of a prompt and of the text behind it, up to and with EOS."""
    for key in ("prompt", "completion"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise InputError(f"key {key!r}: must be text, as 'prompt' and 'completion' both are")
    prompt = row["prompt"]
    ids = encode_behind(tokenizer, prompt, encode_rendered(tokenizer, prompt), row["completion"])
    asked = asked_in_text(prompt)
    return Exchange(encode_text(tokenizer, prompt), with_eos(ids, tokenizer), asked=asked)


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text's tokens, and EOS if the tokenizer has one."""
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]
