"""`draftsmith --print_shtab SHELL`: completion of commands and options, as jsonargparse makes it through shtab."""

import importlib
from typing import Any

from draftsmith_core.errors import InputError
from draftsmith_core.packages import require_package

SHELLS = ("bash", "zsh", "tcsh")
# The dataclass with the options of each command, as module:name. The documentation site reads it too.
CONFIGS = {
    "demo": "draftsmith.cli.demo:DemoConfig",
    "align": "draftsmith.alignment.config:AlignConfig",
    "init": "draftsmith.starting.config:InitConfig",
    "distill": "distill.config:DistillConfig",
    "train": "train.config:TrainConfig",
    "merge": "drafts.merge_config:MergeConfig",
    "decode": "draftsmith.cli.decode_options:DecodeConfig",
    "eval": "eval.config:EvalConfig",
    "doctor": "drafts.doctor_config:DoctorConfig",
    "export": "drafts.layouts.config:ExportConfig",
    "plan": "eval.config:PlanConfig",
}


def options_of(command: str) -> type:
    """The options dataclass of a command."""
    module, _, name = CONFIGS[command].partition(":")
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
    for name in CONFIGS:
        options: Any = ArgumentParser(prog=f"draftsmith {name}", description=COMMANDS[name][1])
        options.add_argument("--config", action="config")
        options.add_argument("--json", action="store_true")
        options.add_class_arguments(options_of(name))
        commands.add_subcommand(name, options, help=COMMANDS[name][1])
    print(parser.get_completion_script(f"shtab-{argv[0]}"))
