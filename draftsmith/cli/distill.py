"""`draftsmith distill`."""

from distill.config import DistillConfig
from draftsmith.cli.output import command_line, finish
from draftsmith_core.options import parse


def run(argv: list[str]) -> None:
    """Make a distilled set."""
    config, as_json = parse(DistillConfig, "distill", argv)
    # Only now: these import torch, which takes seconds, and a mistyped option need not wait for it.
    from distill.generate import distill
    from draftsmith_core.processes import is_main

    summary = distill(config, command_line("distill", argv))
    lines = [
        f"{summary['out']}: {summary['rows']} rows, {summary['response_tokens']} response tokens; "
        f"of {summary['prompts_read']} prompts {summary['prompts_done']} done, "
        f"{summary['prompts_skipped']} skipped, {summary['prompts_failed']} failed",
        *summary["skipped_because"],
        *summary["failed_because"],
        *summary["shortened_because"],
    ]
    if differing := summary["tokens_from"].get("text_differs"):
        lines.append(
            f"{differing} rows came as text that cannot be turned back into the tokens that the target drew; "
            f"their `tokens_from` is text_differs"
        )
    if summary["sampling_from_target"]:
        lines.append(f"sampling: {summary['sampling_from_target']}")
    if is_main():
        finish(summary, lines, as_json)
