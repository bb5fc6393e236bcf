"""The values of a distilled set's files, checked when they are read: tokens, and the target's stored distributions.

Legend: R rows, N response tokens of these rows, M stored teacher tokens at all of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith_core.errors import InputError

_TOKENS = ("prompt_ids", "response_ids")
_TEACHER = ("top_ids", "top_logprobs", "tail_mass")
_ROWS_AT_ONCE = 2048
# How far the probabilities of one position may add up to more than one: they are stored in fp32.
_TOLERANCE = 1e-2

Array = npt.NDArray[Any]


def check_part(file: Path, teacher: bool) -> tuple[int, str]:
    """The largest stored teacher token and its row, (-1, "") without any. teacher: whether to read the top tokens.

    InputError names file, row and column of the first value that cannot be: a null, a negative token, a token listed
    twice at one position, a probability that is not a number or above one, lists of unequal length.
    """
    opened, start, largest = pq.ParquetFile(file), 0, (-1, "")
    names = _TOKENS + (_TEACHER if teacher else ())
    missing = [name for name in names if name not in opened.schema_arrow.names]
    if missing:
        raise InputError(f"{file}: column '{missing[0]}' is missing; make the set again")
    for batch in opened.iter_batches(_ROWS_AT_ONCE, columns=list(names)):
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
    found = {name: lists(name, batch.column(name), each_R) for name in batch.schema.names}
    for name in _TOKENS:
        ids, row = np.array(found[name][0]), found[name][1]
        refuse(name, ids < 0, row, "tokens are 0 or more", ids)
    if "top_ids" not in found:
        return -1, ""
    row_N = found["response_ids"][1]
    for name in _TEACHER:
        lengths_R = np.bincount(found[name][1], minlength=len(batch))
        unequal_R = lengths_R != np.bincount(row_N, minlength=len(batch))
        refuse(name, unequal_R, each_R, "must have one entry per token of response_ids")
    id_values, at_M = lists("top_ids", found["top_ids"][0], row_N)
    logprob_values, other_M = lists("top_logprobs", found["top_logprobs"][0], row_N)
    unequal_N = np.bincount(at_M, minlength=len(row_N)) != np.bincount(other_M, minlength=len(row_N))
    refuse("top_logprobs", unequal_N, row_N, "must have one entry per token of top_ids")
    ids_M, logprobs_M, tail_N = np.array(id_values), np.array(logprob_values, float), np.array(found["tail_mass"][0])
    row_M = row_N[at_M]
    refuse("top_ids", ids_M < 0, row_M, "tokens are 0 or more", ids_M)
    # Written so that NaN, for which every comparison is false, is refused too.
    refuse("top_logprobs", ~(logprobs_M <= _TOLERANCE), row_M, "log-probabilities are at most 0", logprobs_M)
    refuse("tail_mass", ~((tail_N >= 0) & (tail_N <= 1)), row_N, "it is a probability, from 0 to 1", tail_N)
    mass_N = tail_N + np.bincount(at_M, np.exp(logprobs_M), len(row_N))
    refuse("tail_mass", mass_N > 1 + _TOLERANCE, row_N, "with top_logprobs that is more than one", tail_N)
    order = np.lexsort((ids_M, at_M))
    twice = (np.diff(ids_M[order]) == 0) & (np.diff(at_M[order]) == 0)
    refuse("top_ids", twice, row_M[order[1:]], "twice at one position", ids_M[order[1:]])
    if not len(ids_M):
        return -1, ""
    at = int(ids_M.argmax())
    return int(ids_M[at]), f"{place} {first + int(row_M[at])}"
