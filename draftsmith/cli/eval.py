"""`draftsmith eval`."""

from draftsmith.cli.output import finish
from draftsmith_core.errors import InputError, RequirementError
from draftsmith_core.options import parse, typed
from draftsmith_core.processes import require_single_process
from eval.config import CompareConfig, EvalConfig, RenderConfig
from eval.request import check


def run(argv: list[str]) -> None:
    """Measure drafts in distribution and out of it; or draw a report again, or set two evaluations side by side."""
    for key, instead in (("render", _render), ("compare", _compare)):
        if key in typed(argv):
            return instead(argv)
    config, as_json = parse(EvalConfig, "eval", argv)
    check(config)
    from eval.evaluate import evaluate
    from eval.results import Results
    from eval.summary import summary

    missed: RequirementError | None = None
    try:
        results = evaluate(config)
    except RequirementError as error:
        results, missed = Results.load(config.out), error
    found = summary(results)
    finish(found, [f"results: {found['results']}", f"report:  {found['report']}"], as_json)
    if missed is not None:
        raise missed


def _render(argv: list[str]) -> None:
    again, as_json = parse(RenderConfig, "eval", argv)
    require_single_process("eval")
    from eval.evaluate import render
    from eval.results import Results

    missed: RequirementError | None = None
    try:
        Results.load(again.render).require(*again.require)
    except RequirementError as error:
        missed = error
    report = str(render(again.render))
    finish({"report": report}, [f"report:  {report}"], as_json)
    if missed is not None:
        raise missed


def _compare(argv: list[str]) -> None:
    asked, as_json = parse(CompareConfig, "eval", argv)
    require_single_process("eval")
    if len(asked.compare) != 2:
        raise InputError(f"--compare: names {len(asked.compare)} evaluations; name two, such as --compare out/a out/b")
    from eval.compare import compare
    from eval.report.comparison import comparison_lines
    from eval.results import Results

    found = compare(*(Results.load(path) for path in asked.compare))
    finish(found.summary(), comparison_lines(found), as_json)
