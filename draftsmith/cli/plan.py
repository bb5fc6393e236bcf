"""`draftsmith plan`."""

from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process
from eval.config import PlanConfig

SUMMARY = ("tree", "name", "verifier", "pays", "speedup", "sampling", "batch_size", "confirmed", "domains", "engines")


def run(argv: list[str]) -> None:
    """Find the tree with which a draft is fastest here."""
    config, as_json = parse(PlanConfig, "plan", argv)
    require_single_process("plan")
    from eval.plan import plan, plan_lines

    found = plan(config)
    lines = [*plan_lines(found), "", f"plan: {config.out} (--tree auto:{config.out})"]
    finish({"plan": config.out, **{key: found[key] for key in SUMMARY}}, lines, as_json)
