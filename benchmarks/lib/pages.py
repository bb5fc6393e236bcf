"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from itertools import product

from draftsmith.eval.formats import NONE, Figure, with_interval


def table(heading: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(heading)
    lines = [" | ".join(row) for row in (heading, rule, *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def by_temperature(columns: Sequence[str], temperatures: Sequence[float]) -> list[str]:
    """Headings of the same columns at one temperature after another."""
    return [f"{column}, T = {at:g}" for at, column in product(temperatures, columns)]


def gap(change: Figure | None, *, clear: bool = False) -> str:
    """A difference with its interval, bold if it is `clear` of zero; empty without a difference."""
    text = with_interval(change, sign=True)
    return "" if text == NONE else f"**{text}**" if clear else text
