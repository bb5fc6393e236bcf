"""`draftsmith align`."""

from draftsmith.alignment.config import AlignConfig
from draftsmith.alignment.rounds_config import AdaptConfig
from draftsmith.cli.output import finish
from draftsmith_core.options import parse, typed


def run(argv: list[str]) -> None:
    """Align a draft with a target, and say what that bought; or one round of adaptation to a log."""
    if typed(argv) & {"from_log", "rollback"}:
        return _adapt(argv)
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


def _adapt(argv: list[str]) -> None:
    config, as_json = parse(AdaptConfig, "align", argv)
    from draftsmith.alignment.rounds import adapt

    found = adapt(config)
    done = "promoted" if found["promoted"] else "not promoted"
    finish(found, [f"{found['draft']}: round {found['round']}: {done}", *found["because"]], as_json)
