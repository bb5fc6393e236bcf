"""Write figures as text: numbers, shares, intervals, bytes, names of trees."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.schema import SuiteKind

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
KIND_TITLES: dict[SuiteKind, str] = {"id": "in distribution", "ood": "out of distribution"}
Figure = Mapping[str, Any]


def listed(words: Sequence[str]) -> str:
    """Words with commas and "and" between them."""
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A number, with a plus if `sign`; an en dash if there is none. Zero has no sign."""
    if value is None:
        return NONE
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", MINUS)


def times(speedup: float | None, rough: bool) -> str:
    """A speedup. rough: timed on a busy machine."""
    return f"~{number(speedup, 1)}" if rough else number(speedup, 2)


def with_interval(
    figure: Figure | None, digits: int = 3, *, sign: bool = False, scale: float = 1.0
) -> str:
    """A figure and its interval, 0.15 [0.12, 0.19]."""
    if figure is None or figure["value"] is None:
        return NONE
    value = number(figure["value"] * scale, digits, sign=sign)
    if figure["low"] is None or figure["high"] is None:
        return value
    low = number(figure["low"] * scale, digits, sign=sign)
    return f"{value} [{low}, {number(figure['high'] * scale, digits, sign=sign)}]"


def with_seeds(figure: Figure | None, digits: int = 3, *, sign: bool = False) -> str:
    """A figure, its interval and its spread, 0.15 [0.12, 0.19], 3 seeds 0.14 to 0.17."""
    text = with_interval(figure, digits, sign=sign)
    if figure is None or figure["seeds"] is None:
        return text
    low = number(figure["seed_low"], digits, sign=sign)
    high = number(figure["seed_high"], digits, sign=sign)
    # One seed is compared with several of the base.
    seeds = "1 seed" if figure["seeds"] == 1 else f"{figure['seeds']} seeds"
    return f"{text}, {seeds} {low} to {high}"


def memory(value: int) -> str:
    """Bytes in decimal units."""
    size = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


def named_set(row: Figure) -> str:
    """A prompt set with its kind, or all of a kind."""
    kind = row["kind"].upper()
    return f"all {kind}" if row["set"] is None else f"{row['set']} ({kind})"


def tree_name(spec: str) -> str:
    """A tree spec; a tree from a file goes by the name of the file, without its directory."""
    kind, colon, body = spec.partition(":")
    return f"{kind}:{Path(body).name}" if kind in ("static", "auto") and colon else spec


def shortened(text: str, longest: int) -> str:
    """A name cut in its middle to fit a figure."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def text_table(title: str, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows of equal keys as lines for the terminal, as wide as their text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*row.values())
    text = io.StringIO()
    Console(file=text, width=240).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
