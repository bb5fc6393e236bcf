"""Text on the terminal while it is decoded: drafted tokens stand out from those of the target."""

import unicodedata
from typing import TextIO

from rich.console import Console
from rich.text import Text

from draftsmith.pair import Detokenizer, Piece
from draftsmith_core.tokenization import Tokenizer

DRAFT_STYLE = "bold green"


class Stream:
    """Write tokens as text, with drafted tokens in colour on a terminal."""

    def __init__(self, tokenizer: Tokenizer, file: TextIO) -> None:
        self._text = Detokenizer(tokenizer)
        self._file = file
        self._console = Console(file=file, highlight=False, soft_wrap=True)

    def add(self, ids: list[int], from_draft: list[bool]) -> None:
        """Show the tokens of one step."""
        for piece in self._text.add(ids, from_draft):
            self._show(piece)

    def close(self) -> None:
        """Show the rest, end the line, and explain the colour."""
        self._show(self._text.rest())
        self._console.print()
        if self._console.is_terminal:
            legend = Text("drafted", style=DRAFT_STYLE)
            legend.append(" / from the target itself", style="not bold default")
            self._console.print(legend)

    def _show(self, piece: Piece) -> None:
        if not self._console.is_terminal:
            self._file.write(piece)
            self._file.flush()
            return
        # What a model writes must not steer the terminal (escape sequences).
        text = "".join(c for c in piece if c in "\n\t" or unicodedata.category(c) != "Cc")
        self._console.print(Text(text, style=DRAFT_STYLE if piece.from_draft else ""), end="")
