"""Tokens to text as they come."""

from collections.abc import Iterator

from draftsmith.core.tokenization import Tokenizer, decode_text


class Piece(str):
    """Text of one token, or of the tokens that make one character.

    from_draft: whether the last of these tokens was drafted.
    """

    from_draft = False


class Detokenizer:
    """Turn tokens into pieces of text. A piece never ends inside a character, except the last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens before `_read` are text already. Decode again from `_anchor`: a token's text may
        # depend on the token before it. The cost per step is constant.
        self._anchor = self._read = 0

    def add(self, ids: list[int], from_draft: list[bool]) -> Iterator[Piece]:
        """Yield the text of the tokens of one step."""
        for token, drafted in zip(ids, from_draft, strict=True):
            self._ids.append(token)
            piece = self.rest()
            # Wait for the next token if the character is not complete.
            if not piece.endswith("\ufffd"):
                piece.from_draft = drafted
                yield piece
                self._anchor, self._read = self._read, len(self._ids)

    def rest(self) -> Piece:
        """Return the text that was not yielded yet."""
        known = decode_text(self._tokenizer, self._ids[self._anchor : self._read])
        return Piece(decode_text(self._tokenizer, self._ids[self._anchor :])[len(known) :])
