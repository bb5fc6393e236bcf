"""`draftsmith align`."""

from draftsmith.alignment.config import AlignConfig
from draftsmith.cli.output import finish
from draftsmith_core.options import parse


def run(argv: list[str]) -> None:
    """Align a draft with a target, and say what that bought."""
    config, as_json = parse(AlignConfig, "align", argv)
    from rich.console import Console

    from draftsmith.alignment import outcome
    from draftsmith.alignment.stages import align, settled
    from draftsmith_core.processes import is_main

    results = align(config)
    if is_main():
        config = settled(config)
        Console().print(outcome.table(results))
        finish(outcome.summary(config, results), outcome.lines(config, results), as_json)
