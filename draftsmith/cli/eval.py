"""`draftsmith eval`."""

from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process
from eval.config import EvalConfig
from eval.evaluate import evaluate
from eval.summary import summary


def run(argv: list[str]) -> None:
    """Measure drafts in distribution and out of it."""
    config, as_json = parse(EvalConfig, "eval", argv)
    require_single_process("eval")
    found = summary(evaluate(config))
    finish(found, [f"results: {found['results']}", f"report:  {found['report']}"], as_json)
