"""The command line of a configuration class: words and YAML files to values, help, completion,
`--print_config`.

Lists are written `--draft a=x b=y` or `--draft a=x --draft b=y`; switches need no value; what is
typed overrides files. Every misuse is one line that names the file and line or the option, and the
nearest right one.
"""

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from draftsmith.core.errors import InputError, one_line
from draftsmith.core.io import JsonObject, read_words
from draftsmith.core.option_names import nearest_option
from draftsmith.core.options import Option, options_of, partial_of, put, reason_of, value_at

C = TypeVar("C")
# Options of every command.
_COMMON = ("config", "json", "help", "print_config")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        line = message.removeprefix("argument ")
        typed = line.partition("invalid choice: '")[2].partition("'")[0]
        meant = read_words(__file__)["values"].get(typed)
        raise InputError(f"{line}; {meant}" if meant else line)


def parse(
    cls: type[C],
    command: str,
    argv: list[str],
    modes: Mapping[str, str] | None = None,
    example: str = "",
) -> tuple[C, bool]:
    """The configuration of a command and whether `--json` was given. Raise InputError for any
    misuse.

    modes, example: for the help: by key, what the command does when that option is typed; a command
    line that runs on the demo's files.
    """
    table = {option.key: option for option in options_of(cls)}
    words = _joined(argv, table)
    wants_all = asks_all(words)
    if wants_all or "-h" in words or "--help" in words:
        sys.stdout.write(parser(cls, command, wants_all, modes).format_help())
        if example:
            sys.stdout.write(f"\nAfter `draftsmith demo`, for example:\n  {example}\n")
        raise SystemExit(0)
    parsed, unknown = parser(cls, command, everything=False).parse_known_args(words)
    typed = vars(parsed)
    if unknown:
        key = unknown[0].partition("=")[0]
        if not key.startswith("--"):
            raise InputError(f"{key!r}: unexpected word")
        words_of = read_words(__file__)["options"]
        instead = words_of.get(f"{command} {key}", words_of.get(key))
        known = f"; {instead}" if instead else _nearest(key[2:], table, "--")
        raise InputError(f"{key}: unknown option{known}")
    values: JsonObject = {}
    lines: dict[str, str] = {}
    for name in typed.get("config", []):
        lines |= _read_file(name, table, values)
    _refuse_two_names(words, table)
    for key in typed.keys() & table.keys():
        is_null = typed[key] in ("null", "~") and table[key].nullable
        put(values, key, None if is_null else typed[key])
    try:
        if "print_config" in typed:
            given: JsonObject = TypeAdapter(partial_of(cls)).validate_python(values)
            filled: JsonObject = {}
            for option in table.values():
                put(filled, option.key, value_at(given, option.key, option.default))
            sys.stdout.write(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True))
            raise SystemExit(0)
        for option in table.values():
            if option.required and "." not in option.key and option.key not in values:
                raise InputError(f"--{option.key}: is missing; --help says what it means")
        return TypeAdapter(cls).validate_python(values), "json" in typed
    except ValidationError as error:
        reason = reason_of(error)
        line = reason.line.removeprefix("--")
        if reason.key in typed:
            raise InputError(f"--{line}") from None
        raise InputError(f"{lines[reason.key]}: {line}" if reason.key in lines else line) from None


def _refuse_two_names(words: list[str], table: Mapping[str, Option]) -> None:
    """Raise InputError for a second target or file of prompts, which might be meant as one more.
    Other options are given anew, as scripts do at the end of a line.
    """
    keys = [word.partition("=")[0] for word in words]
    for key in ("target", "prompts"):
        if key in table and not table[key].many and keys.count(f"--{key}") > 1:
            raise InputError(f"--{key}: is given twice; keep one")
