"""`draftsmith distill`."""

from dataclasses import dataclass

from distill.config import DistillConfig
from distill.score_config import ScoreConfig
from draftsmith.cli.output import command_line, finish
from draftsmith_core.options import parse, typed
from draftsmith_core.processes import require_single_process


@dataclass(frozen=True, kw_only=True)
class StatsConfig:
    """Draw a distilled set as a page."""

    stats: str
    """The directory of a finished set; the page is its stats.html."""


def run(argv: list[str]) -> None:
    """Make a distilled set; or add the target's distributions to one, or draw one."""
    for key, instead in (("stats", _stats), ("score", _score)):
        if key in typed(argv):
            return instead(argv)
    _distill(argv)


def _distill(argv: list[str]) -> None:
    config, as_json = parse(DistillConfig, "distill", argv)
    from distill.generate import distill

    summary = distill(config, command_line("distill", argv))
    lines = [
        f"{summary['out']}: {summary['rows']} rows, {summary['response_tokens']} response tokens; "
        f"of {summary['prompts_read']} prompts {summary['prompts_done']} done, "
        f"{summary['prompts_skipped']} skipped, {summary['prompts_failed']} failed",
        *summary["skipped_because"],
        *summary["failed_because"],
        *summary["shortened_because"],
        *summary["dropped_because"],
    ]
    if differing := summary["tokens_from"].get("text_differs"):
        lines.append(
            f"{differing} rows came as text that cannot be turned back into the tokens that the target drew; "
            f"their `tokens_from` is text_differs"
        )
    if own := summary["own_prompts"]:
        drawn = f"prompts: of {own['drawn']} texts that the target drew {own['kept']} are prompts"
        lines += [drawn, *own["left_out_because"]]
    if summary["sampling_from_target"]:
        lines.append(f"sampling: {summary['sampling_from_target']}")
    finish(summary, lines, as_json)


def _score(argv: list[str]) -> None:
    config, as_json = parse(ScoreConfig, "distill", argv)
    from distill.score_set import score_set

    summary = score_set(config, command_line("distill", argv))
    lines = [
        f"{summary['out']}: {summary['rows']} of {summary['prompts_read']} rows scored, {summary['response_tokens']} "
        f"response tokens of {summary['bytes_per_token']} bytes; {summary['prompts_skipped']} skipped",
        *summary["skipped_because"],
    ]
    finish(summary, lines, as_json)


def _stats(argv: list[str]) -> None:
    config, as_json = parse(StatsConfig, "distill", argv)
    require_single_process("distill --stats")
    from draftsmith.set_page import write_set_page

    page = str(write_set_page(config.stats))
    finish({"page": page}, [f"page: {page}"], as_json)
