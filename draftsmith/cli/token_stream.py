"""Text on the terminal while it is decoded: drafted tokens stand out from those of the target."""

import unicodedata
from typing import TextIO

from rich.console import Console
from rich.text import Text

from draftsmith_core.tokenization import Tokenizer, decode_text

DRAFT_STYLE = "bold green"


class Stream:
    """Write tokens as text, with drafted tokens in colour on a terminal."""

    def __init__(self, tokenizer: Tokenizer, file: TextIO) -> None:
        self._tokenizer = tokenizer
        self._file = file
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._ids: list[int] = []
        # Tokens before `_read` are shown. Those from `_anchor` on are decoded again with each new token, because the
        # text of a token can depend on the one before it. So a step costs the same however long the text is.
        self._anchor = self._read = 0

    def add(self, ids: list[int], from_draft: list[bool]) -> None:
        """Show the tokens of one step."""
        for token, drafted in zip(ids, from_draft, strict=True):
            self._ids.append(token)
            piece = self._piece()
            # A character of several tokens is not whole yet; the next token brings it.
            if not piece.endswith("\ufffd"):
                self._show(piece, drafted)
                self._anchor, self._read = self._read, len(self._ids)

    def _piece(self) -> str:
        shown = decode_text(self._tokenizer, self._ids[self._anchor : self._read])
        return decode_text(self._tokenizer, self._ids[self._anchor :])[len(shown) :]

    def close(self) -> None:
        """Show the rest, end the line, and explain the colour."""
        self._show(self._piece(), False)
        self._console.print()
        if self._console.is_terminal:
            legend = Text("drafted", style=DRAFT_STYLE)
            legend.append(" / from the target itself", style="not bold default")
            self._console.print(legend)

    def _show(self, piece: str, drafted: bool) -> None:
        if not self._console.is_terminal:
            self._file.write(piece)
            self._file.flush()
            return
        # What a model writes must not steer the terminal (escape sequences).
        piece = "".join(c for c in piece if c in "\n\t" or unicodedata.category(c) != "Cc")
        self._console.print(Text(piece, style=DRAFT_STYLE if drafted else ""), end="")
