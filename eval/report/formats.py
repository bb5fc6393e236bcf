"""Write figures as text: numbers, shares, intervals, bytes, names of trees; and the words of a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from eval.schema import SuiteKind

# The sentences, captions and notes of a report.
WORDS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "templates" / "words.yaml").read_text(encoding="utf-8"))
MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"
KIND_TITLES: dict[SuiteKind, str] = {"id": "In distribution", "ood": "Out of distribution"}
Figure = Mapping[str, Any]


def number(value: float | None, digits: int = 3) -> str:
    """A number; an en dash if there is none. Zero has no sign."""
    if value is None:
        return NONE
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 and float(text) > 0 else text


def percent(value: float | None) -> str:
    """A share of 1 in whole per cent."""
    return NONE if value is None else f"{number(value * 100, 0)} %"


def points(gain: Figure | None, *, bare: bool = False) -> str:
    """A difference of shares in percentage points, +4.2 points; `bare` drops the sign."""
    if gain is None or gain["value"] is None:
        return NONE
    return f"{number(abs(gain['value']) * 100, 1) if bare else signed(gain['value'] * 100, 1)} points"


def interval(figure: Figure, digits: int, *, scale: float = 1.0, sign: bool = False) -> str:
    """The interval alone, [0.120, 0.190]; empty if there is none."""
    if figure["low"] is None or figure["high"] is None:
        return ""
    write = signed if sign else number
    return f"[{write(figure['low'] * scale, digits)}, {write(figure['high'] * scale, digits)}]"


def with_interval(figure: Figure | None, digits: int = 3, *, sign: bool = False) -> str:
    """A figure and its interval."""
    if figure is None:
        return NONE
    write = signed if sign else number
    return f"{write(figure['value'], digits)} {interval(figure, digits, sign=sign)}".strip()


def memory(value: int) -> str:
    """Bytes in decimal units."""
    size, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def tree_name(spec: str) -> str:
    """A tree spec; a tree from a file goes by the name of the file, without its directory."""
    kind, colon, body = spec.partition(":")
    return f"{kind}:{Path(body).name}" if kind in ("static", "sequoia", "auto") and colon else spec


def shortened(text: str, longest: int) -> str:
    """A name cut in its middle to fit a figure."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"
