"""`draftsmith init`."""

import dataclasses

from draftsmith.cli.output import finish
from draftsmith.starting.config import InitConfig
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process


def run(argv: list[str]) -> None:
    """Make a draft to start from, and say what it is worth before any training."""
    config, as_json = parse(InitConfig, "init", argv)
    require_single_process("init")
    from draftsmith.starting.init import init

    made = init(config)
    lines = [*made.lines(config.temperature), f"draft:  {made.out}"]
    finish(dataclasses.asdict(made), lines, as_json)
