"""Training data: rows of prompt and response tokens, read from distilled sets and files.

`train.stream` orders them, `train.batches` makes batches of them.
"""

import glob
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.core.asked_hash import earlier_turns, group_ranks
from draftsmith.core.distilled_sets import described, set_file
from draftsmith.core.errors import InputError
from draftsmith.core.io import hash_json, read_json, read_manifest
from draftsmith.core.prompt_rows import iterate_records, parse_record
from draftsmith.core.prompts import ANSWER_KEYS, answers, content_id, prompt_hash, with_eos
from draftsmith.core.ranks import say
from draftsmith.core.row_reasons import Reasons
from draftsmith.core.teacher_rows import COLUMN
from draftsmith.core.tokenization import Tokenizer, check_vocabulary, encode_text
from draftsmith.drafts.draft_vocabulary import token_counts
from draftsmith.train.batch import pack

Indices = npt.NDArray[np.int64]
Row = Mapping[str, Any]
_FEATURES = datasets.Features(
    {name: datasets.List(datasets.Value("int32")) for name in ("prompt_ids", "response_ids")}
)
# Hashes of 16 hex digits, empty if they are unknown: of what a row asks, and of the tokens of its
# prompt, one for all turns of a chat.
_ASKED = "asked"
_PROMPT = "prompt_hash"
_HASHES = (_ASKED, _PROMPT)
_COLUMNS = [*_FEATURES, *_HASHES]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Tokenised rows (`prompt_ids`, `response_ids`; loss on the response only), cut to `max_length`
    tokens.

    A document is what is read as one sequence: a row, or several turns of a chat (`sequences`, by
    rows). A unit is what is shuffled and dealt to processes: a document, or the documents of one of
    the `groups` if they are packed.

    * lengths: tokens of each document.
    * valid_tokens: predicted tokens of each unit.
    * dropped: number of rows that had none.
    * digest: identifies the data.
    * max_token: the largest token.
    * targets: fingerprints of the targets that wrote the data.
    * stored: whether every row has the teacher's column.
    * replay_from: first unit of the general data to mix in.
    * domains: the source of each document; None if documents are packed.
    """

    rows: datasets.Dataset
    max_length: int
    lengths: Indices
    valid_tokens: Indices
    dropped: int
    digest: str
    max_token: int
    targets: frozenset[str]
    stored: bool = False
    sequences: list[list[int]] | None = None
    groups: list[list[int]] | None = None
    replay_from: int | None = None
    domains: Indices | None = None

    def __len__(self) -> int:
        """Number of units."""
        return len(self.valid_tokens)

    def documents(self, unit: int) -> Iterator[list[Row]]:
        """Yield the rows of each document of a unit."""
        for document in [unit] if self.groups is None else self.groups[unit]:
            yield [self.rows[row] for row in self.rows_of(document)]

    def tokens(self) -> Iterator[list[int]]:
        """Yield the tokens of each document, not cut."""
        rows = self.rows.select_columns(list(_FEATURES))
        for document in range(len(self.lengths)):
            yield document_tokens([rows[self.rows_of(document)[-1]]])

    def longest(self) -> list[int]:
        """Return the tokens of the longest document, cut."""
        last = self.rows_of(int(self.lengths.argmax()))[-1]
        return document_tokens([self.rows[last]])[: self.max_length]

    def rows_of(self, document: int) -> list[int]:
        """Return the rows of a document. Its last row contains the tokens of all."""
        return [document] if self.sequences is None else self.sequences[document]

    @cached_property
    def response_counts(self) -> Counter[int]:
        """How often each token occurs in the responses."""
        counts: Counter[int] = Counter()
        for batch in self.rows.select_columns(["response_ids"]).iter(batch_size=1024):
            counts.update(token_counts(batch["response_ids"]))
        return counts


def load_examples(
    sources: Sequence[str],
    tokenizer: Tokenizer | None,
    max_length: int,
    *,
    ends: Sequence[int] = (),
    thinking: bool = True,
) -> Examples:
    """Read distilled sets and files into one table.

    ends, thinking: of chats in files, as `draftsmith.core.chats.exchange` has them. Raise
    InputError that names the file, line and key at fault.
    """
    parts: list[_Source] = []
    for source in sources:
        if Path(source).is_dir():
            parts.append(_distilled(Path(source), tokenizer))
        elif tokenizer is not None:
            parts.append(_text(source, tokenizer, max_length, ends, thinking=thinking))
        else:
            raise InputError(
                f"{source}: is text, and there is no tokenizer; set `tokenizer` or `target`"
            )
    # A batch may mix rows of all sources, so teacher rows are used only if every source has them.
    stored = all(COLUMN in part.table.column_names for part in parts)
    tables = []
    for part in parts:
        table = part.table
        for name in _HASHES:
            if name not in table.column_names:
                table = table.add_column(name, [""] * len(table))
        tables.append(table if stored else table.select_columns(_COLUMNS))
    rows = datasets.concatenate_datasets(tables)
    domains = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    prompts = rows.data.column("prompt_ids")
    responses = rows.data.column("response_ids")
    prompt_lengths = _lengths(prompts)
    lengths = np.minimum(prompt_lengths + _lengths(responses), max_length)
    # The first token of a sequence is not predicted: there is nothing before it.
    valid = lengths - np.maximum(prompt_lengths, 1)
    keep = np.flatnonzero(valid > 0)
    if not len(keep):
        raise InputError(f"no response token fits in max_length {max_length}; raise max_length")
    return Examples(
        rows=rows.select(keep),
        max_length=max_length,
        lengths=lengths[keep],
        valid_tokens=valid[keep],
        dropped=int(len(valid) - len(keep)),
        digest=hash_json([[part.digest for part in parts], max_length]),
        max_token=max(_largest(prompts), _largest(responses)),
        targets=frozenset(part.target for part in parts if part.target),
        stored=stored,
        domains=domains[keep],
    )


def set_dates(sources: Sequence[str]) -> list[str]:
    """The dates that the chat template printed in the distilled sets among the sources."""
    dates = []
    for source in sources:
        manifest = Path(source) / "manifest.json"
        if manifest.is_file():
            made = read_json(manifest, "the manifest of a finished distilled set")
            dates.append(made.get("identity", {}).get("date"))
    return [date for date in dict.fromkeys(dates) if date is not None]


def _lengths(column: pa.ChunkedArray) -> Indices:
    return np.asarray(pc.list_value_length(column), dtype=np.int64)


def _largest(column: pa.ChunkedArray) -> int:
    return pc.max(pc.list_flatten(column)).as_py() or 0


@dataclass(frozen=True)
class _Source:
    """Rows of a source, the hash of its content, and the target that wrote it."""

    table: datasets.Dataset
    digest: str
    target: str | None = None


def _distilled(directory: Path, tokenizer: Tokenizer | None) -> _Source:
    manifest = read_manifest(directory)
    if tokenizer is not None:
        check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))
    parts = [set_file(directory, part) for part in manifest["parts"]]
    names = [set(pq.read_schema(path).names) for path in parts]
    features = _FEATURES.copy()
    if all(COLUMN in part for part in names):
        # The target's distribution at each response token, packed.
        features[COLUMN] = datasets.Value("large_binary")
    for name in _HASHES:
        if all(name in part for part in names):
            features[name] = datasets.Value("string")
    files = [glob.escape(str(path)) for path in parts]
    table = datasets.load_dataset(
        "parquet", data_files=files, split="train", columns=list(features)
    )
    assert isinstance(table, datasets.Dataset)
    say(f"{directory}: {'; '.join(described(manifest))}")
    target = manifest.get("identity", {}).get("target_fingerprint")
    return _Source(table.cast(features), hash_json(manifest["parts"]), target)


def _text(
    source: str, tokenizer: Tokenizer, max_length: int, ends: Sequence[int], *, thinking: bool
) -> _Source:
    """Read a file. Rows without an answer or text, or whose answer the template does not write, are
    skipped, with a warning.
    """
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    asked: list[str] = []
    whole: list[str] = []
    stream: list[int] = []
    skipped = Reasons()
    left_out = Reasons()
    rows = 0
    chats = 0
    for record in iterate_records(source):
        rows += 1
        try:
            row = parse_record(record)
            if any(row.get(key) is not None for key in ANSWER_KEYS):
                cut = answers(row, tokenizer, ends, thinking=thinking)
                chats += 1
                for answer in cut.kept:
                    prompts.append(answer.prompt_ids)
                    responses.append(answer.answer_ids)
                    asked.append(f"{answer.asked:016x}")
                    whole.append(content_id(cut.kept[-1].prompt_ids))
                for reason in cut.left_out:
                    left_out.add(record.number, reason)
            else:
                stream += _document(row, tokenizer)
        except InputError as error:
            skipped.add(record.number, str(error))
    lines = skipped.lines(f"of {rows} rows skipped")
    for line in lines:
        log.warning("%s: %s", source, line)
    if len(prompts) + left_out.total() > chats:
        line = f"{source}: {len(prompts)} answers of {chats} rows are trained"
        say(f"{line}, {'; '.join(left_out.lines('left out')) or '0 left out'}")
    blocks = [stream[i : i + max_length] for i in range(0, len(stream), max_length)]
    if not prompts and not blocks:
        raise InputError(f"{source}: {'; '.join(lines) or 'holds no rows'}")
    columns = {
        "prompt_ids": prompts + [[]] * len(blocks),
        "response_ids": responses + blocks,
        _ASKED: asked + [""] * len(blocks),
        _PROMPT: whole + [""] * len(blocks),
    }
    features = _FEATURES | {name: datasets.Value("string") for name in _HASHES}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    return _Source(table, hash_json([prompts, responses, blocks]))


def _document(row: Row, tokenizer: Tokenizer) -> list[int]:
    text = row.get("text")
    if not isinstance(text, str):
        raise InputError(f"needs `text`, or one of the keys {', '.join(ANSWER_KEYS)}")
    return with_eos(encode_text(tokenizer, text), tokenizer)


def divide(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Split into training and held-out data: this fraction of the prompts, with all of their
    rows. A chat is on one side: rows whose prompts hold another's answer belong to it.
    """
    rows = examples.rows.select_columns(_COLUMNS)
    keys = [_keys(row, row["response_ids"]) for row in rows]
    turns = earlier_turns(rows["prompt_ids"], rows["response_ids"])
    for row_keys, earlier in zip(keys, turns, strict=True):
        row_keys += [keys[turn][0] for turn in earlier]
    rank_of_row = np.array(group_ranks(keys))
    prompts = int(rank_of_row.max()) + 1
    if prompts < 2:
        raise InputError(
            "data: holds a single prompt, so none can be held out; add prompts or set `heldout`"
        )
    count = min(max(1, round(fraction * prompts)), prompts - 1)
    heldout = rank_of_row < count
    return _select(examples, ~heldout, "train"), _select(examples, heldout, "heldout")


def trained_prompts(examples: Examples) -> Iterator[int]:
    """Yield the hashes by which each row's prompt is known; for text, that of its first 32 tokens,
    the evaluation's default prompt.
    """
    for row in examples.rows.select_columns(_COLUMNS):
        yield from _keys(row, row["response_ids"][:32])


def _keys(row: Row, instead: list[int]) -> list[int]:
    """Hashes of what a row asks, if it is known, of its chat's prompt, and of its own or `instead`.

    The first one is the same under another template or date.
    """
    stored = [int(row[name], 16) for name in _HASHES if row[name]]
    return [*stored, prompt_hash(row["prompt_ids"] or instead)]


def _select(examples: Examples, chosen: npt.NDArray[np.bool_], side: str) -> Examples:
    index = np.flatnonzero(chosen)
    return replace(
        examples,
        rows=examples.rows.select(index),
        lengths=examples.lengths[index],
        valid_tokens=examples.valid_tokens[index],
        domains=None if examples.domains is None else examples.domains[index],
        digest=hash_json([examples.digest, side, len(index)]),
    )


def document_tokens(rows: Sequence[Row]) -> list[int]:
    """The tokens of a document, not cut."""
    return [*rows[-1]["prompt_ids"], *rows[-1]["response_ids"]]


def chats_read_once(examples: Examples) -> Examples:
    """Let turns of a chat share a document where each begins with the one before token for token,
    so that nothing is read twice. What is predicted, and after what, stays.
    """
    if examples.domains is None:
        return examples
    chats: dict[tuple[int, str], list[int]] = {}
    for row, chat in enumerate(examples.rows[_PROMPT]):
        if chat:
            chats.setdefault((int(examples.domains[row]), chat), []).append(row)
    merged: dict[int, list[int]] = {}
    for rows in chats.values():
        if len(rows) > 1:
            merged |= {turns[-1]: turns for turns in _turns(examples.rows, rows)}
    earlier = set(chain.from_iterable(turns[:-1] for turns in merged.values()))
    if not earlier:
        return examples
    last = [row for row in range(len(examples.rows)) if row not in earlier]
    sequences = [merged.get(row, [row]) for row in last]
    valid_tokens = [examples.valid_tokens[turns].sum() for turns in sequences]
    lengths = examples.lengths[last]
    return replace(
        examples,
        sequences=sequences,
        lengths=lengths,
        valid_tokens=np.array(valid_tokens, dtype=np.int64),
        domains=examples.domains[last],
        digest=hash_json([examples.digest, "turns"]),
    )


def _turns(table: datasets.Dataset, rows: Sequence[int]) -> list[list[int]]:
    """Divide rows of a chat into lists in which each row's prompt holds the row before, as
    `earlier_turns` finds it.
    """
    columns = table[rows]
    prompts = columns["prompt_ids"]
    answers = columns["response_ids"]
    earlier = earlier_turns(prompts, answers)
    ends = [len(ids) + len(said) for ids, said in zip(prompts, answers, strict=True)]
    lists: dict[int, list[int]] = {}  # by the last row
    for row in sorted(range(len(rows)), key=lambda row: len(prompts[row])):
        turns = [turn for turn in earlier[row] if turn in lists]
        # No position predicts for two rows.
        turns = [each for each in turns if ends[each] <= len(prompts[row])]
        before = lists.pop(turns[-1]) if turns else []
        lists[row] = [*before, rows[row]]
    return list(lists.values())


def packed(examples: Examples, seed: int) -> Examples:
    """Pack several documents into each unit of at most `max_length` tokens."""
    groups = pack(examples.lengths, examples.max_length, seed)
    valid_tokens = [examples.valid_tokens[group].sum() for group in groups]
    return replace(
        examples,
        groups=groups,
        valid_tokens=np.array(valid_tokens, dtype=np.int64),
        digest=hash_json([examples.digest, "packed", seed]),
        domains=None,
    )


def with_replay(examples: Examples, replay: Examples) -> Examples:
    """Append the units of `replay`, for `train.stream` to mix in. Both are packed, or neither."""
    stored = examples.stored and replay.stored
    tables = [examples.rows, replay.rows]
    if not stored:
        tables = [table.select_columns(_COLUMNS) for table in tables]
    domains = groups = sequences = None
    if examples.sequences is not None or replay.sequences is not None:
        sequences = [examples.rows_of(document) for document in range(len(examples.lengths))]
        for document in range(len(replay.lengths)):
            sequences.append([len(examples.rows) + row for row in replay.rows_of(document)])
    if examples.domains is not None:
        new_domain = examples.domains.max() + 1
        domains = np.append(examples.domains, np.full(len(replay), new_domain))
    if examples.groups is not None and replay.groups is not None:
        groups = examples.groups.copy()
        for group in replay.groups:
            groups.append([len(examples.lengths) + document for document in group])
    return replace(
        examples,
        rows=datasets.concatenate_datasets(tables),
        lengths=np.concatenate([examples.lengths, replay.lengths]),
        valid_tokens=np.concatenate([examples.valid_tokens, replay.valid_tokens]),
        dropped=examples.dropped + replay.dropped,
        digest=hash_json([examples.digest, "replay", replay.digest]),
        max_token=max(examples.max_token, replay.max_token),
        targets=examples.targets | replay.targets,
        stored=stored,
        sequences=sequences,
        groups=groups,
        replay_from=len(examples),
        domains=domains,
    )
