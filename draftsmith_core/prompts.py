"""Prompts as every command reads them: JSONL, Parquet or a dataset on the hub, tokenised; every row is counted."""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith_core.errors import InputError
from draftsmith_core.io import canonical_json
from draftsmith_core.prompt_rows import KEYS, TOKEN, Record, free_rows, iterate_records, parse_record, text_of, whole
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text

log = logging.getLogger(__name__)

# Beside the weights of a checkpoint: hashes of the prompts it was trained on.
PROMPT_HASHES = "prompt_hashes.npy"
_IDS_AT_ONCE = 1 << 16  # rows whose ids are compared with those before them together
# Keys of a row that other tools would put into the prompt, and that are not read here.
_CONTEXT = ("system", "functions", "documents", "images", "image", "audio", "video", "videos")


@dataclass(frozen=True)
class Chat:
    """A conversation as its row has it: all turns, the assistant's too, and the tools that it may call."""

    messages: tuple[dict[str, Any], ...]
    tools: list[Any] | None


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised. `id` is its own (then `own_id`) or a hash of its content; `row` its line or number.

    chat: the conversation that it is from, if any.
    """

    id: str
    domain: str
    ids: tuple[int, ...]
    row: int = field(default=0, compare=False)
    own_id: bool = field(default=False, compare=False)
    chat: Chat | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Skipped:
    """A row that was read and not used, and why."""

    row: int
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """What a prompt source held. `len(prompts) + len(skipped) == rows`; no row is dropped in silence.

    more: whether it has rows beyond those that were asked for. from_text: how many rows were `text`.
    """

    source: str
    prompts: tuple[Prompt, ...]
    skipped: tuple[Skipped, ...]
    rows: int
    more: bool = False
    from_text: int = 0

    @property
    def digest(self) -> str:
        """sha256 over ids, domains and tokens: equal for equal prompts, however they were stored."""
        text = canonical_json([[p.id, p.domain, list(p.ids)] for p in self.prompts])
        return hashlib.sha256(text.encode()).hexdigest()


class Reasons:
    """Counts of reasons that differ only in their figures, with the first row that gave each."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, str]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, row: int, reason: str) -> None:
        """Count one row."""
        kind = re.sub(r"\d+", "N", reason)
        self._first.setdefault(kind, (row, reason))
        self._counts[kind] += 1

    def total(self) -> int:
        """How many rows were counted, whatever the reason."""
        return self._counts.total()

    def lines(self, outcome: str) -> list[str]:
        """One line per reason: how many rows had this `outcome`, and the first of them with its own figures."""
        return [
            f"{count} {outcome}: {self._first[kind][1]} "
            f"(row {self._first[kind][0]}{', the first' if count > 1 else ''})"
            for kind, count in self._counts.items()
        ]


@dataclass
class PromptReader:
    """Makes prompts of the rows of one source, one at a time.

    A row has `messages` (chat; a final assistant turn is dropped), or `prompt`, or `text` (its first `prompt_tokens`
    tokens are the prompt); optional `id` and `domain`. Rows in the formats of ShareGPT and Alpaca are read as
    `messages`. `unread` collects what rows hold beside that, with the first row that has it; `from_text` counts the
    rows with `text`. Without `whole_chats` a chat need not fit `max_tokens`: the caller asks turn by turn.
    """

    source: str
    tokenizer: Tokenizer
    domain: str = "default"
    prompt_tokens: int = 32
    max_tokens: int | None = None
    whole_chats: bool = True
    unread: dict[str, int] = field(default_factory=dict)
    from_text: int = 0

    def read(self, record: Record) -> Prompt | Skipped:
        """The prompt of a row, or why it is not used; InputError for a row that cannot be understood."""
        row, where = parse_record(record, self.source), f"{self.source}:{record.number}"
        if free_rows(self.source) is not None:
            return Prompt(f"free-{record.number}", "general", self._begun(record.number), record.number, True)
        for name in _unread(row):
            self.unread.setdefault(name, record.number)
        self.from_text += next((key for key in KEYS if row.get(key) is not None), None) == "text"
        ids, short = _encode(row, where, self.tokenizer, self.prompt_tokens)
        own = text_of(row, "id", where)
        domain = text_of(row, "domain", where) or self.domain
        if short or not ids:
            return Skipped(record.number, short or "empty prompt")
        limited = self.whole_chats or row.get("messages") is None
        if limited and self.max_tokens is not None and len(ids) > self.max_tokens:
            return Skipped(record.number, f"{len(ids)} tokens, more than the {self.max_tokens} that fit")
        chat = None
        if row.get("messages") is not None:
            chat = Chat(tuple(check_turns(row["messages"], where)), check_tools(row, where))
        return Prompt(own or content_id(ids), domain, tuple(ids), record.number, bool(own), chat)

    def _begun(self, number: int) -> tuple[int, ...]:
        """The tokens that text `number` begins with: BOS, or EOS, which models without a BOS have between texts; for
        `token:N` also one token of the vocabulary, drawn uniformly, and always the same for the same number.
        """
        first = next((i for i in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if i is not None), None)
        if first is None:
            raise InputError(f"{self.source}: the tokenizer has no BOS or EOS to begin a text with; name prompts")
        if not self.source.startswith(TOKEN):
            return (int(first),)
        special, draw = set(self.tokenizer.all_special_ids), 0
        while (token := prompt_hash((number, draw)) % len(self.tokenizer)) in special:
            draw += 1
        return int(first), token

    def warn_unread(self) -> None:
        """One warning that names what the rows hold and the prompts were made without."""
        if self.unread:
            names = ", ".join(f"{name} (first in row {number})" for name, number in self.unread.items())
            log.warning("%s: its rows hold %s; the prompts are made without them", self.source, names)


class OwnIds:
    """The ids that the rows of a source have of their own: no two may have one, because it names the row in what is
    written and seeds its answers.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._rows: dict[str, int] = {}
        self._seen: list[npt.NDArray[np.uint64]] = []  # each sorted, and more than twice as long as the next

    def add(self, own: str, row: int) -> None:
        """InputError, with both rows, for an id that an earlier row has."""
        first = self._rows.setdefault(own, row)
        if first != row:
            raise InputError(f"{self._source}:{row}: key 'id': {own!r} is row {first}'s already; make ids unique")

    def check(self, records: Iterable[Record]) -> None:
        """As `add` for the ids of rows as they are stored. Eight bytes of each are kept, because a source may have tens
        of millions; where those of two agree the source is read again, and says whether the ids do.
        """
        rows = iter(records)
        while group := list(islice(rows, _IDS_AT_ONCE)):
            new = np.sort(np.fromiter((_id_hash(own) for _, own in self._own(group)), np.uint64))
            twice = {*new[1:][new[1:] == new[:-1]].tolist()}
            for seen in self._seen:
                there = seen[np.searchsorted(seen, new).clip(max=len(seen) - 1)]
                twice |= {*new[there == new].tolist()}
            if twice:
                for row, own in self._own(iterate_records(self._source)):
                    if _id_hash(own) in twice:
                        self.add(own, row)
            if len(new):
                self._seen.append(new)
            while len(self._seen) > 1 and 2 * len(self._seen[-1]) >= len(self._seen[-2]):
                last = self._seen.pop()
                self._seen[-1] = np.sort(np.concatenate([self._seen[-1], last]), kind="stable")

    def _own(self, records: Iterable[Record]) -> Iterator[tuple[int, str]]:
        """Numbers and ids of rows. One that cannot be understood has none: its reader says why."""
        for record in records:
            if isinstance(record.stored, bytes) and b'"id"' not in record.stored:
                continue  # spares the parsing of most files
            try:
                own = text_of(parse_record(record, self._source), "id", "")
            except InputError:
                continue
            if own:
                yield record.number, own


def _id_hash(own: str) -> int:
    return int.from_bytes(hashlib.blake2b(own.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def read_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    domain: str = "default",
    prompt_tokens: int = 32,
    max_tokens: int | None = None,
    limit: int | None = None,
) -> PromptSet:
    """Read all prompts of `source` (a file or `owner/name[:split]` on the hub), as `PromptReader` makes them.

    Rows that are empty, too short or longer than `max_tokens` are skipped with their reason. A row without an `id`
    gets a hash of its tokens, with its count where the same prompt came before. `limit` stops after that many rows.
    Raises InputError that names file, line and key for a row that cannot be understood.
    """
    reader = PromptReader(source, tokenizer, domain, prompt_tokens, max_tokens)
    prompts: list[Prompt] = []
    skipped: list[Skipped] = []
    named = OwnIds(source)
    repeats: Counter[str] = Counter()
    rows, more = 0, False
    for record in iterate_records(source):
        if more := limit is not None and rows >= limit:
            break
        rows += 1
        found = reader.read(record)
        if isinstance(found, Skipped):
            skipped.append(found)
        elif found.own_id:
            named.add(found.id, found.row)
            prompts.append(found)
        else:
            prompts.append(replace(found, id=unique_id(found.id, repeats)))
    reader.warn_unread()
    if not rows:
        raise InputError(f"{source}: holds no rows; a row needs one of the keys {', '.join(KEYS)}")
    if not prompts:
        raise InputError(f"{source}: none of its {rows} rows can be used (row {skipped[0].row}: {skipped[0].reason})")
    return PromptSet(source, tuple(prompts), tuple(skipped), rows, more, reader.from_text)


def token_runs(ids: Sequence[int], length: int) -> set[tuple[int, ...]]:
    """All runs of `length` tokens of a prompt."""
    return {tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)}


def content_id(ids: Sequence[int]) -> str:
    """The id of a prompt that has none of its own: its `prompt_hash`, as 16 hex digits."""
    return f"{prompt_hash(ids):016x}"


def unique_id(content: str, repeats: Counter[str]) -> str:
    """`content`, with its count where it came before (in `repeats`)."""
    repeats[content] += 1
    return content if repeats[content] == 1 else f"{content}-{repeats[content]}"


def prompt_hash(ids: Sequence[int]) -> int:
    """64 bits that tell a tokenised prompt from others: the start of the sha256 of its ids as 32-bit integers."""
    return int.from_bytes(hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).digest()[:8], "big")


def write_prompt_hashes(directory: Path, hashes: Iterable[int]) -> None:
    """Keep beside a checkpoint which prompts it was trained on, sorted, eight bytes each, without their text."""
    np.save(directory / PROMPT_HASHES, np.unique(np.fromiter(hashes, dtype=np.uint64)))


def read_prompt_hashes(checkpoint: Path) -> npt.NDArray[np.uint64] | None:
    """What `write_prompt_hashes` kept; None for other checkpoints. InputError for a file that is broken."""
    path = checkpoint / PROMPT_HASHES
    if not path.is_file():
        return None
    try:
        hashes = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError):
        raise InputError(f"{path}: is broken; delete it, or copy it from the checkpoint again") from None
    found: npt.NDArray[np.uint64] = hashes
    return found


def _unread(row: dict[str, Any]) -> list[str]:
    """What a row holds that could be meant for the prompt and is not read: a second text, images."""
    present = [key for key in KEYS if row.get(key) is not None]
    found = present[1:] + [key for key in _CONTEXT if row.get(key)]
    if row.get("tools") and present[:1] != ["messages"]:
        found.append("tools")  # only a chat template knows what to do with them
    return found


def _encode(row: dict[str, Any], where: str, tokenizer: Tokenizer, prompt_tokens: int) -> tuple[list[int], str]:
    """Tokens of a row, and the reason to skip it ('' when there is none)."""
    present = [key for key in KEYS if row.get(key) is not None]
    if not present:
        found = ", ".join(map(repr, row)) or "nothing"
        raise InputError(f"{where}: needs one of the keys {', '.join(KEYS)}; found {found}")
    key = present[0]
    value = row[key]
    if key == "messages":
        return encode_messages(tokenizer, check_messages(value, where), where, check_tools(row, where)), ""
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, found {type(value).__name__}")
    whole(value, key, where)
    if not value.strip():
        return [], f"key {key!r} is empty"
    if key == "prompt":
        return encode_text(tokenizer, value), ""
    # Enough characters for `prompt_tokens` tokens in nearly all cases, so that a book is not tokenised for its start.
    start = value[: 64 + 16 * prompt_tokens]
    ids = encode_text(tokenizer, start)[:prompt_tokens]
    if len(ids) < prompt_tokens and len(start) < len(value):
        ids = encode_text(tokenizer, value)[:prompt_tokens]
    short = f"text has only {len(ids)} of {prompt_tokens} tokens" if len(ids) < prompt_tokens else ""
    return ids, short


def check_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """The messages that make the prompt (a final assistant turn dropped), or InputError naming the key."""
    messages = check_turns(value, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{where}: key 'messages': holds only an assistant turn; the prompt is missing")
    return messages


def answered(
    value: Any, where: str, tokenizer: Tokenizer, tools: list[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the answer, with EOS, of messages that end with an answer; else InputError.

    tools: what the chat template shows of tools to call.
    """
    messages, turns = check_messages(value, where), check_turns(value, where)
    if len(messages) == len(turns):
        raise InputError(f"{where}: key 'messages': does not end with an assistant turn to train on")
    if turns[-1].get("tool_calls"):
        raise InputError(f"{where}: key 'messages': ends with calls of tools, whose tokens are not known")
    response: list[int] = tokenizer(turns[-1]["content"], add_special_tokens=False)["input_ids"]
    return encode_messages(tokenizer, messages, where, tools), with_eos(response, tokenizer)


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text's tokens, and EOS where the tokenizer has one."""
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def check_turns(value: Any, where: str) -> list[dict[str, Any]]:
    """All messages, with all their keys, or InputError naming the key. A turn that calls tools needs no content."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: key 'messages': expected a list of {{role, content}} objects")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise InputError(f"{where}: key 'messages[{index}].role': expected text such as 'user'")
        message = {key: each for key, each in message.items() if each is not None}
        content = message.setdefault("content", "" if message.get("tool_calls") else None)
        if not isinstance(content, str):
            raise InputError(f"{where}: key 'messages[{index}].content': expected text")
        whole(content, f"messages[{index}].content", where)
        messages.append(message)
    return messages


def check_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """The tools that a row offers to the target, for the chat template; InputError for what is no list."""
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"{where}: key 'tools': expected a list of functions")
    return tools or None
