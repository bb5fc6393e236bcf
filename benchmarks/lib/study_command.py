"""A study as a command: options from the command line, errors in one line."""

import sys
from collections.abc import Callable
from typing import TypeVar

from draftsmith.core.command_line import parse
from draftsmith.core.errors import InputError, RunError

_Options = TypeVar("_Options")


def main(options: type[_Options], command: str, run: Callable[[_Options], object]) -> None:
    """Read the options of `command` and run it."""
    try:
        given, _ = parse(options, command, sys.argv[1:])
        run(given)
    except (InputError, RunError) as error:
        sys.exit(f"{command}: {error}")
