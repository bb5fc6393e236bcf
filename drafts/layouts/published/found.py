"""A published draft as it was found on disk, and what a layout is: how it is known, and its reader into our own."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

# The names of all tensors, read when they are first asked for: of a pickle that can mean the whole file.
Names = Callable[[], Set[str]]


def architectures(values: Mapping[str, Any]) -> list[str]:
    """The names under `architectures` in a config.json, which may lack it or hold anything."""
    found = values.get("architectures") or []
    return [str(name) for name in (found if isinstance(found, list) else [found])]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Config and tensors of a head. `lm_head_VH` is its target's output projection."""

    config_file: str
    tensor_file: Path
    values: dict[str, Any]
    tensors: dict[str, Tensor]
    lm_head_VH: Tensor


@dataclass(frozen=True)
class Layout:
    """One layout: whose it is, what kind of head it holds, how it is known, and its reader.

    `known` is asked with the values of config.json, and asks for the names of the tensors where those do not tell.
    `read` returns what our own layout of that kind holds; InputError, one line, for a variant that cannot be run.
    A config with `speculators_model_type` is shown only to layouts of that `speculators_type`.
    """

    title: str
    kind: str
    known: Callable[[Mapping[str, Any], Names], bool]
    read: Callable[[Found], Found]
    speculators_type: str | None = None
