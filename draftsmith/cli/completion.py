"""`draftsmith --print_shtab SHELL`: completion of commands and options, as jsonargparse makes it through shtab."""

import importlib
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.packages import require_package

SHELLS = ("bash", "zsh", "tcsh")
# The options of each command: (module, name). `draftsmith --help` says what the commands do.
CONFIGS = {
    "demo": ("draftsmith.cli.demo", "DemoConfig"),
    "align": ("draftsmith.alignment.config", "AlignConfig"),
    "distill": ("distill.config", "DistillConfig"),
    "train": ("train.config", "TrainConfig"),
    "decode": ("draftsmith.cli.decode_options", "DecodeConfig"),
    "eval": ("eval.config", "EvalConfig"),
}


def run(argv: list[str]) -> None:
    """Print a completion script for a shell."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise InputError(f'expected one of {", ".join(SHELLS)}, such as: eval "$(draftsmith --print_shtab bash)"')
    require_package("shtab", "--print_shtab")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="draftsmith")
    commands = parser.add_subcommands()
    for name, (module, config) in CONFIGS.items():
        options: Any = ArgumentParser(prog=f"draftsmith {name}")
        options.add_argument("--config", action="config")
        options.add_argument("--json", action="store_true")
        options.add_class_arguments(getattr(importlib.import_module(module), config))
        commands.add_subcommand(name, options)
    parser.parse_args([f"--print_shtab={argv[0]}"])
