"""Checks of options that many commands share: the types that Python gave them, where no parser has looked, and the
bounds that they lie in. Needs no torch.
"""

import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from draftsmith_core.errors import InputError

_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def check_types(config: Any, section: str = "") -> None:
    """InputError, naming the key, where a field of a config holds another type than it declares.

    What only looks different is put right in place: a path becomes its text, a tuple a list, an integer of numpy an
    int. section: what the keys of a config within a config begin with, such as `optim.`.
    """
    for key, wanted in get_type_hints(type(config)).items():
        given = getattr(config, key)
        value = _plain(given)
        if not _fits(value, wanted):
            raise InputError(f"{section}{key}: expected {_in_words(wanted)}, got {given!r}")
        check_utf8(f"{section}{key}", _texts(value))
        if key == "out" and isinstance(value, str) and not value.strip():
            raise InputError(f"--out {value!r}: is empty; name where to write")
        if key == "out" and isinstance(value, str) and value.startswith("~"):
            # Python's own files would lie in a directory named ~, Parquet's in the home directory.
            raise InputError(f"--out {value}: the shell has not expanded ~; write a space before it, or the whole path")
        if is_dataclass(value):
            check_types(value, f"{section}{key}.")
        elif value is not given:
            object.__setattr__(config, key, value)  # the configs are frozen


def check_utf8(key: str, texts: Iterable[str]) -> None:
    """InputError where a text has surrogates, which Python makes of other bytes and no file of ours could hold."""
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        raise InputError(f"{key}: holds what is not UTF-8; write it in UTF-8, and rename what it names")


def check_least(config: object, least: int, *keys: str) -> None:
    """InputError for the first of these options that is given and below `least` or infinite."""
    check_range(config, f"[{least}, inf)", *keys)


def check_range(config: object, interval: str, *keys: str) -> None:
    """InputError for the first of these options (dotted where grouped) that is given and outside of an interval, which
    is written as in mathematics: `[0, 1)` is at least 0 and below 1.
    """
    low, high = map(float, interval[1:-1].split(","))
    above, below = interval[0] == "(", interval[-1] == ")"
    for key in keys:
        value = operator.attrgetter(key)(config)
        if value is None or (low <= value <= high and not (above and value == low) and not (below and value == high)):
            continue
        most = "" if high == math.inf else f" and {'below' if below else 'at most'} {high:g}"
        raise InputError(f"{key}: {value} must be {'above' if above else 'at least'} {low:g}{most}")


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        plain = [_plain(each) for each in value]
        return value if isinstance(value, list) and all(map(operator.is_, plain, value)) else plain
    return value


def _fits(value: Any, wanted: Any) -> bool:
    kind, parts = get_origin(wanted), get_args(wanted)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if wanted in (int, float):
        return isinstance(value, Real if wanted is float else int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _in_words(wanted: Any) -> str:
    kind, parts = get_origin(wanted), get_args(wanted)
    if kind in (Union, UnionType):
        return " or ".join(_in_words(part) for part in parts)
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if kind is list:
        return f"a list of {_in_words(parts[0]).removeprefix('a ')}s"
    return _WORDS.get(wanted, f"a {getattr(wanted, '__name__', wanted)}")
