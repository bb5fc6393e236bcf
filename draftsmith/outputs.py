"""What decoding gives: outputs, and their text as it comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftsmith.core.io import JsonObject
from draftsmith.core.tokenization import Tokenizer, decode_text
from draftsmith.decode import DecodeStats


@dataclass(frozen=True, repr=False)
class Output:
    """One continuation of one prompt.

    seed: writes it again. output_ids: new tokens only, EOS and the tokens of a stop text included.
    finish_reason: "stop" (EOS or a stop text) or "length". from_draft[i]: whether token i was
    drafted and accepted, or added by the target. stats: counts of this output alone; `stats.tau` is
    tokens per target call. prefill_s, decode_s: this output's share of its batch's wall clock.
    """

    id: str
    sample_index: int
    seed: int
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    from_draft: list[bool]
    stats: DecodeStats
    prefill_s: float
    decode_s: float

    def __repr__(self) -> str:
        tau = "-" if self.stats.tau is None else f"{self.stats.tau:.2f}"
        text = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        return f"Output({text!r}, {len(self.output_ids)} tokens, {self.finish_reason}, tau {tau})"

    def row(self) -> JsonObject:
        """Return the row of `draftsmith decode --out`."""
        keys = ("id", "sample_index", "prompt_ids", "output_ids", "text", "finish_reason")
        row: JsonObject = {key: getattr(self, key) for key in keys}
        row["stats"] = {
            "target_calls": self.stats.target_calls,
            "proposed": self.stats.proposed,
            "accepted": self.stats.accepted,
            "accepted_by_depth": list(self.stats.accepted_by_depth),
            "seconds": self.prefill_s + self.decode_s,
        }
        return row


def cut_at_stop(text: str, stop: Sequence[str], *, include: bool) -> str:
    """Return `text` up to its first stop string, which it keeps if `include`."""
    places = [(text.find(string), len(string)) for string in stop if string in text]
    if not places:
        return text
    begin, length = min(places)
    return text[: begin + length * include]


class Piece(str):
    """Text of one token, or of the tokens that make one character.

    from_draft: whether the last of these tokens was drafted.
    """

    from_draft = False


class Detokenizer:
    """Turn tokens into pieces of text. A piece never ends inside a character, except the last.
    Pieces that may begin a stop text wait.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop), default=1)
        self._waiting: list[Piece] = []
        self._yielded = 0
        self._ids: list[int] = []
        # Tokens before `_read` are text already. Decode again from `_anchor`: a token's text may
        # depend on the token before it. The cost per step is constant.
        self._anchor = self._read = 0

    def add(self, ids: list[int], from_draft: list[bool]) -> Iterator[Piece]:
        """Yield the text of the tokens of one step."""
        for token, drafted in zip(ids, from_draft, strict=True):
            self._ids.append(token)
            piece = self._next()
            # Wait for the next token if the character is not complete.
            if not piece.endswith("\ufffd"):
                piece.from_draft = drafted
                self._anchor, self._read = self._read, len(self._ids)
                self._waiting.append(piece)
                yield from self._certain()

    def _certain(self) -> Iterator[Piece]:
        text = "".join(self._waiting)
        if any(string in text for string in self._stop):
            return
        while self._waiting and len(text) - len(self._waiting[0]) >= self._longest - 1:
            piece = self._waiting.pop(0)
            text = text[len(piece) :]
            self._yielded += len(piece)
            yield piece

    def rest(self, text: str) -> Piece:
        """Return what was not yielded yet of the whole `text`."""
        return Piece(text[self._yielded :])

    def _next(self) -> Piece:
        known = decode_text(self._tokenizer, self._ids[self._anchor : self._read])
        return Piece(decode_text(self._tokenizer, self._ids[self._anchor :])[len(known) :])
