"""How every command ends its standard output."""

import json
import shlex
import sys
from typing import Any

from draftsmith_core.processes import is_main


def command_line(name: str, argv: list[str]) -> str:
    """The command as it was typed, for the record."""
    return shlex.join(["draftsmith", name, *argv])


def finish(summary: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """Print what a person wants to read, then the summary as one JSON line when it was asked for; of several processes
    the main one does.
    """
    if not is_main():
        return
    for line in lines:
        print(line)
    if as_json:
        print(json.dumps(summary))
    sys.stdout.flush()
