"""`draftsmith merge`."""

from drafts.config import MergeConfig
from draftsmith.cli.output import command_line, finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process


def run(argv: list[str]) -> None:
    """Write the sum of drafts as a draft."""
    config, as_json = parse(MergeConfig, "merge", argv)
    require_single_process("merge")
    from drafts.merge import merge

    summary = merge(config, command_line("merge", argv))
    of = " + ".join(f"{weight:g} x {source}" for source, weight in summary["weights"].items())
    rest = 1 - sum(summary["weights"].values())
    base = f" + {rest:g} x {config.base}" if config.base is not None else ""
    finish(summary, [f"{summary['checkpoint']}: {of}{base}"], as_json)
