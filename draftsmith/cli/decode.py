"""`draftsmith decode`: one prompt to the terminal, or many to a file."""

import shutil

from draftsmith.cli.decode_options import DecodeConfig
from draftsmith.cli.method_table import terminal
from draftsmith.cli.output import finish
from draftsmith_core.options import parse


def run(argv: list[str]) -> None:
    """Decode; `--help` ends with the table of methods."""
    try:
        config, as_json = parse(DecodeConfig, "decode", argv)
    except SystemExit:
        if "-h" in argv or "--help" in argv:
            print("\n" + terminal(shutil.get_terminal_size().columns))
        raise
    from draftsmith.cli.decode_run import decode

    summary, lines = decode(config)
    finish(summary, lines, as_json)
