"""The commands: one table of what each does, its options and its function. Imports nothing heavy.

A command's function takes its options and the command line as typed, and returns a
`CommandResult`.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from draftsmith.cli.command_result import CommandResult
from draftsmith.cli.examples import EXAMPLES
from draftsmith.core.errors import InputError, RequirementError, shown

if TYPE_CHECKING:
    from draftsmith.alignment.config import AlignConfig
    from draftsmith.config import (
        DecodeConfig,
        DemoConfig,
        InitConfig,
        ServedConfig,
        StatusConfig,
    )
    from draftsmith.core.io import JsonObject
    from draftsmith.distill.config import DistillConfig, ScoreConfig, StatesConfig
    from draftsmith.drafts.config import DoctorConfig, ExportConfig
    from draftsmith.eval.config import (
        EvalConfig,
        PlanConfig,
        RenderConfig,
        TimeAgainConfig,
    )
    from draftsmith.eval.results import Results
    from draftsmith.train.config import TrainConfig


def _init(config: "InitConfig", command: str) -> CommandResult:
    from draftsmith.init_run import in_words, init

    summary = init(config)
    return CommandResult(summary, [*in_words(summary), f"draft:  {summary['out']}"])


def _distill(config: "DistillConfig", command: str) -> CommandResult:
    from draftsmith.distill.generate import distill

    summary = distill(config, command)
    lines = [
        f"{summary['out']}: of {summary['prompts_read']} prompts {summary['prompts_done']} done, "
        f"{summary['prompts_skipped']} skipped, {summary['prompts_failed']} failed",
        *summary["texts"],
    ]
    for reasons in ("skipped_because", "failed_because", "shortened_because", "dropped_because"):
        lines += summary[reasons]
    if own := summary["own_prompts"]:
        lines.append(f"prompts: kept {own['kept']} of {own['drawn']} texts that the target drew")
        lines += own["left_out_because"]
    if summary["sampling_from_target"]:
        lines.append(f"sampling: {summary['sampling_from_target']}")
    return CommandResult(summary, lines)


def _score(config: "ScoreConfig", command: str) -> CommandResult:
    from draftsmith.distill.score import score_set

    summary = score_set(config, command)
    line = (
        f"{summary['out']}: {summary['prompts_done']} of {summary['prompts_read']} rows scored, in "
        f"{summary['bytes_per_token']} bytes a token; {summary['prompts_skipped']} skipped"
    )
    lines = ["; ".join([line, *summary["texts"]])]
    return CommandResult(summary, lines + summary["skipped_because"] + summary["dropped_because"])


def _states(config: "StatesConfig", command: str) -> CommandResult:
    from draftsmith.core.distilled_sets import of_states
    from draftsmith.distill.states import write_states

    summary = write_states(config)
    line = f"{summary['states']}: {summary['rows']} rows, {summary['asked']} asked for now"
    return CommandResult(summary, [line, *of_states(summary["measured"])])


def _train(config: "TrainConfig", command: str) -> CommandResult:
    from draftsmith.train.training_run import train

    summary = train(config, command)
    best = f"loss {summary['heldout_loss']:.4f}"
    if "heldout_alpha" in summary:
        # The best alpha decides, and another step may have a lower loss.
        best = f"alpha {summary['heldout_alpha']:.4f} ({best} there)"
    if missing := summary.get("heldout_missing_mass"):
        best += f", {missing:.4f} of the mass cannot be drafted,"
    step = summary["best_step"]
    line = f"{summary['checkpoint']}: {summary['steps']} steps, best held-out {best} at step {step}"
    if not step:
        line += ", so this is the draft that it began with"
    return CommandResult(summary, [line])


def _decode(config: "DecodeConfig", command: str) -> CommandResult:
    from draftsmith.cli.decode_run import decode

    return decode(config)


def _align(config: "AlignConfig", command: str) -> CommandResult:
    from draftsmith.alignment.stages import run_stages
    from draftsmith.eval.results import Results

    *_, last = run_stages(config, command)
    return _measured(Results.load(last.options.out), {"out": config.out})


def _align_files(config: "AlignConfig", command: str) -> CommandResult:
    from draftsmith.alignment.stages import run_stages

    files = [str(stage.file) for stage in run_stages(config, command, only_write=True)]
    return CommandResult({"files": files}, files)


def _measured(results: "Results", shown: "JsonObject") -> CommandResult:
    """Return what an evaluation prints at its end."""
    from draftsmith.eval.summary import lines, summary

    shown |= summary(results)
    return CommandResult(shown, [*lines(results), f"report: {shown['report']}"])


def _demo(config: "DemoConfig", command: str) -> CommandResult:
    from draftsmith.alignment.stages import run_stages
    from draftsmith.core.ranks import from_main
    from draftsmith.demo import demo_run
    from draftsmith.eval.results import Results
    from draftsmith.eval.summary import summary

    options = demo_run.prepare(Path(config.out), config.short, config.device)
    *_, last = run_stages(options, command)
    results = Results.load(last.options.out)
    large = demo_run.time_large(options, config.short)
    lines = from_main(lambda: demo_run.write_page(results, large))
    shown = {"out": config.out, **summary(results), "large": summary(large)}
    return CommandResult(shown, lines)


def _eval(config: "EvalConfig", command: str) -> CommandResult:
    from draftsmith.eval.request import check

    request = check(config)  # before torch is imported
    from draftsmith.eval.results import Results
    from draftsmith.eval.run import evaluate_request

    unmet = _unmet(lambda: evaluate_request(request))
    return replace(_measured(Results.load(config.out), {}), unmet=unmet)


def _render(config: "RenderConfig", command: str) -> CommandResult:
    from draftsmith.eval.report.page import write_report
    from draftsmith.eval.results import Results

    results = Results.load(config.render)
    unmet = _unmet(lambda: results.require(*config.require))
    report = str(write_report(results))
    return CommandResult({"report": report}, [f"report:  {report}"], unmet)


def _time_again(config: "TimeAgainConfig", command: str) -> CommandResult:
    from draftsmith.eval.run import without_timings

    return _eval(without_timings(config.time_again), command)


def _unmet(check: Callable[[], object]) -> RequirementError | None:
    try:
        check()
    except RequirementError as error:
        return error
    return None


def _doctor(config: "DoctorConfig", command: str) -> CommandResult:
    from draftsmith.drafts.doctor import examine

    verdicts = examine(config)
    lines = []
    for verdict in verdicts["verdicts"]:
        word = "refuses it" if verdict["known"] else "not known"
        if verdict["by_export"]:
            word = "not written"
        if verdict["loads"]:
            word = "serves it" if verdict["serves"] else "loads it"
        said = verdict["reason"]
        if verdict["serves"]:
            noted = f"  # {said}" if said else ""
            said = " && ".join([*verdict["exports"], verdict["command"]]) + noted
        lines.append(f"{verdict['engine']:<20}{word:<12}{said}")
    return CommandResult(verdicts, lines)


def _served(config: "ServedConfig", command: str) -> CommandResult:
    from draftsmith.serving.acceptance import served
    from draftsmith.serving.report import in_words

    found = served(config)
    lines, unmet = in_words(found)
    return CommandResult(found, lines, unmet)


def _export(config: "ExportConfig", command: str) -> CommandResult:
    from draftsmith.drafts.layouts.export import export

    summary = export(config)
    check = summary["check"]
    checked = f"{check['how']}; at most {check['max_difference']:.1e} apart"
    if summary["proven_in"] is not None:
        checked += f"; our tests ran such a file in {summary['proven_in']}"
    size = sum(summary["files"].values()) / 2**20
    count = len(summary["files"])
    line = f"{config.out}: {summary['kind']} as {config.format}, {count} files, {size:.1f} MiB"
    return CommandResult(summary, [f"{line}; {checked}", *summary["remarks"]])


def _plan(config: "PlanConfig", command: str) -> CommandResult:
    from draftsmith.core.options import command_line
    from draftsmith.drafts.engine_commands import decode_command
    from draftsmith.eval.plan import plan, plan_lines
    from draftsmith.eval.summary import decode_options

    document = plan(config)
    keys = (
        "tree",
        "name",
        "verifier",
        "pays",
        "speedup",
        "sampling",
        "batch_size",
        "confirmed",
    )
    summary = {"plan": str(config.file), **{key: document[key] for key in keys}}
    tree = f"auto:{config.file}"
    options = decode_options(document["models"]["draft"], tree, document["compile"])
    options += ["--temperature", f"{document['sampling']['temperature']:g}"]
    decode = decode_command(config.target, command_line("plan", config), options)
    return CommandResult(summary | {"command": decode}, [*plan_lines(document), decode])


def _status(config: "StatusConfig", command: str) -> CommandResult:
    from draftsmith.directory_status import look, summary

    held = look(config.directory)
    lines = [f"{each.path}: {each.holds}, {each.state}; {each.progress}" for each in held]
    first = next((each for each in held if each.state == "unfinished"), held[0])
    return CommandResult(summary(config.directory, held), [*lines, f"next: {first.following}"])


@dataclass(frozen=True)
class Command:
    """A command.

    what: its line in `draftsmith --help`. config: class of its options, "module:class" of this
    package. parallel: whether it runs on several processes. instead: commands that replace it, by
    the option that selects them. alone: the option that a word without `--` gives.
    """

    what: str
    config: str
    function: Callable[[Any, str], CommandResult]
    parallel: bool = False
    instead: Mapping[str, "Command"] = field(default_factory=dict)
    alone: str | None = None

    @property
    def options(self) -> type:
        found: type = resolve_name(f"draftsmith.{self.config}")
        return found

    @property
    def modes(self) -> dict[str, str]:
        """Lines of help for `instead`."""
        return {key: other.what for key, other in self.instead.items()}

    def chosen(self, argv: list[str]) -> "Command":
        """Return the command that the words select: this one, or one of `instead`."""
        from draftsmith.core.command_line import sub_command

        key = sub_command(self.instead, argv)
        return self if key is None else self.instead[key]


COMMANDS = {
    "demo": Command(
        "align the demo pair, offline, in minutes",
        "config:DemoConfig",
        _demo,
        True,
    ),
    "align": Command(
        "distil, train, evaluate and report for your pair",
        "alignment.config:AlignConfig",
        _align,
        True,
    ),
    "init": Command(
        "a draft to start from: pruned or transplanted",
        "config:InitConfig",
        _init,
    ),
    "distill": Command(
        "the target's own outputs for a set of prompts",
        "distill.config:DistillConfig",
        _distill,
        True,
        {
            "score": Command(
                "add the target's distributions", "distill.config:ScoreConfig", _score, True
            ),
            "states_of": Command(
                "write the target's hidden states", "distill.config:StatesConfig", _states
            ),
        },
    ),
    "train": Command("fit a draft to a distilled set", "train.config:TrainConfig", _train, True),
    "decode": Command("generate with target and draft, losslessly", "config:DecodeConfig", _decode),
    "eval": Command(
        "what alignment bought, in distribution and out of it",
        "eval.config:EvalConfig",
        _eval,
        True,
        {
            "render": Command("draw a report again", "eval.config:RenderConfig", _render),
            "time_again": Command(
                "time an evaluation again", "eval.config:TimeAgainConfig", _time_again
            ),
        },
    ),
    "doctor": Command(
        "which engines load a pair, and how to serve it",
        "drafts.config:DoctorConfig",
        _doctor,
        instead={
            "served": Command(
                "ask a running server what it accepts", "config:ServedConfig", _served
            )
        },
    ),
    "export": Command(
        "a draft in the layout that another engine reads", "drafts.config:ExportConfig", _export
    ),
    "plan": Command(
        "the tree with which a draft is fastest on this machine", "eval.config:PlanConfig", _plan
    ),
    "status": Command(
        "what a directory holds, and how to go on",
        "config:StatusConfig",
        _status,
        alone="directory",
    ),
}


SHELLS = ("bash", "zsh", "tcsh")


def run(name: str, argv: list[str]) -> None:
    """Run the command `name`: print its lines, and with `--json` its summary as the last line."""
    from draftsmith.cli.named_inputs import check_named
    from draftsmith.core.command_line import asks_all, parse, underscored
    from draftsmith.core.ranks import check_launcher, is_main, require_single_process

    check_launcher()
    config: Any
    command = COMMANDS[name]
    if command.alone is not None:
        if not argv:
            raise InputError(f"which {command.alone}? draftsmith {name} {command.alone.upper()}")
        if not argv[0].startswith("-"):
            argv = [f"--{command.alone}", *argv]
    command = command.chosen(argv)
    typed = {underscored(word).partition("=")[0] for word in argv}
    if name == "align" and "--print_config" in typed:
        # Here it writes files.
        argv = [word for word in argv if underscored(word) != "--print_config"]
        command = replace(command, function=_align_files)
    try:
        config, as_json = parse(command.options, name, argv, command.modes, EXAMPLES.get(name, ""))
    except SystemExit:
        if name == "decode" and asks_all(argv):
            from draftsmith.cli.method_table import terminal

            print("\n" + terminal(shutil.get_terminal_size().columns))
        raise
    if not command.parallel:
        require_single_process(name)
    if not getattr(config, "reads_nothing", False):
        check_named(config)
    outcome = command.function(config, shlex.join(["draftsmith", name, *argv]))
    if is_main():
        print(shown("\n".join(outcome.lines)))
        if as_json:
            print(json.dumps(outcome.summary))
        sys.stdout.flush()
    if outcome.unmet is not None:
        raise outcome.unmet


def print_completion(argv: list[str]) -> None:
    """Print a completion script for a shell, made by shtab."""
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise InputError(
            f'expected one of {", ".join(SHELLS)}, such as: eval "$(draftsmith --print_shtab bash)"'
        )
    import argparse

    import shtab

    from draftsmith.core.command_line import parser

    whole = argparse.ArgumentParser(prog="draftsmith")
    parsers = whole.add_subparsers()
    for name, command in COMMANDS.items():
        options = parser(command.options, name, True, command.modes)
        parsers.add_parser(name, help=command.what, parents=[options], add_help=False)
    print(shtab.complete(whole, argv[0]))
