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
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The column of a distilled set.
COLUMN = "teacher"
_BLOCK = 2**16
_HEADER = 4
# Of a finite float16; its exponential is zero.
_LEAST = -65504.0


def bytes_per_token(k: int, vocabulary: int) -> int:
    """Bytes that one position takes: `k` tokens of a vocabulary of this size, and the mass of the
    rest.
    """
    return 4 * k + 2 + 2 * (_blocks(vocabulary) - 1)


def _blocks(vocabulary: int) -> int:
    return max(1, -(-vocabulary // _BLOCK))


def pack(ids_RK: Array, logprobs_RK: Array, tail_R: Array, vocabulary: int) -> bytes:
    """Positions as bytes; the ids of a position may come in any order, each once."""
    order = np.argsort(ids_RK, axis=-1)
    ids_RK, logprobs_RK = (
        np.take_along_axis(ids_RK, order, -1),
        np.take_along_axis(logprobs_RK, order, -1),
    )
    k, blocks = ids_RK.shape[1], _blocks(vocabulary)
    above = [(ids_RK >= block * _BLOCK).sum(-1) for block in range(1, blocks)]
    whole = np.concatenate(
        [
            (ids_RK % _BLOCK).astype("<u2"),
            np.maximum(logprobs_RK, _LEAST).astype("<f2").view("<u2"),
            np.asarray(tail_R).astype("<f2").view("<u2")[:, None],
            *(count[:, None].astype("<u2") for count in above),
        ],
        axis=-1,
    )
    return np.array([k, blocks], dtype="<u2").tobytes() + whole.tobytes()


def pack_likeliest(rows: Sequence[Sequence[tuple[int, float]]], vocabulary: int) -> bytes:
    """Pack the likeliest tokens of each position, as (id, log-probability); other tokens have the
    rest of the mass.
    """
    ids_RK = np.array([[token for token, _ in row] for row in rows])
    logprobs_RK = np.array([[logprob for _, logprob in row] for row in rows])
    return pack(ids_RK, logprobs_RK, np.maximum(0, 1 - np.exp(logprobs_RK).sum(-1)), vocabulary)


def unpack(data: bytes) -> tuple[Array, Array, Array]:
    """ids `[R, K]` int64 ascending, log-probabilities `[R, K]` float32, tail mass `[R]` float32."""
    k, blocks = (int(value) for value in np.frombuffer(data, "<u2", 2))
    width = 2 * k + blocks
    whole = np.frombuffer(data, "<u2", offset=_HEADER).reshape(-1, width)
    ids_RK = whole[:, :k].astype(np.int64)
    for above_R in whole[:, 2 * k + 1 :].T:
        # Ids ascend, so those of a higher block are the last ones.
        ids_RK += _BLOCK * (np.arange(k) >= k - above_R[:, None].astype(np.int64))
    logprobs_RK = np.ascontiguousarray(whole[:, k : 2 * k]).view("<f2").astype(np.float32)
    tail_R = np.ascontiguousarray(whole[:, 2 * k]).view("<f2").astype(np.float32)
    return ids_RK, logprobs_RK, tail_R
