"""Where two identities differ, and the check that all processes of a run have the same one."""

import json
import re

from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject
from draftsmith.core.ranks import from_each, on_main

_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


def agree(identity: JsonObject) -> None:
    """Raise InputError in every process, naming the first key that differs, if one has another
    identity than the main process.
    """
    main, *others = from_each(lambda: identity)

    def compare() -> None:
        for rank, other in enumerate(others, 1):
            where = f"on rank {rank}"
            if differs := difference(main, other, f"{where} it is", f"differs {where}"):
                alike = "give every process the same options, files and versions"
                raise InputError(f"{differs}; {alike}")

    on_main(compare)


def difference(
    recorded: JsonObject,
    current: JsonObject,
    now: str = "now it is",
    changed: str = "changed since",
) -> str | None:
    """The first key (dotted) in which two identities differ, with both values; None if they
    agree.

    now, changed: words before the current value, and for hashes, which say nothing.
    """
    for key in sorted(recorded.keys() | current.keys()):
        a = recorded.get(key)
        b = current.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = difference(a, b, now, changed)
            if inner is not None:
                return f"{key}.{inner}".removeprefix("config.")
        elif a != b:
            if _HASH.fullmatch(str(a)) and _HASH.fullmatch(str(b)):
                return f"{key.replace('_', ' ')} {changed}"
            return f"{key} is {_shown(a)}, {now} {_shown(b)}"
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
