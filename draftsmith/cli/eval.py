"""`draftsmith eval`."""

from draftsmith.cli.output import finish
from draftsmith_core.options import parse
from draftsmith_core.processes import require_single_process
from eval.config import EvalConfig, RenderConfig
from eval.request import check


def run(argv: list[str]) -> None:
    """Measure drafts in distribution and out of it, or draw a report again."""
    if any(word.partition("=")[0] == "--render" for word in argv):
        again, as_json = parse(RenderConfig, "eval", argv)
        require_single_process("eval")
        from eval.evaluate import render

        report = str(render(again.render))
        finish({"report": report}, [f"report:  {report}"], as_json)
        return
    config, as_json = parse(EvalConfig, "eval", argv)
    require_single_process("eval")
    check(config)
    # After the options are checked, because these import torch, which takes seconds.
    from eval.evaluate import evaluate
    from eval.summary import summary

    found = summary(evaluate(config))
    finish(found, [f"results: {found['results']}", f"report:  {found['report']}"], as_json)
