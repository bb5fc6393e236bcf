"""`draftsmith --print_shtab SHELL`: completion of commands and options, made by shtab."""

import argparse
import importlib

from draftsmith_core.errors import InputError
from draftsmith_core.options import parser
from draftsmith_core.packages import require_package

SHELLS = ("bash", "zsh", "tcsh")


def config_of(command: str) -> type:
    """The options dataclass of a command."""
    from draftsmith.__main__ import COMMANDS

    module, _, name = COMMANDS[command][1].partition(":")
    config: type = getattr(importlib.import_module(module), name)
    return config


def run(argv: list[str]) -> None:
    """Print a completion script for a shell."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise InputError(f'expected one of {", ".join(SHELLS)}, such as: eval "$(draftsmith --print_shtab bash)"')
    require_package("shtab", "--print_shtab")
    import shtab

    from draftsmith.__main__ import COMMANDS

    whole = argparse.ArgumentParser(prog="draftsmith")
    commands = whole.add_subparsers()
    for name, (what, _) in COMMANDS.items():
        commands.add_parser(name, help=what, parents=[parser(config_of(name), name)], add_help=False)
    print(shtab.complete(whole, argv[0]))
