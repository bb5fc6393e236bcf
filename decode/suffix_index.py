"""A suffix index over token sequences: what followed these tokens in a corpus, and how often.

Legend: n positions of the joined text, c occurrences, L tokens of a continuation.

The documents are joined with separators, and the places in the joined text are sorted by what stands *before* them,
read backwards. All places behind the same tokens are then neighbours, and the longest end of a query that occurs
anywhere is found with one binary search: it is shared with one of the two neighbours of where the query would stand.
The sort is prefix doubling (Manber and Myers 1993) in which only groups that still tie are sorted again (Larsson and
Sadakane 2007), vectorised: O(n log n) comparisons a doubling, O(log n) doublings.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftsmith_core.errors import InputError
from draftsmith_core.io import atomic_file
from draftsmith_core.prompts import KEYS, check_messages, iterate_rows, whole
from draftsmith_core.tokenization import Tokenizer, encode_messages, encode_text

SEPARATOR = -1
# Beyond this many occurrences continuations are counted on an even sample: shares move by some 3 %, and the cost of a
# lookup no longer depends on how frequent the tokens are.
SAMPLE = 256


@dataclass(frozen=True, eq=False)
class SuffixIndex:
    """Token sequences and the order of their places.

    `text_n` (int32) holds each document followed by a separator. `places` (int32) are the places that have a token
    before and behind them in the same document, sorted by what is before, the nearest token first.
    """

    text_n: NDArray[np.int32]
    places: NDArray[np.int32]

    @staticmethod
    def build(documents: Sequence[Sequence[int]]) -> "SuffixIndex":
        """Index documents of token ids; about 8 bytes a token when built, some 80 while building.

        Raises ValueError for a negative token and for 2**31 tokens or more.
        """
        parts = [np.asarray(document, dtype=np.int64) for document in documents]
        if any(part.size and int(part.min()) < 0 for part in parts):
            raise ValueError("suffix index: token ids must not be negative")
        if sum(part.size + 1 for part in parts) >= 2**31:
            raise ValueError("suffix index: 2**31 tokens or more; index a part of the corpus")
        end = np.array([SEPARATOR])
        text_n = np.concatenate([piece for part in parts for piece in (part, end)] or [end]).astype(np.int32)
        places = len(text_n) - suffix_array(text_n[::-1])
        places = places[places < len(text_n)]
        places = places[(text_n[places] >= 0) & (text_n[places - 1] >= 0)]
        return SuffixIndex(text_n, places.astype(np.int32))

    @property
    def largest(self) -> int:
        """The largest token id, -1 when there is none."""
        return int(self.text_n.max())

    @property
    def digest(self) -> str:
        """sha256 over the documents' tokens."""
        return hashlib.sha256(self.text_n.tobytes()).hexdigest()

    def match(self, suffix: Sequence[int]) -> int:
        """How many of the last tokens of `suffix` occur together, with a token behind them, in some document."""
        query = list(suffix)[::-1]
        at = bisect_left(range(len(self.places)), query, key=lambda slot: self._before(slot, len(query)))
        neighbours = [slot for slot in (at - 1, at) if 0 <= slot < len(self.places)]
        return max((_common(query, self._before(slot, len(query))) for slot in neighbours), default=0)

    def continuations(self, suffix: Sequence[int], length: int, count: int) -> list[tuple[tuple[int, ...], int]]:
        """The `count` most frequent continuations of `suffix`, each with its occurrences, the most frequent first.

        They are `length` tokens long, or end where their document does. Above `SAMPLE` occurrences the counts are
        those in an even sample of that many.
        """
        query = list(suffix)[::-1]
        slots = range(len(self.places))
        low = bisect_left(slots, query, key=lambda slot: self._before(slot, len(query)))
        high = bisect_right(slots, query, lo=low, key=lambda slot: self._before(slot, len(query)))
        if high - low > SAMPLE:
            starts_c = self.places[np.linspace(low, high - 1, SAMPLE).astype(np.int64)]
        else:
            starts_c = self.places[low:high]
        reach_cL = np.minimum(starts_c[:, None] + np.arange(length), len(self.text_n) - 1)
        # One above the token, so that 0 is where the document has ended; as big-endian bytes, which sort as tokens do.
        codes_cL = self.text_n[reach_cL] + 1
        codes_cL *= np.logical_and.accumulate(codes_cL > 0, axis=1)
        keys = codes_cL.astype(">i4").view(f"V{4 * length}").ravel().tolist()
        # Ties go by the tokens, so that the answer does not depend on the order of the documents.
        best = sorted((-times, key) for key, times in Counter(keys).items())[:count]
        rows = np.frombuffer(b"".join(key for _, key in best), dtype=">i4").reshape(-1, length).tolist()
        return [(tuple(code - 1 for code in row if code), -times) for row, (times, _) in zip(rows, best, strict=True)]

    def save(self, path: Path, source: str) -> None:
        """Write the index as safetensors; `source` is a hash of what it was built from (files and tokenizer)."""
        with atomic_file(path) as temporary:
            tensors = {"text": self.text_n, "places": self.places}
            save_file(tensors, temporary, metadata={"source": source, "digest": self.digest})

    @staticmethod
    def load(path: Path, source: str) -> "SuffixIndex":
        """Read an index; InputError when it was built from another source, or is damaged."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                index = SuffixIndex(file.get_tensor("text"), file.get_tensor("places"))
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{path}: no suffix index can be read from it ({reason}); build it again") from None
        if metadata.get("source") != source:
            raise InputError(f"{path}: was built from another corpus or tokenizer; build it again")
        if metadata.get("digest") != index.digest:
            raise InputError(f"{path}: its tokens are not those that were indexed; build it again")
        return index

    def _before(self, slot: int, length: int) -> list[int]:
        """Up to `length` tokens before a place, the nearest first."""
        place = int(self.places[slot])
        before: list[int] = self.text_n[max(place - length, 0) : place][::-1].tolist()
        return before


def _common(query: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for mine, yours in zip(query, other, strict=False):
        if mine != yours:
            break
        length += 1
    return length


def suffix_array(text_n: NDArray[Any]) -> NDArray[np.int64]:
    """The starts of all suffixes of an integer array, in the order of the suffixes; an end comes before any value."""
    size = len(text_n)
    values, codes_n = np.unique(text_n, return_inverse=True)
    # Several tokens fit one 64-bit key, so the first sort already compares that many.
    bits = int(len(values)).bit_length()
    span = min(63 // bits, max(size, 1)) if bits else 1
    keys_n = np.zeros(size, dtype=np.int64)
    for shift in range(span):
        keys_n <<= bits
        keys_n[: size - shift] += codes_n[shift:] + 1
    order_n = np.argsort(keys_n)
    keys_n = keys_n[order_n]
    # The rank of a suffix is the slot at which its group of ties begins; behind the last place stands -1.
    ranks_n = np.full(size + 1, -1, dtype=np.int64)
    slots = np.arange(size)
    members = order_n
    while True:
        first = np.concatenate([[True], keys_n[1:] != keys_n[:-1]])[: len(slots)]
        ranks_n[members] = slots[first][np.cumsum(first) - 1]
        alone = first & np.concatenate([first[1:], [True]])[: len(slots)]
        slots = slots[~alone]
        if not len(slots):
            return order_n
        members = order_n[slots]
        keys_n = ranks_n[members] * (size + 1) + ranks_n[np.minimum(members + span, size)] + 1
        inside = np.argsort(keys_n)
        members, keys_n = members[inside], keys_n[inside]
        order_n[slots] = members
        span *= 2


def read_documents(source: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Documents of a corpus, tokenised: rows of a .jsonl or .parquet file or a dataset on the hub, or a .txt file
    as one document.

    A row has `text`, `messages` (a chat, read whole) or `prompt`; or, in a distilled set, `prompt_ids` and
    `response_ids`, which are taken as they are. Raises InputError that names file, row and key.
    """
    path = Path(source)
    if path.suffix == ".txt" and path.is_file():
        try:
            return [encode_text(tokenizer, path.read_text(encoding="utf-8"))]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: cannot be read as UTF-8 text ({error})") from None
    documents = [_document(row, f"{source}:{number}", tokenizer) for number, row in iterate_rows(source)]
    if not any(documents):
        raise InputError(f"{source}: holds no text; a row needs one of the keys {', '.join(KEYS)}")
    return documents


def _document(row: dict[str, Any], where: str, tokenizer: Tokenizer) -> list[int]:
    if "response_ids" in row:
        ids = [*(row.get("prompt_ids") or []), *(row["response_ids"] or [])]
        if not all(isinstance(token, int) and 0 <= token < len(tokenizer) for token in ids):
            raise InputError(f"{where}: key 'response_ids': holds tokens that the tokenizer does not have")
        return ids
    present = [key for key in ("text", "messages", "prompt") if row.get(key) is not None]
    if not present:
        raise InputError(f"{where}: needs one of the keys {', '.join(KEYS)}; found {', '.join(map(repr, row))}")
    key = present[0]
    value = row[key]
    if key == "messages":
        # A prompt ends before the last answer; a document has it. The empty turn is what is dropped instead.
        turns = [*value, {"role": "assistant", "content": ""}] if isinstance(value, list) and value else value
        return encode_messages(tokenizer, check_messages(turns, where), where)
    if not isinstance(value, str):
        raise InputError(f"{where}: key {key!r}: expected text, found {type(value).__name__}")
    return encode_text(tokenizer, whole(value, key, where)) if value.strip() else []
