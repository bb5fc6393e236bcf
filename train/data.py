"""Training data: rows of prompt and response tokens, their order, and the batches made of them.

Legend: B sequences, T tokens of the longest of them.
"""

import glob
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from draftsmith.errors import InputError
from draftsmith.io import hash_json, read_json, sha256_file
from draftsmith.records import check_messages, iterate_rows, whole
from draftsmith.text import Tokenizer, encode_messages, encode_text

# Its bars would draw over our own progress.
datasets.disable_progress_bars()

IGNORE = -100
_FEATURES = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("prompt_ids", "response_ids")})


@dataclass(frozen=True)
class Examples:
    """Tokenised rows (`prompt_ids`, `response_ids`; loss on the response only), cut to `max_length` tokens.

    `valid_tokens[i]` is how many tokens of row i are predicted; `dropped` counts rows that had none. `digest`
    identifies the data, `max_token` is its largest token, `targets` the fingerprints of the targets it came from.
    """

    rows: datasets.Dataset
    max_length: int
    valid_tokens: npt.NDArray[np.int64]
    dropped: int
    digest: str
    max_token: int
    targets: frozenset[str]


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; `labels_BT[b, t]` is the token that position t must predict, or IGNORE.

    There is no attention mask: under causal attention nothing that counts looks at padding on the right, and
    without a mask attention takes its fast kernel.
    """

    ids_BT: Tensor
    labels_BT: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(self.ids_BT.to(device), self.labels_BT.to(device))


def load_examples(sources: Sequence[str], tokenizer: Tokenizer | None, max_length: int) -> Examples:
    """Read distilled sets and files into one table. Raises InputError naming the file, line and key at fault."""
    tables, digests = [], []
    targets: set[str | None] = set()
    for source in sources:
        if Path(source).is_dir():
            table, digest, target = _distilled(Path(source))
            targets |= {target} - {None}
        else:
            if tokenizer is None:
                raise InputError(f"{source}: is text, and there is no tokenizer; set `tokenizer` or `target`")
            table, digest = _text(source, tokenizer, max_length)
        tables.append(table)
        digests.append(digest)
    rows = datasets.concatenate_datasets(tables)
    return _examples(rows, max_length, hash_json([digests, max_length]), frozenset(map(str, targets)))


def _examples(rows: datasets.Dataset, max_length: int, digest: str, targets: frozenset[str]) -> Examples:
    lengths = {
        name: np.concatenate(
            [pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in _chunks(rows, name)]
            or [np.zeros(0)]
        ).astype(np.int64)
        for name in ("prompt_ids", "response_ids")
    }
    # The first token of a sequence has nothing to be predicted from.
    first = np.maximum(lengths["prompt_ids"], 1)
    valid = np.minimum(lengths["prompt_ids"] + lengths["response_ids"], max_length) - first
    keep = np.flatnonzero(valid > 0)
    if not len(keep):
        raise InputError(f"data: no response token fits in max_length {max_length}; raise max_length")
    largest = [pc.max(chunk.flatten()).as_py() for name in lengths for chunk in _chunks(rows, name)]
    max_token = max(token for token in largest if token is not None)
    return Examples(rows.select(keep), max_length, valid[keep], int(len(valid) - len(keep)), digest, max_token, targets)


def _chunks(rows: datasets.Dataset, name: str) -> Iterator[Any]:
    for table in rows.with_format("arrow").select_columns([name]).iter(batch_size=10_000):
        yield from table[name].chunks


def _distilled(directory: Path) -> tuple[datasets.Dataset, str, str | None]:
    """Rows, what identifies them, and the fingerprint of the target that wrote them (None when it is not told)."""
    manifest = read_json(directory / "manifest.json", "the manifest of a finished distilled set")
    if not manifest.get("complete"):
        raise InputError(f"{directory}: the distilled set is not finished; run the same distill command again")
    paths = []
    for part in manifest["parts"]:
        path = directory / part["file"]
        if not path.is_file():
            raise InputError(f"{path}: is in the manifest but not on disk; copy the whole directory")
        if sha256_file(path) != part["sha256"]:
            raise InputError(f"{path}: is not the file that the manifest describes; copy it again")
        paths.append(glob.escape(str(path)))
    table = datasets.load_dataset("parquet", data_files=paths, split="train", columns=["prompt_ids", "response_ids"])
    assert isinstance(table, datasets.Dataset)
    return table.cast(_FEATURES), hash_json(manifest["parts"]), manifest.get("identity", {}).get("target_fingerprint")


def _text(source: str, tokenizer: Tokenizer, max_length: int) -> tuple[datasets.Dataset, str]:
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    stream: list[int] = []
    for number, row in iterate_rows(source):
        where = f"{source}:{number}"
        if row.get("messages") is not None:
            prompt, response = _answered(row["messages"], where, tokenizer)
            prompts.append(prompt)
            responses.append(response)
        elif isinstance(row.get("text"), str):
            stream += _closed(encode_text(tokenizer, whole(row["text"], "text", where)), tokenizer)
        else:
            raise InputError(f"{where}: needs `text`, or `messages` that end with the assistant's answer")
    if not prompts and not stream:
        raise InputError(f"{source}: holds no rows; a row has `text`, or `messages` that end with an answer")
    blocks = [stream[i : i + max_length] for i in range(0, len(stream), max_length)]
    table = datasets.Dataset.from_dict(
        {"prompt_ids": prompts + [[] for _ in blocks], "response_ids": responses + blocks},
        features=_FEATURES,
    )
    return table, hash_json([prompts, responses, blocks])


def _answered(value: Any, where: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    messages = check_messages(value, where)
    if len(messages) == len(value):
        raise InputError(f"{where}: key 'messages': does not end with an assistant turn to train on")
    prompt = encode_messages(tokenizer, messages, where)
    answer = value[-1]["content"]
    response: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return prompt, _closed(response, tokenizer)


def _closed(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def divide(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """(training, held-out): this fraction of the prompts, at least one, those with the smallest hashes.

    Rows that share a prompt stay on one side: samples of one prompt on both would make the held-out loss a measure
    of memory. Raises InputError when there is only one prompt.
    """
    hashes = np.empty(len(examples.rows), dtype=np.uint64)
    for index, row in enumerate(examples.rows):
        key = np.asarray(row["prompt_ids"] or row["response_ids"], dtype=np.int32)
        hashes[index] = int.from_bytes(hashlib.sha256(key.tobytes()).digest()[:8], "big")
    prompts = np.unique(hashes)
    if len(prompts) < 2:
        raise InputError("data: holds a single prompt, so none can be held out; add prompts or set `heldout`")
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    heldout = np.isin(hashes, prompts[:count])
    return _select(examples, ~heldout, "train"), _select(examples, heldout, "heldout")


def _select(examples: Examples, chosen: npt.NDArray[np.bool_], side: str) -> Examples:
    index = np.flatnonzero(chosen)
    return replace(
        examples,
        rows=examples.rows.select(index),
        valid_tokens=examples.valid_tokens[index],
        digest=hash_json([examples.digest, side, len(index)]),
    )


def order(count: int, start: int, stop: int, seed: int) -> npt.NDArray[np.int64]:
    """Row indices of places `start`..`stop` in the endless stream of freshly shuffled epochs.

    A pure function of its arguments: a run that continues needs no other position than its step.
    """
    pieces = []
    for epoch in range(start // count, math.ceil(stop / count)):
        shuffled = np.random.default_rng([seed, epoch]).permutation(count)
        low, high = max(start - epoch * count, 0), min(stop - epoch * count, count)
        pieces.append(shuffled[low:high])
    return np.concatenate(pieces)


def collate(examples: Examples, indices: Iterable[int]) -> Batch:
    """Rows as one right-padded batch."""
    sequences, firsts = [], []
    for index in indices:
        row = examples.rows[int(index)]
        sequences.append((row["prompt_ids"] + row["response_ids"])[: examples.max_length])
        firsts.append(max(len(row["prompt_ids"]), 1))
    width = max(map(len, sequences))
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORE)
    for b, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
        tokens = torch.tensor(sequence)
        ids_BT[b, : len(sequence)] = tokens
        labels_BT[b, first - 1 : len(sequence) - 1] = tokens[first:]
    return Batch(ids_BT, labels_BT)
