"""Everything `decode` can decode with, as one table: the help prints it, the README holds it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from decode import PROPOSERS, TREES, VERIFIERS, Verifier

COLUMNS = ("name", "what it does", "lossless", "trees", "paper")
# Columns of a terminal: the most that are used, and the fewest at which the table can still be read.
WIDEST, NARROWEST = 100, 80
_ARXIV = re.compile(r"arXiv ([0-9.]+[0-9])")


@dataclass(frozen=True)
class MethodRow:
    """One row of the table, in the order of `COLUMNS`. trees: where it is valid; of a tree, how it is written."""

    name: str
    what: str
    lossless: str
    trees: str
    paper: str


def method_rows() -> dict[str, list[MethodRow]]:
    """Rows by the option that takes their names."""
    return {
        "--proposer": [MethodRow(name, kind.title, "", kind.trees, kind.paper) for name, kind in PROPOSERS.items()],
        "--tree": [MethodRow(name, kind.title, "", kind.syntax, kind.paper) for name, kind in TREES.items()],
        "--verifier": [
            MethodRow(name, rule.title, "yes" if rule.lossless else "NO", _trees(rule), rule.paper)
            for name, rule in VERIFIERS.items()
        ],
    }


def notes() -> list[str]:
    """What the columns cannot say."""
    copying = [name for name, kind in PROPOSERS.items() if not kind.draws]
    certain = [name for name, rule in VERIFIERS.items() if "deterministic" in rule.drawings]
    several = [name for name, rule in VERIFIERS.items() if rule.several_drafts and "with_replacement" in rule.drawings]
    return [
        "What is drafted decides the speed; whether the output keeps the target's distribution is up to the verifier.",
        f"{', '.join(copying)} go with {', '.join(certain)}.",
        f"Several drafts go with {', '.join(several)}.",
    ]


def terminal(columns: int = WIDEST) -> str:
    """The table as plain text for a terminal of that many columns; papers shrink to their arXiv numbers."""
    width = min(max(columns, NARROWEST), WIDEST)
    header = (*COLUMNS[:-1], "arXiv")
    name, lossless, paper = max(len(row.name) for part in method_rows().values() for row in part), len(header[2]), 11
    rest = width - name - lossless - paper - 2 * (len(header) - 1)
    trees = int(0.43 * rest)
    widths = (name, rest - trees, lossless, trees, paper)
    lines = _lines(header, widths)
    for option, part in method_rows().items():
        lines += ["", option]
        for row in part:
            numbers = ", ".join(_ARXIV.findall(row.paper)) or row.paper
            lines += _lines((row.name, row.what, row.lossless, row.trees, numbers), widths)
    for note in notes():
        lines += ["", *_wrap(note, width)]
    return "\n".join(lines)


def markdown() -> str:
    """The table for the README."""
    lines = [_markdown_row(COLUMNS), _markdown_row("---" for _ in COLUMNS)]
    for option, part in method_rows().items():
        lines.append(_markdown_row([f"**`{option}`**", "", "", "", ""]))
        for row in part:
            trees = f"`{row.trees}`" if option == "--tree" else row.trees
            lines.append(_markdown_row([f"`{row.name}`", row.what, row.lossless, trees, row.paper]))
    return "\n".join([*lines, "", *(f"{note}\\" for note in notes()[:-1]), notes()[-1]])


def _trees(rule: Verifier) -> str:
    if rule.chains_only:
        return "chain"
    # A tree that grows by confidence holds the most probable tokens, which not every rule may verify.
    return "any" if "deterministic" in rule.drawings else "chain, kary, static, sequoia"


def _markdown_row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _lines(texts: Iterable[str], widths: Iterable[int]) -> list[str]:
    """One row of the table on as many lines of text as its longest entry takes."""
    pairs = list(zip(texts, widths, strict=True))
    columns = [_wrap(text, width) for text, width in pairs]
    padded = [[*column, *[""] * (max(map(len, columns)) - len(column))] for column in columns]
    return [
        "  ".join(text.ljust(width) for text, (_, width) in zip(line, pairs, strict=True)).rstrip()
        for line in zip(*padded, strict=True)
    ]


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`; they end at spaces, and behind commas because tree specs have no spaces."""
    lines = [""]
    for piece in re.findall(r"[^ ,]+[ ,]*", text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
