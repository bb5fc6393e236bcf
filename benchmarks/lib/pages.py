"""Tables in Markdown, and pages that hold them between two markers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.core.errors import InputError
from draftsmith.eval.report.formats import NONE, with_interval


def table(heading: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows))


def gap(change: Mapping[str, Any] | None, *, clear: bool = False) -> str:
    """A difference with its interval, bold if it is `clear` of zero; empty without a difference."""
    text = with_interval(change, sign=True)
    return "" if text == NONE else f"**{text}**" if clear else text


def put(page: Path, markers: tuple[str, str], text: str) -> None:
    """Replace what stands between the markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise InputError(f"{page}: has no lines '{markers[0]}' and '{markers[1]}' for the table")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
