"""The table of methods of `decode`; tests/method_page.py prints it for the documentation."""

import textwrap
from typing import NamedTuple

from draftsmith.decode import PROPOSERS, TREES, VERIFIERS


class MethodRow(NamedTuple):
    """One row of the table. trees: trees that it is valid for; of a tree, its syntax."""

    name: str
    what: str
    lossless: str
    trees: str
    paper: str


def method_rows() -> dict[str, list[MethodRow]]:
    """Return the rows by option."""
    rules = []
    for name, rule in VERIFIERS.items():
        # Grown trees hold the most probable tokens, which only some rules may verify.
        trees = "any" if "deterministic" in rule.drawings else "chain, kary, static"
        trees = "chain" if rule.chains_only else trees
        lossless = "yes" if rule.lossless else "NO"
        rules.append(MethodRow(name, rule.title, lossless, trees, rule.paper))
    return {
        "--proposer": [
            MethodRow(name, kind.title, "", kind.trees, kind.paper)
            for name, kind in PROPOSERS.items()
        ],
        "--tree": [
            MethodRow(name, kind.title, "", kind.syntax, kind.paper) for name, kind in TREES.items()
        ],
        "--verifier": rules,
    }


def notes() -> list[str]:
    """Return the sentences below the table."""
    copying = [name for name, kind in PROPOSERS.items() if not kind.draws]
    certain = [name for name, rule in VERIFIERS.items() if "deterministic" in rule.drawings]
    several = [
        name
        for name, rule in VERIFIERS.items()
        if rule.several_drafts and "with_replacement" in rule.drawings
    ]
    return [
        "The proposer decides the speed; the verifier decides whether the output keeps the "
        "target's distribution.",
        f"{', '.join(copying)} go with {', '.join(certain)}.",
        f"Several drafts go with {', '.join(several)}.",
    ]


def terminal(columns: int = 100) -> str:
    """Return the table as text, 80 to 100 columns wide."""
    width = min(max(columns, 80), 100)
    indent = " " * 20
    lines = []
    for option, rows in method_rows().items():
        lines.append(option)
        for name, what, _, trees, paper in rows:
            shape = trees if option == "--tree" else f"trees: {trees}"
            text = f"  {name:18}{what}; {shape}; {paper}"
            lines += textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    for note in notes():
        lines += ["", *textwrap.wrap(note, width)]
    return "\n".join(lines)
