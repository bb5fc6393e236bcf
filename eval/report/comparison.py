"""A comparison of two evaluations as lines for the terminal."""

import io
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from eval.compare import Compared, Comparison
from eval.report.formats import NONE, number, tree_name, with_interval

WORDS = {1: "higher", -1: "lower", 0: "no difference shown", None: "too few prompts"}
TITLES = {
    "alpha": "Expected acceptance α",
    "tau": "Tokens per target call τ",
    "speedup": "Speedup over the target alone",
}


def _method(row: Compared) -> str:
    tree, verifier = row.first["tree"], row.first["verifier"]
    return f"{tree_name(tree)} {verifier}" if tree else NONE


COLUMNS: list[tuple[str, Callable[[Compared], str]]] = [
    ("draft", lambda row: row.first["draft"]),
    ("set", lambda row: f"{row.first['domain']} ({row.first['kind'].upper()})"),
    ("T", lambda row: f"{row.first['temperature']:g}"),
    ("method", _method),
    ("first", lambda row: number(row.first["value"])),
    ("second", lambda row: number(row.second["value"])),
    ("second - first [95 %]", lambda row: with_interval(row.difference, sign=True)),
    ("over", lambda row: f"{row.shared} shared prompts" if row.paired else "each one's own prompts"),
    ("", lambda row: WORDS[row.sign]),
]


def comparison_lines(comparison: Comparison) -> list[str]:
    """Remarks, then a table for each figure, as wide as its text."""
    lines = [f"remark: {text}" for text in comparison.remarks]
    for figure, title in TITLES.items():
        rows = [row for row in comparison.rows if row.figure == figure]
        columns = [(name, say) for name, say in COLUMNS if name != "method" or figure != "alpha"]
        if rows:
            table = Table(*(name for name, _ in columns), title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*(say(row) for _, say in columns))
            text = io.StringIO()
            Console(file=text, width=240).print(table)
            lines += ["", *(line.rstrip() for line in text.getvalue().splitlines())]
    clear = "Higher and lower hold at 95 % under Holm's correction over the rows of a table."
    return [*lines, "", clear]
