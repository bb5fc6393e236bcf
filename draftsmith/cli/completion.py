"""`draftsmith --print_shtab SHELL`: completion of commands and options, as jsonargparse makes it through shtab."""

import importlib
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.packages import require_package

SHELLS = ("bash", "zsh", "tcsh")


def options_of(command: str) -> type:
    """The options dataclass of a command."""
    from draftsmith.__main__ import COMMANDS

    module, _, name = COMMANDS[command][1].partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def run(argv: list[str]) -> None:
    """Print a completion script for a shell."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise InputError(f'expected one of {", ".join(SHELLS)}, such as: eval "$(draftsmith --print_shtab bash)"')
    require_package("shtab", "--print_shtab")
    from jsonargparse import ArgumentParser

    from draftsmith.__main__ import COMMANDS

    parser = ArgumentParser(prog="draftsmith")
    commands = parser.add_subcommands()
    for name, (what, _) in COMMANDS.items():
        options: Any = ArgumentParser(prog=f"draftsmith {name}", description=what)
        options.add_argument("--config", action="config")
        options.add_argument("--json", action="store_true")
        options.add_class_arguments(options_of(name))
        commands.add_subcommand(name, options, help=what)
    print(parser.get_completion_script(f"shtab-{argv[0]}"))
