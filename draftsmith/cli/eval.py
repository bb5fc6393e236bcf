"""`draftsmith eval`."""

from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import alone
from eval.config import EvalConfig
from eval.evaluate import evaluate


def run(argv: list[str]) -> None:
    """Measure drafts in distribution and out of it."""
    config, as_json = parse(EvalConfig, "eval", argv)
    alone("eval")
    summary = evaluate(config)
    finish(summary, [f"results: {summary['results']}", f"report:  {summary['report']}"], as_json)
