"""Training data: rows of prompt and response tokens, their order, and the batches made of them.

The order is an endless stream of shuffled epochs that depends on the place in it alone. So a
resumed run needs to know its step and nothing else, and a step has the same units however it is
divided (law 6).

Legend: B rows of a batch, T tokens of the longest of them, N valid tokens, K stored teacher tokens
per position.
"""

import glob
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from drafts.draft_vocabulary import token_counts
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json, read_json, sha256_file
from draftsmith_core.prompt_rows import iterate_rows
from draftsmith_core.prompts import answered, prompt_hash, with_eos
from draftsmith_core.teacher_rows import COLUMN, unpack
from draftsmith_core.tokenization import Tokenizer, check_vocabulary, encode_text
from train.batch import IGNORE, Batch, pack
from train.teacher import StoredTeacher

# Its progress bars would be drawn over ours.
datasets.disable_progress_bars()

Indices = npt.NDArray[np.int64]
_FEATURES = datasets.Features(
    {name: datasets.List(datasets.Value("int32")) for name in ("prompt_ids", "response_ids")}
)
# The hash of the prompt that a row of a distilled set answers, 16 hex digits, one for all turns of
# a conversation; empty for other rows.
_PROMPT = "prompt_hash"
_COLUMNS = [*_FEATURES, _PROMPT]
# The target's distribution at each response token, packed.
_TEACHER = datasets.Features({COLUMN: datasets.Value("large_binary")})


@dataclass(frozen=True)
class Examples:
    """Tokenised rows (`prompt_ids`, `response_ids`; loss on the response only), cut to `max_length`
    tokens.

    A unit is what is shuffled and dealt to processes: a row, or the rows of one of the `groups` if
    they are packed.
    lengths: tokens of each row. valid_tokens: predicted tokens of each unit. dropped: number of
    rows that had none.
    digest: identifies the data. max_token: the largest token. targets: fingerprints of the targets
    that wrote the data.
    stored: whether every row has the teacher's column. Units from `replay_from` on are general data
    to mix in. domains: the source of each row; None if rows are packed.
    """

    rows: datasets.Dataset
    max_length: int
    lengths: npt.NDArray[np.int64]
    valid_tokens: npt.NDArray[np.int64]
    dropped: int
    digest: str
    max_token: int
    targets: frozenset[str]
    stored: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None
    replay_from: int | None = None
    domains: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Number of units."""
        return len(self.valid_tokens)

    @cached_property
    def response_counts(self) -> Counter[int]:
        """How often each token occurs in the responses."""
        batches = self.rows.select_columns(["response_ids"]).iter(batch_size=1024)
        return token_counts(response for batch in batches for response in batch["response_ids"])


def load_examples(sources: Sequence[str], tokenizer: Tokenizer | None, max_length: int) -> Examples:
    """Read distilled sets and files into one table. Raise InputError that names the file, line and
    key at fault.
    """
    tables, digests, targets = [], [], set()
    for source in sources:
        if Path(source).is_dir():
            table, digest, target = _distilled(Path(source), tokenizer)
            targets |= {target} - {None}
        else:
            if tokenizer is None:
                raise InputError(
                    f"{source}: is text, and there is no tokenizer; set `tokenizer` or `target`"
                )
            table, digest = _text(source, tokenizer, max_length)
        if _PROMPT not in table.column_names:
            table = table.add_column(_PROMPT, [""] * len(table))
        tables.append(table)
        digests.append(digest)
    # A batch may mix rows of all sources, so teacher rows are used only if every source has them.
    stored = all(COLUMN in table.column_names for table in tables)
    if not stored:
        tables = [table.select_columns(_COLUMNS) for table in tables]
    rows = datasets.concatenate_datasets(tables)
    domains = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    prompts, responses = (rows.data.column(name) for name in ("prompt_ids", "response_ids"))
    prompt_lengths, response_lengths = (
        pc.list_value_length(column).to_numpy().astype(np.int64) for column in (prompts, responses)
    )
    lengths = np.minimum(prompt_lengths + response_lengths, max_length)
    # The first token of a sequence is not predicted: there is nothing before it.
    valid = lengths - np.maximum(prompt_lengths, 1)
    keep = np.flatnonzero(valid > 0)
    if not len(keep):
        raise InputError(f"no response token fits in max_length {max_length}; raise max_length")
    largest = [pc.max(pc.list_flatten(column)).as_py() for column in (prompts, responses)]
    return Examples(
        rows=rows.select(keep),
        max_length=max_length,
        lengths=lengths[keep],
        valid_tokens=valid[keep],
        dropped=int(len(valid) - len(keep)),
        digest=hash_json([digests, max_length]),
        max_token=max(token for token in largest if token is not None),
        targets=frozenset(map(str, targets)),
        stored=stored,
        domains=domains[keep],
    )


def _distilled(
    directory: Path, tokenizer: Tokenizer | None
) -> tuple[datasets.Dataset, str, str | None]:
    """Rows of a distilled set, the hash of its parts, and the recorded fingerprint of its
    target.
    """
    manifest = read_json(directory / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(
            f"{directory}: the distilled set is not finished; run the same distill command again"
        )
    if tokenizer is not None:
        check_vocabulary(tokenizer, manifest.get("vocabulary", {}), str(directory))
    parts = [directory / part["file"] for part in manifest["parts"]]
    for path, part in zip(parts, manifest["parts"], strict=True):
        if not path.is_file() or sha256_file(path) != part["sha256"]:
            raise InputError(
                f"{path}: is missing, or not the file in the manifest; copy the whole directory "
                "again"
            )
    names = [set(pq.read_schema(path).names) for path in parts]
    features = datasets.Features(
        _FEATURES | (_TEACHER if all(COLUMN in part for part in names) else {})
    )
    if all(_PROMPT in part for part in names):
        features[_PROMPT] = datasets.Value("string")
    files = [glob.escape(str(path)) for path in parts]
    table = datasets.load_dataset(
        "parquet", data_files=files, split="train", columns=list(features)
    )
    assert isinstance(table, datasets.Dataset)
    return (
        table.cast(features),
        hash_json(manifest["parts"]),
        manifest.get("identity", {}).get("target_fingerprint"),
    )


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
            raise InputError(
                f"{where}: needs `text`, or `messages` that end with the assistant's answer"
            )
    blocks = [stream[i : i + max_length] for i in range(0, len(stream), max_length)]
    table = datasets.Dataset.from_dict(
        {"prompt_ids": prompts + [[] for _ in blocks], "response_ids": responses + blocks},
        features=_FEATURES,
    )
    return table, hash_json([prompts, responses, blocks])


def divide(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Split into training and held-out data: this fraction of the prompts, with all of their
    rows.
    """
    rows = examples.rows.select_columns(_COLUMNS)
    hashes = np.array([_hash(row, row["response_ids"]) for row in rows], dtype=np.uint64)
    prompts = np.unique(hashes)
    if len(prompts) < 2:
        raise InputError(
            "data: holds a single prompt, so none can be held out; add prompts or set `heldout`"
        )
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    heldout = np.isin(hashes, prompts[:count])
    return _select(examples, ~heldout, "train"), _select(examples, heldout, "heldout")


def trained_prompts(examples: Examples) -> Iterator[int]:
    """Yield the hash of each row's prompt; for text, of its first 32 tokens, the evaluation's
    default prompt.
    """
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
        lengths=examples.lengths[index],
        valid_tokens=examples.valid_tokens[index],
        domains=None if examples.domains is None else examples.domains[index],
        digest=hash_json([examples.digest, side, len(index)]),
    )


def packed(examples: Examples, seed: int) -> Examples:
    """Pack several rows into each unit of at most `max_length` tokens."""
    groups = pack(examples.lengths, examples.max_length, seed)
    return replace(
        examples,
        groups=tuple(map(tuple, groups)),
        valid_tokens=np.array(
            [examples.valid_tokens[group].sum() for group in groups], dtype=np.int64
        ),
        digest=hash_json([examples.digest, "packed", seed]),
        domains=None,
    )


def with_replay(examples: Examples, replay: Examples) -> Examples:
    """Append the units of `replay`, for `units` to mix in. Both are packed, or neither."""
    stored = examples.stored and replay.stored
    parts = [
        side.rows if stored else side.rows.select_columns(_COLUMNS) for side in (examples, replay)
    ]
    domains = groups = None
    if examples.domains is not None:
        domains = np.append(examples.domains, np.full(len(replay), examples.domains.max() + 1))
    if examples.groups is not None and replay.groups is not None:
        shift = len(examples.rows)
        groups = examples.groups + tuple(
            tuple(shift + row for row in group) for group in replay.groups
        )
    return replace(
        examples,
        rows=datasets.concatenate_datasets(parts),
        lengths=np.concatenate([examples.lengths, replay.lengths]),
        valid_tokens=np.concatenate([examples.valid_tokens, replay.valid_tokens]),
        dropped=examples.dropped + replay.dropped,
        digest=hash_json([examples.digest, "replay", replay.digest]),
        max_token=max(examples.max_token, replay.max_token),
        targets=examples.targets | replay.targets,
        stored=stored,
        groups=groups,
        replay_from=len(examples),
        domains=domains,
    )


def collate(examples: Examples, indices: Iterable[int]) -> Batch:
    """Make one right-padded batch of the units at `indices`."""
    chosen = [int(i) for i in indices]
    groups = [[i] if examples.groups is None else list(examples.groups[i]) for i in chosen]
    documents = [[examples.rows[row] for row in group] for group in groups]
    limit = examples.max_length
    lengths = [
        [min(len(row["prompt_ids"] + row["response_ids"]), limit) for row in group]
        for group in documents
    ]
    width = max(map(sum, lengths))
    ids_BT = torch.zeros(len(groups), width, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORE)
    # Padding attends to itself, and no document attends to it.
    positions_BT, documents_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -1)
    for b, group in enumerate(documents):
        start = 0
        for number, (row, length) in enumerate(zip(group, lengths[b], strict=True)):
            tokens, first = (
                torch.tensor((row["prompt_ids"] + row["response_ids"])[:length]),
                len(row["prompt_ids"]),
            )
            place = slice(start, start + length)
            ids_BT[b, place], positions_BT[b, place], documents_BT[b, place] = (
                tokens,
                torch.arange(length),
                number,
            )
            # The first token of a sequence is not predicted: there is nothing before it.
            labels_BT[b, start + max(first, 1) - 1 : start + length - 1] = tokens[max(first, 1) :]
            start += length
    stored = (
        _stored([row for group in documents for row in group], limit) if examples.stored else None
    )
    if examples.groups is None:
        return Batch(ids_BT, labels_BT, stored=stored)
    return Batch(ids_BT, labels_BT, positions_BT, documents_BT, stored)


def _stored(rows: Sequence[dict[str, Any]], limit: int) -> StoredTeacher:
    ids, logprobs, tails = [], [], []
    for row in rows:
        # The first token of a sequence is not predicted, and tokens beyond the limit were cut off.
        valid = slice(0 if row["prompt_ids"] else 1, limit - len(row["prompt_ids"]))
        ids_RK, logprobs_RK, tail_R = unpack(row[COLUMN])
        ids.append(ids_RK[valid])
        logprobs.append(logprobs_RK[valid])
        tails.append(tail_R[valid])
    # At least one: a row may list no token, only the tail mass.
    width = max([1, *(ids_RK.shape[1] for ids_RK in ids)])
    padded = [
        np.concatenate(
            [
                np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill)
                for part in parts
            ]
        )
        for parts, fill in ((ids, 0), (logprobs, -math.inf))
    ]
    return StoredTeacher(*map(torch.from_numpy, (*padded, np.concatenate(tails))))


def order(count: int, start: int, stop: int, seed: int) -> Indices:
    """Row indices of places `start`..`stop` in the endless stream of freshly shuffled epochs."""
    pieces = []
    for epoch in range(start // count, math.ceil(stop / count)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(count)
        pieces.append(shuffled[max(start - epoch * count, 0) : min(stop - epoch * count, count)])
    return np.concatenate(pieces)


def shares(counts: Sequence[int], temperature: float) -> list[float]:
    """Share of each domain: proportional to size^(1 / temperature) (arXiv 1907.05019, section
    4.1).
    """
    # Divide by the largest first: a small temperature would overflow.
    sizes = [(count / max(counts)) ** (1 / temperature) for count in counts]
    return [size / sum(sizes) for size in sizes]


def drawn(shares: Sequence[float], start: int, stop: int) -> list[tuple[Indices, int, int]]:
    """Return for each domain its places in `start`..`stop`, counted from `start`, and how many
    places it has before `start` and before `stop`.

    The first domain takes place g if floor((g + 1) p) > floor(g p), so its places are evenly
    spread; the others divide the remaining places in the same way.
    """
    places, left, result = np.arange(stop - start), sum(shares), []
    for share in shares:
        # How many places this domain has before each remaining one. 1e-9 keeps rounding from
        # lowering a floor by one.
        before = np.floor(
            np.arange(start, stop + 1) * min(1.0, share / (left or 1.0)) + 1e-9
        ).astype(np.int64)
        taken = np.diff(before) > 0
        result.append((places[taken], int(before[0]), int(before[-1])))
        places, left = places[~taken], left - share
        start, stop = start - int(before[0]), stop - int(before[-1])
    return result


def units(
    examples: Examples,
    start: int,
    stop: int,
    seed: int,
    fraction: float = 0.0,
    temperature: float = 1.0,
) -> Indices:
    """Unit indices of places `start`..`stop` in the endless stream, `fraction` of them replay,
    evenly spread.

    Data and replay are each reshuffled in every epoch of their own. temperature: mixes domains of
    the data (`shares`).
    """
    main = len(examples) if examples.replay_from is None else examples.replay_from
    # Rows, share and seed of each domain. With one seed for two, the same rows of both would meet
    # in every epoch.
    domains = [(np.arange(main), 1 - fraction, seed)]
    if temperature != 1 and examples.domains is not None:
        rows = [
            np.flatnonzero(examples.domains[:main] == domain)
            for domain in np.unique(examples.domains[:main])
        ]
        parts = zip(rows, shares([*map(len, rows)], temperature), strict=True)
        domains = [
            (own, (1 - fraction) * part, seed + (n + 2) * 2**32)
            for n, (own, part) in enumerate(parts)
        ]
    if examples.replay_from is not None:
        domains.insert(0, (np.arange(main, len(examples)), fraction, seed + 2**32))
    result = np.empty(stop - start, dtype=np.int64)
    taken = drawn([share for _, share, _ in domains], start, stop)
    for (own, _, own_seed), (places, first, last) in zip(domains, taken, strict=True):
        if last > first:
            result[places] = own[order(len(own), first, last, own_seed)]
    return result
