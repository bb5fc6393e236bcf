"""Everything `decode` can decode with, as one table: the help prints it, the README holds it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from decode import PROPOSERS, TREES, VERIFIERS, Verifier

COLUMNS = ("name", "what it does", "lossless", "trees", "paper")
# In a terminal: the widest a line may be, and the least that still reads.
WIDEST, NARROWEST = 100, 80
_ARXIV = re.compile(r"arXiv ([0-9.]+[0-9])")


@dataclass(frozen=True)
class Way:
    """One line of the table, in the order of `COLUMNS`. `trees` is where it is valid; of a tree, how it is written."""

    name: str
    what: str
    lossless: str
    trees: str
    paper: str


def ways() -> dict[str, list[Way]]:
    """The lines by the option that takes their name."""
    return {
        "--proposer": [Way(name, kind.title, "", kind.trees, kind.paper) for name, kind in PROPOSERS.items()],
        "--tree": [Way(name, kind.title, "", kind.syntax, kind.paper) for name, kind in TREES.items()],
        "--verifier": [
            Way(name, rule.title, "yes" if rule.lossless else "NO", _trees(rule), rule.paper)
            for name, rule in VERIFIERS.items()
        ],
    }


def copying() -> list[str]:
    """Proposers that draw nothing: what they draft follows from the text alone."""
    return [name for name, kind in PROPOSERS.items() if kind.needs in ("nothing", "index")]


def notes() -> list[str]:
    """What the columns cannot say."""
    certain = [name for name, rule in VERIFIERS.items() if "deterministic" in rule.drawings]
    several = [name for name, rule in VERIFIERS.items() if rule.several_drafts and "with_replacement" in rule.drawings]
    return [
        "What is drafted decides the speed; whether the output keeps the target's law is up to the verifier.",
        f"{', '.join(copying())} go with {', '.join(certain)}.",
        f"Several drafts go with {', '.join(several)}.",
    ]


def terminal(columns: int = WIDEST) -> str:
    """The table as plain text for a terminal of that many columns; papers shrink to their arXiv numbers."""
    width = min(max(columns, NARROWEST), WIDEST)
    header = (*COLUMNS[:-1], "arXiv")
    name, lossless, paper = max(len(way.name) for part in ways().values() for way in part), len(header[2]), 11
    rest = width - name - lossless - paper - 2 * (len(header) - 1)
    trees = int(0.43 * rest)
    widths = (name, rest - trees, lossless, trees, paper)
    lines = _lines(header, widths)
    for option, part in ways().items():
        lines += ["", option]
        for way in part:
            numbers = ", ".join(_ARXIV.findall(way.paper)) or way.paper
            lines += _lines((way.name, way.what, way.lossless, way.trees, numbers), widths)
    for note in notes():
        lines += ["", *_wrap(note, width)]
    return "\n".join(lines)


def markdown() -> str:
    """The table for the README."""
    lines = [_row(COLUMNS), _row("---" for _ in COLUMNS)]
    for option, part in ways().items():
        lines.append(_row([f"**`{option}`**", "", "", "", ""]))
        for way in part:
            trees = f"`{way.trees}`" if option == "--tree" else way.trees
            lines.append(_row([f"`{way.name}`", way.what, way.lossless, trees, way.paper]))
    return "\n".join([*lines, "", *(f"{note}\\" for note in notes()[:-1]), notes()[-1]])


def _trees(rule: Verifier) -> str:
    if rule.chains_only:
        return "chain"
    # A tree that grows by confidence takes the most probable tokens; not every rule is valid for them.
    return "any" if "deterministic" in rule.drawings else "chain, kary, static, sequoia"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(cells: Iterable[str], widths: Iterable[int]) -> list[str]:
    """One line of the table on as many lines of text as its longest cell takes."""
    pairs = list(zip(cells, widths, strict=True))
    columns = [_wrap(cell, width) for cell, width in pairs]
    padded = [[*column, *[""] * (max(map(len, columns)) - len(column))] for column in columns]
    texts = zip(*padded, strict=True)
    return [
        "  ".join(text.ljust(width) for text, (_, width) in zip(line, pairs, strict=True)).rstrip() for line in texts
    ]


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`; they end at spaces, and behind commas because tree specs have no spaces."""
    lines = [""]
    for piece in re.findall(r"[^ ,]+[ ,]*", text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
