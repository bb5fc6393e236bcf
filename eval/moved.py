"""Find the files of an evaluation again: from another working directory, or after a move."""

import os
import re

from draftsmith.core.io import JsonObject

# What stands before the path in an option: a name, a suite, a kind of tree.
_BEFORE = re.compile(r"(?:[^=/]*=)?(?:@[\w-]+:|static:|auto:|retrieval:|prompt_lookup\+)?")


def found_again(options: JsonObject, directory: str) -> JsonObject:
    """Return the options with `directory` as OUT and with local paths as seen from it.

    A path that lies to `directory` as it lay to OUT is taken; the others stay as they are.
    """
    out = options["out"]
    found = options | {"out": directory, "target": path_now(options["target"], out, directory)}
    for key in ("draft", "id", "ood", "tree"):
        found[key] = [path_now(value, out, directory) for value in options[key]]
    return found


def path_now(value: str, out: str, directory: str) -> str:
    """Return a path of a run that was begun in `out` and is now in `directory`; `found_again` has
    the rule.
    """
    before = _BEFORE.match(value)
    name = before[0] if before else ""
    path = value.removeprefix(name)
    if not path or os.path.isabs(path) != os.path.isabs(out):
        return value
    moved = os.path.normpath(os.path.join(directory, os.path.relpath(path, out)))
    return name + moved if os.path.exists(moved) else value
