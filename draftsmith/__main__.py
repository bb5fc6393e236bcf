"""The command line: `draftsmith COMMAND`, `python -m draftsmith COMMAND`, `accelerate launch -m
draftsmith COMMAND`.
"""

import os
import sys
from pathlib import Path

try:
    os.getcwd()
except FileNotFoundError:
    print("draftsmith: this directory was deleted; change to another one", file=sys.stderr)
    sys.exit(2)

_ROOT = str(Path(__file__).resolve().parents[1])
# `python -m` puts the current directory first on the path: a file train.py there would hide ours.
if sys.path and sys.path[0] in ("", str(Path.cwd())) and str(Path.cwd()) != _ROOT:
    del sys.path[0]

import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402

from draftsmith import __version__  # noqa: E402
from draftsmith.cli.commands import COMMANDS, print_completion, run  # noqa: E402
from draftsmith.cli.examples import ROAD  # noqa: E402
from draftsmith.core.environment import brief_waiting, keep_freed_memory, limit_threads  # noqa: E402
from draftsmith.core.errors import (  # noqa: E402
    InputError,
    LauncherError,
    RequirementError,
    RunError,
    nearest,
    one_line,
    printable,
    ran_out,
)
from draftsmith.core.ranks import (  # noqa: E402
    failed,
    have_met,
    is_main,
    leads_machine,
    lost_others,
    say,
    whose,
)
from draftsmith.core.signals import Terminated  # noqa: E402
from draftsmith.core.terminal import Formatter  # noqa: E402

# Seconds for the process that says why a run ends: to come to the error, and to end after it.
_COMES_S = 30.0
_ENDS_S = 5.0
# The reason that another process says.
_unsaid: list[str] = []


def usage() -> str:
    """Return the help of `draftsmith` itself."""
    lines = []
    for name, command in COMMANDS.items():
        lines.append(f"  {name:<9}{command.what}")
        lines += [f"  {'':<9}--{key}: {what}" for key, what in command.modes.items()]
    commands = "\n".join(lines)
    return (
        f"draftsmith {__version__}: align draft models for speculative decoding, and measure "
        "what it buys\n\n"
        "usage: draftsmith COMMAND [--key value ...] [--config FILE]\n"
        "       draftsmith --version | --print_shtab bash|zsh|tcsh    # the version; shell "
        f"completion\n\n{ROAD}\n\n{commands}\n\n"
        "`draftsmith COMMAND --help` shows a command's usual options and an example."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: failed while running. 2: bad input or usage. 3: a requirement is not met. 130:
    interrupted. 143: SIGTERM. 129: the terminal closed.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["-h"], ["--help"], ["help"]) and words[1:2] and words[1] in COMMANDS:
        words = [words[1], "--help"]
    called = " ".join(["draftsmith", *words[:1]])
    try:
        try:
            # Of several processes the main one prints help, options and results.
            with contextlib.redirect_stdout(sys.stdout if is_main() else io.StringIO()):
                if (code := _prepare(words)) is None:
                    run(words[0], words[1:])
            return code or 0
        finally:
            # If the reader is gone or the disk is full, fail here, not when Python shuts down.
            sys.stdout.flush()
    except Terminated as stop:
        _say(f"\n{called}: stopped by {stop.signal}{_note(stop)}", stop)
        raise
    except (Exception, KeyboardInterrupt) as error:
        return _failed(called, error)


def _prepare(words: list[str]) -> int | None:
    """Prepare the process for a command. Return an exit code if there is none to run."""
    name = words[0] if words else ""
    if name in ("", "-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if name in ("-V", "--version"):
        print(__version__)
        return 0
    if name == "--print_shtab":
        print_completion(words[1:])
        return 0
    if name not in COMMANDS:
        fix = nearest(name, COMMANDS, "the commands are")
        say(f"draftsmith: {name!r} is not a command; {fix}")
        return 2
    # Escape characters that the terminal cannot show, instead of ending the run.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.addLevelName(logging.WARNING, "warning")
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    warnings.filterwarnings("ignore", category=FutureWarning)
    if "torch" not in sys.modules:
        os.environ |= brief_waiting()
        limit_threads()
        keep_freed_memory()
    return None


def _failed(called: str, error: BaseException) -> int:
    """Print in one line why a command ended; return its exit code. Raise bugs again."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        # Cleaning up after Ctrl-C can raise an error of its own.
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        _say(f"\n{called}: interrupted{_note(cause)}", cause)
        return 130
    if isinstance(error, RequirementError):
        for line in error.unmet:
            _say(f"{called}: {line}", error)
        return 3
    if lost_others(error):
        error = RunError(
            "another process ended (killed, if it said nothing); run this again to resume"
        )
    called = f"{called}: {whose(error)}"
    if isinstance(error, InputError | RunError):
        _say(f"{called}{one_line(error)}", error)
        return 2 if isinstance(error, InputError) else 1
    if ran_out(error) or "start new thread" in str(error):
        _say(f"{called}no memory is left ({one_line(error)}); ask for less, or free some", error)
        return 1
    if not isinstance(error, OSError):
        if have_met() and not _say(f"{called}{type(error).__name__}: {one_line(error)}", error):
            return 1
        raise error
    # Drop what Python still buffers: it would fail again at shutdown.
    if error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0  # the reader (`| head`) has seen enough
    file = f"{error.filename}: " if error.filename else ""
    _say(f"{called}{file}{error.strerror or error}", error)
    return 1


def _note(stop: BaseException) -> str:
    notes = getattr(stop, "__notes__", [])
    return f"; {notes[-1]}" if notes else ""


def _say(line: str, error: BaseException) -> bool:
    """Print why the run ends to standard error, unless another process says it. Return whether it
    is this line.
    """
    line = printable(line)
    said: str | None = line
    if isinstance(error, RequirementError | KeyboardInterrupt | Terminated):
        said = line if is_main() else None
    elif have_met():
        said = failed(line)
    elif isinstance(error, InputError) and not isinstance(error, LauncherError):
        # The processes of one machine have the same command line and files.
        said = line if leads_machine() else None
    if said is None:
        _unsaid.append(line)
    else:
        print(said, file=sys.stderr, flush=True)
        _tell_launcher(said)
    return said == line


def _tell_launcher(line: str) -> None:
    """Give torch's launcher the reason; its report of a failed process ends with it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        failure = {"message": line.strip(), "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(failure))


def ended(code: int) -> int:
    """Return an exit code, after the process that says the reason has ended.

    The launcher stops the others when one ends. It must not stop the one that prints the reason,
    and it reports every process that did not end with 0.
    """
    if _unsaid and code in (1, 2, 3):
        line = _unsaid.pop()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        if code != 3 and have_met():
            time.sleep(_ENDS_S)
        else:
            time.sleep(_COMES_S)
            print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(ended(main()))
