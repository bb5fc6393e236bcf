"""Tokens to text as they come."""

from collections.abc import Iterator

from draftsmith_core.tokenization import Tokenizer, decode_text


class Piece(str):
    """Text of one token, or of the tokens that make one character. `from_draft`: whether the last
    one was drafted.
    """

    from_draft = False


class Detokenizer:
    """Tokens to text as they come. No piece ends inside a character, as long as more tokens
    follow.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens before `_read` are text already. Those from `_anchor` on are decoded again with
        # each new token, because the text of a token can depend on the one before it. So a step
        # costs the same however long the text is.
        self._anchor = self._read = 0

    def add(self, ids: list[int], from_draft: list[bool]) -> Iterator[Piece]:
        """Yield the text of the tokens of one step."""
        for token, drafted in zip(ids, from_draft, strict=True):
            self._ids.append(token)
            piece = self.rest()
            # A character of several tokens is not whole yet; the next token brings it.
            if not piece.endswith("\ufffd"):
                piece.from_draft = drafted
                yield piece
                self._anchor, self._read = self._read, len(self._ids)

    def rest(self) -> Piece:
        """The text that was not yielded yet."""
        known = decode_text(self._tokenizer, self._ids[self._anchor : self._read])
        return Piece(decode_text(self._tokenizer, self._ids[self._anchor :])[len(known) :])
