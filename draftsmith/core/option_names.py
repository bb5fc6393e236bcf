"""Which option somebody means who types a name that no option has: a name of another tool, or a
typing error.
"""

import difflib
from collections.abc import Sequence
from functools import cache

from draftsmith.core.io import read_words

# How alike an unknown name and the suggested one are.
_ALIKE = 0.7
# Characters of a name that is compared: comparing takes time by the square of it.
_LONGEST = 100


@cache
def meant() -> dict[str, list[str]]:
    """Our names, the likeliest first, for each name that other tools give an option."""
    ours_of = {}
    for ours, theirs in read_words(__file__).items():
        ours_of.update(dict.fromkeys(theirs.split(), ours.split()))
    return ours_of


def nearest_option(key: str, known: Sequence[str], dashes: str = "") -> str | None:
    """Return the known dotted keys nearest to an unknown one, each after `dashes`, in words; None
    if none is near.

    A name of another tool stands for its meaning. Otherwise the spelling decides.
    """
    return " or ".join(f"{dashes}{name}" for name in _nearest_options(key, known)) or None


def _nearest_options(key: str, known: Sequence[str]) -> list[str]:
    # `lrr` means `optim.lr`: the part behind the dot is what people remember.
    last = _last(key).lower()
    if same := [name for name in known if _last(name) == last]:
        return difflib.get_close_matches(key, same, n=1) if "." in key else same
    for ours in meant().get(last, ()):
        key, _, _ = ours.partition("=")
        if key in known:
            return [ours]
        if inner := [name for name in known if name.endswith(f".{key}")]:
            return inner
    if last in meant() or len(key) > _LONGEST:
        return []
    near = difflib.get_close_matches(last, [_last(name) for name in known], n=1, cutoff=_ALIKE)
    if near:
        return [name for name in known if _last(name) == near[0]]
    return difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
