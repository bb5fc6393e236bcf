"""Teacher rows as they are stored: the target's likeliest tokens at each position of an answer, in
few bytes.

One value of a column `teacher` per answer, little-endian:

    K, B                   two uint16: tokens per position, blocks of 65,536 ids in the vocabulary
    R positions, each
        K uint16               ids in ascending order, without the number of their block
        K float16          their natural log-probabilities, temperature 1, the whole vocabulary
        1 float16          the probability of all other tokens
        B - 1 uint16           how many of the ids are in block 1 or above, in block 2 or above, ...

At K = 128 that is 514 bytes a token for up to 65,536 ids and 520 for up to 262,144.

Legend: R positions (response tokens), K kept tokens, B blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The column of a distilled set.
COLUMN = "teacher"
_BLOCK = 2**16
_HEADER = 4
# Of a finite float16; its exponential is zero.
_LEAST = -65504.0


class TeacherRows(NamedTuple):
    """int64 ids, ascending; float32 log-probabilities; float32 mass of the other tokens."""

    ids_RK: Array
    logprobs_RK: Array
    tail_R: Array


def bytes_per_token(k: int, vocabulary: int) -> int:
    """Bytes that one position takes: `k` tokens of a vocabulary of this size, and the mass of the
    rest.
    """
    return 4 * k + 2 + 2 * (_blocks(vocabulary) - 1)


def _blocks(vocabulary: int) -> int:
    return max(1, -(-vocabulary // _BLOCK))


def _float16(values: Array) -> Array:
    """The bits of float16 values, as integers."""
    halves = np.asarray(values).astype("<f2")
    return halves.view("<u2")


def _float32(bits: Array) -> Array:
    halves = np.ascontiguousarray(bits).view("<f2")
    return halves.astype(np.float32)


def pack(ids_RK: Array, logprobs_RK: Array, tail_R: Array, vocabulary: int) -> bytes:
    """Positions as bytes; the ids of a position may come in any order, each once."""
    order = np.argsort(ids_RK, axis=-1)
    ids_RK = np.take_along_axis(ids_RK, order, -1)
    logprobs_RK = np.take_along_axis(logprobs_RK, order, -1)
    k = ids_RK.shape[1]
    blocks = _blocks(vocabulary)
    columns = [(ids_RK % _BLOCK).astype("<u2"), _float16(np.maximum(logprobs_RK, _LEAST))]
    columns.append(_float16(tail_R)[:, None])
    for block in range(1, blocks):
        above_R = (ids_RK >= block * _BLOCK).sum(-1)
        columns.append(above_R[:, None].astype("<u2"))
    header = np.array([k, blocks], dtype="<u2")
    positions = np.concatenate(columns, axis=-1)
    return header.tobytes() + positions.tobytes()


def pack_likeliest(rows: Sequence[Sequence[tuple[int, float]]], vocabulary: int) -> bytes:
    """Pack the likeliest tokens of each position, as (id, log-probability); other tokens have the
    rest of the mass.
    """
    pairs = np.array(rows)
    ids_RK = pairs[..., 0].astype(np.int64)
    logprobs_RK = pairs[..., 1]
    mass_R = np.exp(logprobs_RK).sum(-1)
    tail_R = np.maximum(0, 1 - mass_R)
    return pack(ids_RK, logprobs_RK, tail_R, vocabulary)


def unpack(data: bytes) -> TeacherRows:
    """The rows in a value of `pack`."""
    k, blocks = np.frombuffer(data, "<u2", 2).tolist()
    width = 2 * k + blocks
    whole = np.frombuffer(data, "<u2", offset=_HEADER).reshape(-1, width)
    ids_RK = whole[:, :k].astype(np.int64)
    for above_R in whole[:, 2 * k + 1 :].T:
        # Ids ascend, so those of a higher block are the last ones.
        first_R = k - above_R.astype(np.int64)
        ids_RK += _BLOCK * (np.arange(k) >= first_R[:, None])
    logprobs_RK = _float32(whole[:, k : 2 * k])
    tail_R = _float32(whole[:, 2 * k])
    return TeacherRows(ids_RK, logprobs_RK, tail_R)
