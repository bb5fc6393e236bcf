"""Batches of training data: which units a process forwards in a step, padded.

Legend: B rows of a batch, T tokens of the longest of them, N valid tokens, K stored teacher tokens
per position.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from draftsmith.core.ranks import groups, own_group
from draftsmith.core.sampling import row_seed
from draftsmith.core.teacher_rows import COLUMN, unpack
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.data import Examples, Indices, Row, document_tokens
from draftsmith.train.job import TrainingJob
from draftsmith.train.stream import units
from draftsmith.train.teacher import StoredTeacher


def make_batches(job: TrainingJob, step: int) -> list[Batch]:
    """Return this process's batches of a step, on the CPU."""
    batches = []
    for rows_B, positions_B in zip(*_own_units(job, step), strict=True):
        seeds = [row_seed(job.config.seed, f"row {position}") for position in positions_B.tolist()]
        batches.append(replace(collate(job.training, rows_B), seeds_B=torch.tensor(seeds)))
    return batches


def _own_units(job: TrainingJob, step: int) -> tuple[Indices, Indices]:
    """This process's units of a step and their positions in the stream, `[accumulation, B]` each.

    A step takes consecutive rows of the shuffled stream and deals them to (forward, process) in
    turn, so that its rows do not depend on how they are divided (law 6).
    """
    config = job.config
    shape = (config.accumulation, groups(), config.batch_size)
    start = step * math.prod(shape)
    stop = start + math.prod(shape)
    rows = units(
        job.training,
        start,
        stop,
        seed=config.seed,
        fraction=config.replay_fraction,
        temperature=config.mixing_temperature,
    )
    positions = np.arange(start, stop)
    return rows.reshape(shape)[:, own_group()], positions.reshape(shape)[:, own_group()]


def heldout_batches(job: TrainingJob) -> list[tuple[list[int], bool]]:
    """This process's batches of held-out units, and whether each counts.

    Sharded weights require the same number of forwards in every process: one with fewer batches
    repeats the last batch, which does not count.
    """
    # Longest first: rows of similar length share a batch, and if memory runs out, it is in the
    # first batch.
    longest = np.argsort(-job.heldout.valid_tokens, kind="stable").tolist()
    size = job.config.batch_size
    batches = [longest[i : i + size] for i in range(0, len(longest), size)]
    last = len(batches) - 1
    rounds = math.ceil(len(batches) / groups())
    own = range(own_group(), rounds * groups(), groups())
    return [(batches[min(index, last)], index <= last) for index in own]


def reads(job: TrainingJob, step: int, *, training: bool) -> Iterator[list[int]]:
    """Yield the tokens of every document, not cut, in the order in which this process reads their
    states when `step` steps are done.

    training: whether steps read them; else only evaluations do.
    """
    if step == 0:
        yield from _heldout(job)
    for done in range(step + 1, job.steps + 1):
        if training:
            own_rows, _ = _own_units(job, done - 1)
            yield from tokens_of(job.training, own_rows.ravel())
        if job.evaluates(done):
            yield from _heldout(job)


def _heldout(job: TrainingJob) -> Iterator[list[int]]:
    for rows, _ in heldout_batches(job):
        yield from tokens_of(job.heldout, rows)


def tokens_of(examples: Examples, indices: Iterable[int]) -> Iterator[list[int]]:
    """Yield the tokens of every document of these units, not cut."""
    for index in map(int, indices):
        yield from map(document_tokens, examples.documents(index))


@dataclass
class _Unit:
    """The documents of a unit in one row."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    documents: list[int]

    def add(self, number: int, document: Sequence[Row], limit: int) -> None:
        """Append a document, cut to `limit` tokens."""
        tokens = document_tokens(document)[:limit]
        self.ids += tokens
        labels = [IGNORE] * len(tokens)
        for row in document:
            # The first token of a sequence is not predicted: there is nothing before it.
            first = max(len(row["prompt_ids"]), 1)
            answer = document_tokens([row])[first:limit]
            labels[first - 1 : first - 1 + len(answer)] = answer
        self.labels += labels
        self.positions += range(len(tokens))
        self.documents += [number] * len(tokens)


def collate(examples: Examples, indices: Iterable[int]) -> Batch:
    """Make one right-padded batch of the units at `indices`."""
    units: list[_Unit] = []
    rows: list[Row] = []
    for index in map(int, indices):
        units.append(_Unit([], [], [], []))
        for number, document in enumerate(examples.documents(index)):
            rows += document
            units[-1].add(number, document, examples.max_length)
    ids_BT = _padded([unit.ids for unit in units], 0)
    labels_BT = _padded([unit.labels for unit in units], IGNORE)
    stored = _stored(rows, examples.max_length) if examples.stored else None
    if examples.groups is None:
        return Batch(ids_BT, labels_BT, stored=stored)
    # Padding attends to itself, and no document attends to it.
    positions_BT = _padded([unit.positions for unit in units], 0)
    documents_BT = _padded([unit.documents for unit in units], -1)
    return Batch(ids_BT, labels_BT, positions_BT, documents_BT, stored)


def _padded(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


def _stored(rows: Sequence[Row], limit: int) -> StoredTeacher:
    ids = []
    logprobs = []
    tails = []
    for row in rows:
        # The first token of a sequence is not predicted, and tokens beyond the limit were cut off.
        valid = slice(0 if row["prompt_ids"] else 1, limit - len(row["prompt_ids"]))
        ids_RK, logprobs_RK, tail_R = unpack(row[COLUMN])
        ids.append(ids_RK[valid])
        logprobs.append(logprobs_RK[valid])
        tails.append(tail_R[valid])
    return StoredTeacher(
        top_ids_NK=_columns(ids, 0),
        top_logprobs_NK=_columns(logprobs, -math.inf),
        tail_N=torch.from_numpy(np.concatenate(tails)),
    )


def _columns(parts: Sequence[npt.NDArray[np.generic]], fill: float) -> torch.Tensor:
    """Rows of all parts, as wide as the widest; one column if all rows have only a tail."""
    width = max(part.shape[1] for part in parts) or 1
    padded = []
    for part in parts:
        missing = (0, 0), (0, width - part.shape[1])
        padded.append(np.pad(part, missing, constant_values=fill))
    return torch.from_numpy(np.concatenate(padded))
