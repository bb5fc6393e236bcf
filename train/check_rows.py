"""The values of a distilled set's files, checked when they are read: tokens, and the target's stored distributions.

Legend: R rows, or the response tokens of one of them; K stored tokens at each.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith_core.errors import InputError
from draftsmith_core.teacher_rows import COLUMN, unpack

_TOKENS = ("prompt_ids", "response_ids")
# Of an answer of 4,000 tokens the teacher rows are about 2 MB.
_ROWS_AT_ONCE, _TEACHERS_AT_ONCE = 2048, 64
# How far the probabilities of one position may add up to more than one: they are stored in fp16.
_TOLERANCE = 1e-2

Array = npt.NDArray[Any]


def check_part(file: Path, teacher: bool) -> tuple[int, str]:
    """The largest stored teacher token and its row, (-1, "") without any. teacher: whether to read the teacher rows.

    InputError names file, row and column of the first value that cannot be: a null, a negative token, a token listed
    twice at one position, a probability that is not a number or above one, more or fewer distributions than tokens.
    """
    opened, start, largest = pq.ParquetFile(file), 0, (-1, "")
    names = _TOKENS + ((COLUMN,) if teacher else ())
    missing = [name for name in names if name not in opened.schema_arrow.names]
    if missing:
        raise InputError(f"{file}: column '{missing[0]}' is missing; make the set again")
    for batch in opened.iter_batches(_TEACHERS_AT_ONCE if teacher else _ROWS_AT_ONCE, columns=list(names)):
        largest = max(largest, _check(batch, f"{file}: row", start + 1))
        start += len(batch)
    return largest


def _check(batch: pa.RecordBatch, place: str, first: int) -> tuple[int, str]:
    """`check_part` of some rows, the first of which has this number."""

    def refuse(column: str, wrong: Array, row: Array, problem: str, values: Array | None = None) -> None:
        """InputError for the first place where `wrong` holds; `row` has the row, and `values` the value, of each."""
        if wrong.any():
            at = int(wrong.argmax())
            held = "" if values is None else f"holds {values[at]}; "
            raise InputError(f"{place} {first + int(row[at])}: key '{column}' {held}{problem}; make the set again")

    def lists(column: str, of: pa.Array, row: Array) -> tuple[pa.Array, Array]:
        """The values of an array of lists, and for each the number of its list. row: the row of each list."""
        if not (pa.types.is_list(of.type) or pa.types.is_large_list(of.type)):
            raise InputError(f"{place} {first}: key '{column}' is not a list; make the set again")
        refuse(column, np.array(of.is_null()), row, "holds a null")
        values, owner = of.flatten(), np.repeat(np.arange(len(of)), np.array(of.value_lengths()))
        refuse(column, np.array(values.is_null()), row[owner], "holds a null")
        return values, owner

    each_R = np.arange(len(batch))
    found = {name: lists(name, batch.column(name), each_R) for name in _TOKENS}
    for name in _TOKENS:
        ids, row = np.array(found[name][0]), found[name][1]
        refuse(name, ids < 0, row, "tokens are 0 or more", ids)
    if COLUMN not in batch.schema.names:
        return -1, ""
    lengths_R = np.bincount(found["response_ids"][1], minlength=len(batch))
    rows = enumerate(zip(batch.column(COLUMN).to_pylist(), lengths_R, strict=True))
    checked = (_check_teacher(value, int(length), f"{place} {first + row}") for row, (value, length) in rows)
    return max(checked, default=(-1, ""))


def _check_teacher(value: Any, length: int, place: str) -> tuple[int, str]:
    """The largest token of the teacher rows of one answer of `length` tokens, and `place`."""
    try:
        if not isinstance(value, bytes):
            raise ValueError("holds no bytes")
        ids_RK, logprobs_RK, tail_R = unpack(value)
        # Written so that NaN, for which every comparison is false, is refused too.
        mass_R = tail_R + np.exp(logprobs_RK).sum(-1)
        for wrong, what in (
            (len(tail_R) != length, f"has {len(tail_R)} positions for {length} tokens of response_ids"),
            ((np.diff(ids_RK) <= 0).any(), "holds a token twice at one position"),
            (not (logprobs_RK <= _TOLERANCE).all(), "holds a log-probability that is not at most 0"),
            (not ((tail_R >= 0) & (tail_R <= 1)).all(), "holds a tail mass that is not from 0 to 1"),
            ((mass_R > 1 + _TOLERANCE).any(), "holds probabilities that are more than one"),
        ):
            if wrong:
                raise ValueError(what)
    except ValueError as error:
        raise InputError(f"{place}: key '{COLUMN}' {error}; make the set again") from None
    return (int(ids_RK.max()), place) if ids_RK.size else (-1, "")
