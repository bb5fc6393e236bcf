"""The door: `draftsmith COMMAND`, `python -m draftsmith COMMAND`, `accelerate launch -m draftsmith COMMAND`."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
# `python -m` puts the current directory first, where a stranger's train.py would hide our package `train`.
if sys.path and sys.path[0] in ("", str(Path.cwd())) and str(Path.cwd()) != _ROOT:
    del sys.path[0]

import difflib  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import warnings  # noqa: E402

from draftsmith import __version__  # noqa: E402
from draftsmith_core.errors import InputError, RunError  # noqa: E402
from draftsmith_core.processes import Terminated  # noqa: E402

# command: (module with `run(argv)`, what it does). Modules are imported when their command is called.
COMMANDS = {
    "demo": ("draftsmith.cli.demo", "the whole road on the shipped nano pair, offline, in minutes"),
    "distill": ("draftsmith.cli.distill", "the target's own outputs for a set of prompts"),
    "train": ("draftsmith.cli.train", "fit a draft to a distilled set"),
    "decode": ("draftsmith.cli.decode", "generate with target and draft, losslessly"),
    "eval": ("draftsmith.cli.eval", "what alignment bought, in distribution and out of it"),
}


def usage() -> str:
    """The help of the door itself."""
    lines = [f"  {name:<9}{what}" for name, (_, what) in COMMANDS.items()]
    return (
        f"draftsmith {__version__}: align draft models for speculative decoding, and measure what it buys\n\n"
        "usage: draftsmith COMMAND [--key value ...] [--config FILE]\n\n"
        + "\n".join(lines)
        + "\n\n`draftsmith COMMAND --help` lists a command's options."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 done, 1 failed while running, 2 bad input or usage, 130 interrupted, 143 told to stop."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    name = words[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        print(f"draftsmith: {name!r} is not a command; {hint}", file=sys.stderr)
        return 2
    # A terminal or pipe that cannot show a character shows its escape instead of ending the run.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        importlib.import_module(COMMANDS[name][0]).run(words[1:])
        return 0
    except InputError as error:
        if _first():  # every process found the same
            print(f"draftsmith {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"draftsmith {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Terminated as stop:
        if _first():
            print(f"\ndraftsmith {name}: stopped by SIGTERM{_notes(stop)}", file=sys.stderr)
        raise
    except (Exception, KeyboardInterrupt) as error:
        if (interrupt := _interrupt(error)) is not None:
            if _first():
                print(f"\ndraftsmith {name}: interrupted{_notes(interrupt)}", file=sys.stderr)
            return 130
        if isinstance(error, BrokenPipeError):
            # The reader (`| head`) has seen enough. What Python still holds back for it goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            print(f"draftsmith {name}: {place}{error.strerror or error}", file=sys.stderr)
            return 1
        raise


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _notes(stop: BaseException) -> str:
    """What a command that was stopped said about what it kept."""
    return "".join(f"; {note}" for note in getattr(stop, "__notes__", []))


def _interrupt(error: BaseException | None) -> BaseException | None:
    """The Ctrl-C at the bottom of an error, if any: cleaning up after one can raise an error of its own."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


if __name__ == "__main__":
    sys.exit(main())
