"""Training data: rows of prompt and response tokens, their order, and the batches made of them.

Legend: B rows of a batch, T tokens of the longest of them, N valid tokens, K stored teacher tokens per position.
"""

import glob
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from drafts.vocabulary import VocabularyMap
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json, read_json, sha256_file
from draftsmith_core.prompt_rows import iterate_rows
from draftsmith_core.prompts import answered, prompt_hash, with_eos
from draftsmith_core.teacher_rows import COLUMN, unpack
from draftsmith_core.tokenization import Tokenizer, check_vocabulary, encode_text
from train.batch import IGNORE, Batch
from train.packing import document_layout, pack
from train.retokenize import retokenized
from train.teacher import StoredTeacher

# Its progress bars would be drawn over ours.
datasets.disable_progress_bars()

_FEATURES = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("prompt_ids", "response_ids")})
# The hash of the prompt that a row of a distilled set answers, 16 hex digits, one for all turns of a conversation;
# empty for other rows.
_PROMPT = "prompt_hash"
_COLUMNS = [*_FEATURES, _PROMPT]
# The target's distribution at each response token, packed.
_TEACHER = datasets.Features({COLUMN: datasets.Value("large_binary")})


@dataclass(frozen=True)
class Examples:
    """Tokenised rows (`prompt_ids`, `response_ids`; loss on the response only), cut to `max_length` tokens.

    A unit is what is shuffled and dealt to processes: a row, or the rows of one of the `groups` if they are packed.
    valid_tokens: predicted tokens of each unit. dropped: number of rows that had none. digest: identifies the data.
    max_token: the largest token. targets: fingerprints of the targets that wrote the data. stored: whether every row
    has the teacher's column. Units from `replay_from` on are general data to mix in. domains: the source of each row;
    None if rows are packed. left_out: number of rows that a draft of another tokenizer cannot write.
    """

    rows: datasets.Dataset
    max_length: int
    valid_tokens: npt.NDArray[np.int64]
    dropped: int
    digest: str
    max_token: int
    targets: frozenset[str]
    stored: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None
    replay_from: int | None = None
    domains: npt.NDArray[np.int64] | None = None
    left_out: int = 0

    def __len__(self) -> int:
        """Number of units."""
        return len(self.valid_tokens)


def load_examples(
    sources: Sequence[str], tokenizer: Tokenizer | None, max_length: int, mapping: VocabularyMap | None = None
) -> Examples:
    """Read distilled sets and files into one table. Raise InputError that names the file, line and key at fault.

    tokenizer: of the data. mapping: rewrites the rows for a draft of another tokenizer.
    """
    tables, digests, targets = [], [], set()
    for source in sources:
        if Path(source).is_dir():
            table, digest, target = _distilled(Path(source), tokenizer)
            targets |= {target} - {None}
        else:
            if tokenizer is None:
                raise InputError(f"{source}: is text, and there is no tokenizer; set `tokenizer` or `target`")
            table, digest = _text(source, tokenizer, max_length)
        if _PROMPT not in table.column_names:
            table = table.add_column(_PROMPT, [""] * len(table))
        tables.append(table)
        digests.append(digest)
    # A batch may mix rows of all sources, so teacher rows are used only if every source has them. They are about the
    # target's tokens.
    stored = mapping is None and all(COLUMN in table.column_names for table in tables)
    if not stored:
        tables = [table.select_columns(_COLUMNS) for table in tables]
    rows = datasets.concatenate_datasets(tables)
    domains = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    identity: list[Any] = [digests, max_length]
    read = len(rows)
    if mapping is not None:
        rows, written = retokenized(rows, mapping, _PROMPT)
        if not len(written):
            raise InputError(f"data: none of its {read} rows can be written in the draft's tokens; use another draft")
        domains = domains[written]
        identity.append(mapping.in_draft)
    lengths = {name: _lengths(rows, name) for name in ("prompt_ids", "response_ids")}
    # The first token of a sequence is not predicted: there is nothing before it.
    first = np.maximum(lengths["prompt_ids"], 1)
    valid = np.minimum(lengths["prompt_ids"] + lengths["response_ids"], max_length) - first
    keep = np.flatnonzero(valid > 0)
    if not len(keep):
        raise InputError(f"data: no response token fits in max_length {max_length}; raise max_length")
    largest = [pc.max(chunk.flatten()).as_py() for name in lengths for chunk in _chunks(rows, name)]
    max_token = max(token for token in largest if token is not None)
    return Examples(
        rows=rows.select(keep),
        max_length=max_length,
        valid_tokens=valid[keep],
        dropped=int(len(valid) - len(keep)),
        digest=hash_json(identity),
        max_token=max_token,
        targets=frozenset(map(str, targets)),
        stored=stored,
        domains=domains[keep],
        left_out=read - len(rows),
    )


def _lengths(rows: datasets.Dataset, name: str) -> npt.NDArray[np.int64]:
    counted = [pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in _chunks(rows, name)]
    return np.concatenate(counted or [np.zeros(0)]).astype(np.int64)


def _chunks(rows: datasets.Dataset, name: str) -> Iterator[Any]:
    for table in rows.with_format("arrow").select_columns([name]).iter(batch_size=10_000):
        yield from table[name].chunks


def _distilled(directory: Path, tokenizer: Tokenizer | None) -> tuple[datasets.Dataset, str, str | None]:
    """Rows of a distilled set, the hash of its parts, and the recorded fingerprint of its target."""
    manifest = read_json(directory / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(f"{directory}: the distilled set is not finished; run the same distill command again")
    if tokenizer is not None:
        check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))
    parts = [directory / part["file"] for part in manifest["parts"]]
    for path, part in zip(parts, manifest["parts"], strict=True):
        if not path.is_file() or sha256_file(path) != part["sha256"]:
            raise InputError(f"{path}: is missing, or not the file in the manifest; copy the whole directory again")
    names = [set(pq.read_schema(path).names) for path in parts]
    features = datasets.Features(_FEATURES | (_TEACHER if all(COLUMN in part for part in names) else {}))
    if all(_PROMPT in part for part in names):
        features[_PROMPT] = datasets.Value("string")
    files = [glob.escape(str(path)) for path in parts]
    table = datasets.load_dataset("parquet", data_files=files, split="train", columns=list(features))
    assert isinstance(table, datasets.Dataset)
    return table.cast(features), hash_json(manifest["parts"]), manifest.get("identity", {}).get("target_fingerprint")


def _text(source: str, tokenizer: Tokenizer, max_length: int) -> tuple[datasets.Dataset, str]:
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    stream: list[int] = []
    for number, row in iterate_rows(source):
        where = f"{source}:{number}"
        if row.get("messages") is not None:
            prompt, response = answered(row["messages"], where, tokenizer, row.get("tools") or None)
            prompts.append(prompt)
            responses.append(response)
        elif isinstance(row.get("text"), str):
            stream += with_eos(encode_text(tokenizer, row["text"]), tokenizer)
        else:
            raise InputError(f"{where}: needs `text`, or `messages` that end with the assistant's answer")
    blocks = [stream[i : i + max_length] for i in range(0, len(stream), max_length)]
    table = datasets.Dataset.from_dict(
        {"prompt_ids": prompts + [[] for _ in blocks], "response_ids": responses + blocks}, features=_FEATURES
    )
    return table, hash_json([prompts, responses, blocks])


def divide(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Split into training and held-out data: this fraction of the prompts, those with the smallest hashes.

    Rows that share a prompt stay on one side: samples of one prompt on both would make the held-out loss a measure of
    memory.
    """
    rows = examples.rows.select_columns(_COLUMNS)
    hashes = np.array([_hash(row, row["response_ids"]) for row in rows], dtype=np.uint64)
    prompts = np.unique(hashes)
    if len(prompts) < 2:
        raise InputError("data: holds a single prompt, so none can be held out; add prompts or set `heldout`")
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    heldout = np.isin(hashes, prompts[:count])
    return _select(examples, ~heldout, "train"), _select(examples, heldout, "heldout")


def trained_prompts(examples: Examples) -> Iterator[int]:
    """Hashes of the prompts; of text, of its first 32 tokens, of which the evaluation makes prompts by default."""
    for row in examples.rows.select_columns(_COLUMNS):
        yield _hash(row, row["response_ids"][:32])


def _hash(row: Mapping[str, Any], instead: list[int]) -> int:
    """The hash of a row's prompt, or of `instead`."""
    return int(row[_PROMPT], 16) if row[_PROMPT] else prompt_hash(row["prompt_ids"] or instead)


def _select(examples: Examples, chosen: npt.NDArray[np.bool_], side: str) -> Examples:
    index = np.flatnonzero(chosen)
    return replace(
        examples,
        rows=examples.rows.select(index),
        valid_tokens=examples.valid_tokens[index],
        domains=None if examples.domains is None else examples.domains[index],
        digest=hash_json([examples.digest, side, len(index)]),
    )


def packed(examples: Examples, seed: int) -> Examples:
    """Pack several rows into each unit of at most `max_length` tokens."""
    lengths = np.minimum(
        _lengths(examples.rows, "prompt_ids") + _lengths(examples.rows, "response_ids"), examples.max_length
    )
    groups = pack(lengths, examples.max_length, seed)
    return replace(
        examples,
        groups=tuple(map(tuple, groups)),
        valid_tokens=np.array([examples.valid_tokens[group].sum() for group in groups], dtype=np.int64),
        digest=hash_json([examples.digest, "packed", seed]),
        domains=None,
    )


def with_replay(examples: Examples, replay: Examples) -> Examples:
    """Append the units of `replay`, for `train.mixture.units` to mix in. Both are packed, or neither."""
    stored = examples.stored and replay.stored
    parts = [side.rows if stored else side.rows.select_columns(_COLUMNS) for side in (examples, replay)]
    domains = groups = None
    if examples.domains is not None:
        domains = np.append(examples.domains, np.full(len(replay), examples.domains.max() + 1))
    if examples.groups is not None and replay.groups is not None:
        shift = len(examples.rows)
        groups = examples.groups + tuple(tuple(shift + row for row in group) for group in replay.groups)
    return replace(
        examples,
        rows=datasets.concatenate_datasets(parts),
        valid_tokens=np.concatenate([examples.valid_tokens, replay.valid_tokens]),
        dropped=examples.dropped + replay.dropped,
        left_out=examples.left_out + replay.left_out,
        digest=hash_json([examples.digest, "replay", replay.digest]),
        max_token=max(examples.max_token, replay.max_token),
        targets=examples.targets | replay.targets,
        stored=stored,
        groups=groups,
        replay_from=len(examples),
        domains=domains,
    )


def collate(
    examples: Examples, indices: Iterable[int], answers: Mapping[int, tuple[list[int], list[int]]] | None = None
) -> Batch:
    """Make one right-padded batch of the units at `indices`.

    answers: by place in `indices`, a (prompt, answer) to use instead of that unit. Such a batch has no stored teacher
    rows, because those belong to the replaced answers.
    """
    chosen = [int(i) for i in indices]
    groups = [[i] if examples.groups is None else list(examples.groups[i]) for i in chosen]
    documents = [[examples.rows[row] for row in group] for group in groups]
    for index, (prompt, answer) in (answers or {}).items():
        documents[index] = [{"prompt_ids": prompt, "response_ids": answer}]
    lengths = [[_length(row, examples.max_length) for row in group] for group in documents]
    width = max(map(sum, lengths))
    ids_BT = torch.zeros(len(groups), width, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORE)
    for b, group in enumerate(documents):
        start = 0
        for row, length in zip(group, lengths[b], strict=True):
            tokens = torch.tensor((row["prompt_ids"] + row["response_ids"])[:length])
            first = max(len(row["prompt_ids"]), 1)
            ids_BT[b, start : start + length] = tokens
            labels_BT[b, start + first - 1 : start + length - 1] = tokens[first:]
            start += length
    stored = None
    if examples.stored and not answers:
        stored = _stored([row for group in documents for row in group], examples.max_length)
    if examples.groups is None:
        return Batch(ids_BT, labels_BT, stored=stored)
    positions_BT, documents_BT = document_layout(lengths, width)
    return Batch(ids_BT, labels_BT, positions_BT, documents_BT, stored)


def _length(row: dict[str, Any], limit: int) -> int:
    return min(len(row["prompt_ids"]) + len(row["response_ids"]), limit)


def _stored(rows: Sequence[dict[str, Any]], limit: int) -> StoredTeacher:
    ids, logprobs, tails = [], [], []
    for row in rows:
        # The first token of a sequence is not predicted, and tokens beyond the limit were cut off.
        valid = slice(0 if row["prompt_ids"] else 1, _length(row, limit) - len(row["prompt_ids"]))
        ids_RK, logprobs_RK, tail_R = unpack(row[COLUMN])
        ids.append(ids_RK[valid])
        logprobs.append(logprobs_RK[valid])
        tails.append(tail_R[valid])
    # At least one: a row may list no token, only the tail mass.
    width = max([1, *(ids_RK.shape[1] for ids_RK in ids)])

    def joined(parts: list[npt.NDArray[Any]], fill: float) -> torch.Tensor:
        padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts]
        return torch.from_numpy(np.concatenate(padded))

    return StoredTeacher(joined(ids, 0), joined(logprobs, -math.inf), torch.from_numpy(np.concatenate(tails)))
