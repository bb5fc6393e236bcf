"""The values of a distilled set's files, checked when they are read: tokens, and the target's stored distributions.

Legend: R rows, N tokens of all rows, M stored tokens of all positions.
"""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith_core.errors import InputError

_ROWS_AT_ONCE = 2048
# How far the probabilities of one position may add up to more than one: they are stored in fp32.
_TOLERANCE = 1e-2

Array = npt.NDArray[Any]


def check_part(file: Path, teacher: bool) -> int:
    """The largest stored teacher token, -1 without any. teacher: whether to read the target's top tokens.

    InputError names file, row and column of the first value that cannot be: a null, a negative token, a token listed
    twice at one position, a probability that is not a number or above one, lists of unequal length.
    """
    names = ["prompt_ids", "response_ids"] + (["top_ids", "top_logprobs", "tail_mass"] if teacher else [])
    opened, start, largest = pq.ParquetFile(file), 0, -1
    for name in names:
        kind = opened.schema_arrow.field(name).type if name in opened.schema_arrow.names else None
        for _ in range(2 if name in ("top_ids", "top_logprobs") else 1):
            kind = kind.value_type if kind is not None and pa.types.is_list(kind) else None
        number = pa.types.is_integer if name.endswith("_ids") else pa.types.is_floating
        if kind is None or not (number(kind) or pa.types.is_null(kind)):
            raise InputError(f"{file}: column '{name}' is missing or not of lists of numbers; make the set again")
    for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=names):
        rows = _Rows(file, start, batch)
        rows.check_tokens()
        if teacher:
            largest = max(largest, rows.check_teacher())
        start += len(batch)
    return largest


class _Rows:
    """Some consecutive rows of a file; `start` is the number of the first, from 0."""

    def __init__(self, file: Path, start: int, batch: pa.RecordBatch) -> None:
        self.file, self.start, self.batch = file, start, batch

    def fail(self, row: int, column: str, problem: str) -> NoReturn:
        raise InputError(f"{self.file}: row {self.start + row + 1}: key '{column}' {problem}; make the set again")

    def lists(self, column: str, of: pa.Array, row_R: Array) -> tuple[pa.Array, Array]:
        """The values of an array of lists, and for each the number of its list. row_R: the row of each list."""
        if of.null_count:
            self.fail(
                int(row_R[np.flatnonzero(of.is_null().to_numpy(zero_copy_only=False))[0]]), column, "holds a null"
            )
        values, lengths = of.flatten(), of.value_lengths().to_numpy(zero_copy_only=False)
        owner = np.repeat(np.arange(len(of)), lengths)
        if values.null_count:
            null = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            self.fail(int(row_R[owner[null]]), column, "holds a null")
        return values, owner

    def first(self, column: str, wrong: Array, row: Array, values: Array, problem: str) -> None:
        """InputError for the first of `values` where `wrong` holds; `row` has the row of each."""
        if wrong.any():
            at = int(wrong.argmax())
            self.fail(int(row[at]), column, f"holds {values[at]}; {problem}")

    def check_tokens(self) -> None:
        each = np.arange(len(self.batch))
        for column in ("prompt_ids", "response_ids"):
            values, row = self.lists(column, self.batch.column(column), each)
            ids = values.to_numpy(zero_copy_only=False)
            self.first(column, ids < 0, row, ids, "tokens are 0 or more")

    def check_teacher(self) -> int:
        each = np.arange(len(self.batch))
        wanted = self.batch.column("response_ids").value_lengths()
        for column in ("top_ids", "top_logprobs", "tail_mass"):
            found = self.batch.column(column).value_lengths().fill_null(-1)
            unequal = np.flatnonzero(found.to_numpy(zero_copy_only=False) != wanted.to_numpy(zero_copy_only=False))
            if len(unequal):
                self.fail(int(unequal[0]), column, "must have one entry per token of response_ids")
        id_lists, row_N = self.lists("top_ids", self.batch.column("top_ids"), each)
        logprob_lists, _ = self.lists("top_logprobs", self.batch.column("top_logprobs"), each)
        tails, _ = self.lists("tail_mass", self.batch.column("tail_mass"), each)
        ids, at_M = self.lists("top_ids", id_lists, row_N)
        logprobs, other_M = self.lists("top_logprobs", logprob_lists, row_N)
        if not np.array_equal(at_M, other_M):
            unequal = np.flatnonzero(id_lists.value_lengths().to_numpy() != logprob_lists.value_lengths().to_numpy())
            self.fail(int(row_N[unequal[0]]), "top_logprobs", "must have one entry per token of top_ids")
        ids_M, logprobs_M = ids.to_numpy(zero_copy_only=False), logprobs.to_numpy(zero_copy_only=False)
        tail_N = tails.to_numpy(zero_copy_only=False)
        row_M = row_N[at_M]
        self.first("top_ids", ids_M < 0, row_M, ids_M, "tokens are 0 or more")
        self.first("top_logprobs", ~(logprobs_M <= _TOLERANCE), row_M, logprobs_M, "log-probabilities are at most 0")
        self.first("tail_mass", ~((tail_N >= 0) & (tail_N <= 1)), row_N, tail_N, "it is a probability, from 0 to 1")
        mass_N = tail_N + np.bincount(at_M, np.exp(logprobs_M.astype(float)), len(tail_N))
        self.first("tail_mass", mass_N > 1 + _TOLERANCE, row_N, tail_N, "with top_logprobs that is more than one")
        order = np.lexsort((ids_M, at_M))
        twice = (np.diff(ids_M[order]) == 0) & (np.diff(at_M[order]) == 0)
        self.first("top_ids", twice, row_M[order[1:]], ids_M[order[1:]], "twice at one position")
        return int(ids_M.max(initial=-1))
