"""Batches of training data: which units a process forwards in a step, padded.

Legend: B rows of a batch, T tokens of the longest of them, N valid tokens, K stored teacher tokens
per position.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from draftsmith.core.ranks import groups, own_group
from draftsmith.core.sampling import row_seed
from draftsmith.core.teacher_rows import COLUMN, unpack
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.data import Examples, Row
from draftsmith.train.job import TrainingJob
from draftsmith.train.stream import units
from draftsmith.train.teacher import StoredTeacher


def make_batches(job: TrainingJob, step: int) -> list[Batch]:
    """Return this process's batches of a step.

    A step takes consecutive rows of the shuffled stream and deals them to (forward, process) in
    turn, so that its rows do not depend on how they are divided (law 6).
    """
    config = job.config
    world = job.world
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
    own_rows = rows.reshape(shape)[:, own_group()]
    own_positions = np.arange(start, stop).reshape(shape)[:, own_group()]
    batches = []
    for rows_B, positions_B in zip(own_rows, own_positions, strict=True):
        seeds = [row_seed(config.seed, f"row {position}") for position in positions_B.tolist()]
        batch = replace(collate(job.training, rows_B), seeds_B=torch.tensor(seeds))
        batches.append(batch.to(world.device))
    return batches


@dataclass
class _Unit:
    """The documents of a unit in one row."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    documents: list[int]

    def add(self, number: int, document: Row, limit: int) -> None:
        """Append a document, cut to `limit` tokens."""
        tokens = (document["prompt_ids"] + document["response_ids"])[:limit]
        # The first token of a sequence is not predicted: there is nothing before it.
        first = max(len(document["prompt_ids"]), 1)
        self.ids += tokens
        self.labels += [IGNORE] * (first - 1) + tokens[first:] + [IGNORE]
        self.positions += range(len(tokens))
        self.documents += [number] * len(tokens)


def collate(examples: Examples, indices: Iterable[int]) -> Batch:
    """Make one right-padded batch of the units at `indices`."""
    units: list[_Unit] = []
    documents: list[Row] = []
    for index in map(int, indices):
        group = [index] if examples.groups is None else examples.groups[index]
        units.append(_Unit([], [], [], []))
        for number, row in enumerate(group):
            documents.append(examples.rows[row])
            units[-1].add(number, documents[-1], examples.max_length)
    ids_BT = _padded([unit.ids for unit in units], 0)
    labels_BT = _padded([unit.labels for unit in units], IGNORE)
    stored = _stored(documents, examples.max_length) if examples.stored else None
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
