"""Drafts as options name them: models, methods without weights, and prompt lookup beside a model.

Needs no torch.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from draftsmith.core.errors import InputError

# Before the name of a model: prompt lookup beside it.
JOINED = "prompt_lookup+"
# The draft that is the target's own MTP layer; `mtp:CHECKPOINT` is that of another checkpoint.
NATIVE = "mtp"
# How a source of drafts names a method without weights, unless a directory has the name.
WEIGHTLESS = {
    "prompt_lookup": "prompt_lookup",
    "lookahead": "lookahead",
    "retrieval": "retrieval:FILE",
}
# How alike a misspelt name is, from 0 to 1.
_ALIKE = 0.8


def is_copying(source: str) -> bool:
    """Whether the source of a draft names a method without weights."""
    kind, _, file = source.partition(":")
    named = kind in WEIGHTLESS and bool(file) == (kind == "retrieval")
    return named and not Path(source).is_dir()


def is_lookahead(source: str) -> bool:
    """Whether the source of a draft is lookahead, whose tree is its own and whose alpha is not
    defined: what it proposes also depends on the steps before.
    """
    return source == "lookahead" and is_copying(source)


def near_weightless(source: str) -> str | None:
    """Return the method without weights that a source is or nearly is; None if it is none, or a
    path.
    """
    name = re.split("[:+]", source)[0]
    near = [] if Path(source).exists() else get_close_matches(name, WEIGHTLESS, 1, _ALIKE)
    return near[0] if near else None


def check_sources(sources: Iterable[str]) -> None:
    """Raise InputError for a misspelt method without weights, else taken for a hub name."""
    for source in sources:
        near = None if copies_first(source) else near_weightless(source)
        if near is not None:
            raise InputError(
                f"--draft {source}: no such directory; did you mean {WEIGHTLESS[near]}?"
            )


def is_joined(source: str) -> bool:
    """Whether the source is `prompt_lookup+MODEL`: lookup beside a draft."""
    return source.startswith(JOINED) and source != JOINED and not Path(source).is_dir()


def model_of(source: str) -> str:
    """The model that a source names, without the lookup before it."""
    return source.removeprefix(JOINED) if is_joined(source) else source


def copies_first(source: str) -> bool:
    """Whether a draft copies from the text, alone or before a model drafts."""
    return is_copying(source) or is_joined(source)


def models_of(drafts: Mapping[str, str]) -> dict[str, str]:
    """Return the models to load for some sources of drafts, by name.

    The model of a joined draft is loaded under the joined name only if no other draft is that
    model.
    """
    models = {name: source for name, source in drafts.items() if not copies_first(source)}
    for name, source in drafts.items():
        model = source.removeprefix(JOINED)
        if is_joined(source) and model not in models.values():
            models[name] = model
    return models
