"""Reading the values of a head's config.json, and writing what every head writes."""

from collections.abc import Mapping
from typing import Any, TypeVar

from draftsmith_core.errors import InputError

T = TypeVar("T", int, float, str, bool, dict[str, Any], list[Any])


def setting(values: Mapping[str, Any], key: str, kind: type[T], where: str, default: T | None = None) -> T:
    """`values[key]` as a `kind`; `default` where it is absent or null. InputError, one line, names file and key."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise InputError(f"{where}: lacks the key '{key}'; add it, it must be of type {kind.__name__}")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{where}: '{key}' is {value!r}; it must be of type {kind.__name__}")
    found: T = value
    return found


def count(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number of at least one."""
    value = setting(values, key, int, where, default)
    if value < 1:
        raise InputError(f"{where}: '{key}' is {value}; it must be at least 1")
    return value


def check_equal(where: str, key: str, here: int, target: int) -> None:
    """InputError unless a head's size is its target's."""
    if here != target:
        raise InputError(f"{where}: '{key}' is {here} and the target's is {target}; use the target it was trained for")
