"""`draftsmith doctor`."""

from drafts.config import DoctorConfig
from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process


def run(argv: list[str]) -> None:
    """Every engine's verdict on a pair, and the commands that serve it."""
    config, as_json = parse(DoctorConfig, "doctor", argv)
    require_single_process("doctor")
    from drafts.doctor import DRAFT_TOKENS, examine

    found = examine(config)
    lines = []
    for verdict in found["verdicts"]:
        word = "serves it" if verdict["serves"] else "loads it" if verdict["loads"] else "refuses it"
        lines.append(f"{verdict['engine']:<18}{word:<12}{verdict['reason']}")
        if verdict["serves"]:
            lines += [f"{'':<18}$ {command}" for command in (*verdict["exports"], verdict["command"])]
    if config.plan is None:
        lines.append(f"Commands draft {DRAFT_TOKENS} tokens; --plan FILE takes the number from a plan.")
    finish(found, lines, as_json)
