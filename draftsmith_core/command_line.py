"""The command line of a configuration class: words and YAML files to values, help, completion,
`--print_config`.

Lists are written `--draft a=x b=y` or `--draft a=x --draft b=y`; switches need no value; what is
typed overrides files. Every misuse is one line that names the file and line or the option, and the
nearest right one.
"""

import argparse
import difflib
import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.options import Option, options_of, partial_of, parts, put, reason_of, value_at

C = TypeVar("C")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def parse(
    cls: type[C], command: str, argv: list[str], modes: Mapping[str, str] | None = None
) -> tuple[C, bool]:
    """The configuration of a command and whether `--json` was given. Raise InputError for any
    misuse.

    modes: by key, what the command does when that option is typed, for the help.
    """
    table = {option.key: option for option in options_of(cls)}
    words: list[str] = []
    known = {"-h", "--help", "--config", "--json", "--print_config", *(f"--{key}" for key in table)}
    for word in argv:
        option = table.get(words[-1].removeprefix("--")) if words and words[-1] in known else None
        single = option is not None and not (option.many or option.switch)
        if single and underscored(word).partition("=")[0] not in known:
            words[-1] += (
                f"={word}"  # else argparse takes a value that begins with a dash for an option
            )
        else:
            words.append(underscored(word))
    if asked := {"-h", "--help", "--help=all"} & set(words):
        everything = "--help=all" in asked or words[-2:] == ["--help", "all"]
        sys.stdout.write(parser(cls, command, everything, modes).format_help())
        raise SystemExit(0)
    parsed, unknown = parser(cls, command, everything=False).parse_known_args(words)
    typed = vars(parsed)
    if unknown:
        key = unknown[0].partition("=")[0]
        is_option = key.startswith("--")
        raise InputError(
            f"{key}: unknown option{_nearest(key[2:], table, '--')}"
            if is_option
            else f"{key!r}: unexpected word"
        )
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name in typed.get("config", []):
        places |= _read_file(name, table, values)
    for key in typed.keys() & table.keys():
        is_null = typed[key] in ("null", "~") and NoneType in parts(table[key].hint)
        put(values, key, None if is_null else typed[key])
    try:
        if "print_config" in typed:
            _print_config(table, TypeAdapter(partial_of([cls])).validate_python(values))
            raise SystemExit(0)
        for option in table.values():
            if option.default is MISSING and "." not in option.key and option.key not in values:
                raise InputError(f"--{option.key}: is missing; --help says what it means")
        return TypeAdapter(cls).validate_python(values), "json" in typed
    except ValidationError as error:
        key, line = reason_of(error)
        where = "--" if key in typed else f"{places[key]}: " if key in places else ""
        raise InputError(where + line.removeprefix("--")) from None


def underscored(word: str) -> str:
    """A word of a command line with `_` for `-` in the name of its option."""
    key, equals, value = word.partition("=")
    is_key = word.startswith("--") and " " not in key
    return "--" + key[2:].replace("-", "_") + equals + value if is_key else word


def check_file(cls: type, file: Path) -> None:
    """Raise InputError, with its line, for a key of a YAML file that the configuration class does
    not have.
    """
    _read_file(str(file), {option.key: option for option in options_of(cls)}, {})


def _nearest(key: str, table: Iterable[str], dashes: str = "") -> str:
    known = ["config", "json", "help", "print_config", *table]
    # `--lrr` means `optim.lr`: the part behind the dot is what people remember.
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = [
        by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)
    ]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {dashes}{close[0]}?" if close else "; --help=all lists them"


def _read_file(name: str, table: dict[str, Option], values: dict[str, Any]) -> dict[str, str]:
    """Merge a YAML file into `values`; return where each key stands: `{dotted key:
    "file:line"}`.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
        root, document = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"--config {name}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(
            f"{where}: not valid YAML ({getattr(error, 'problem', None) or one_line(error)})"
        ) from None
    if not isinstance(document, dict):
        raise InputError(f"--config {name}: expected `key: value` lines")
    places: dict[str, str] = {}

    def read(mapping: Any, prefix: str) -> None:
        for key_node, node in mapping.value:
            key, where = f"{prefix}{key_node.value}", f"{name}:{key_node.start_mark.line + 1}"
            if key in places:
                raise InputError(
                    f"{where}: {key}: appears twice in the file ({places[key]}); keep one"
                )
            is_group = any(known.startswith(f"{key}.") for known in table)
            if key not in table and not is_group:
                raise InputError(f"{where}: {key}: unknown key{_nearest(key, table)}")
            places[key] = where
            if is_group and isinstance(node, yaml.MappingNode):
                read(node, f"{key}.")
            else:
                put(values, key, value_at(document, key))

    read(root, "")
    return places


def _print_config(table: dict[str, Option], values: dict[str, Any]) -> None:
    """Print the configuration as YAML that `--config` reads."""
    filled: dict[str, Any] = {}
    for option in table.values():
        default = None if option.default is MISSING else option.default
        put(filled, option.key, value_at(values, option.key, default))
    sys.stdout.write(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True))


def parser(
    cls: type, command: str, everything: bool = True, modes: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """The options of a command as argparse and shtab (completion) read them."""
    arguments = _Parser(
        prog=f"draftsmith {command}",
        usage=f"draftsmith {command} [--config FILE] [--key value ...]",
        description=(cls.__doc__ or "").strip().partition("\n\n")[0],
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    table = sorted(options_of(cls), key=lambda option: option.default is not MISSING)
    groups: dict[str, Any] = {}
    for option in table:
        section = "Required" if option.default is MISSING else option.section
        group = groups[section] = groups.get(section) or arguments.add_argument_group(section)
        default = "" if option.default is MISSING else option.default_text
        text = f"{option.help} (default: {default})" if default else option.help
        words: dict[str, Any] = {"metavar": option.kind, "help": text.replace("%", "%%")}
        if option.rare and not everything:
            words["help"] = argparse.SUPPRESS
        if option.many:
            words |= {"nargs": "+", "action": "extend"}
        elif option.switch:
            words |= {"nargs": "?", "const": "true"}
        if option.choices:
            words["choices"] = [*option.choices, *["null"] * (NoneType in parts(option.hint))]
        group.add_argument(f"--{option.key}", **words)
    if modes:
        group = arguments.add_argument_group("Other uses; add --help to one for its options")
        for key, what in modes.items():
            group.add_argument(f"--{key}", metavar="...", help=f"{what[0].upper()}{what[1:]}.")
    common = arguments.add_argument_group("Options of every command")
    text = "YAML file with any of these options; typed ones override it."
    common.add_argument("--config", metavar="FILE", action="append", help=text)
    common.add_argument(
        "--print_config", action="store_true", help="Print the options as such a file."
    )
    common.add_argument(
        "--json", action="store_true", help="End standard output with one JSON object, the summary."
    )
    hidden = sum(option.rare for option in table)
    text = "Show this" + (
        f"; --help=all lists {hidden} rarely used options as well." if hidden else "."
    )
    common.add_argument("-h", "--help", nargs="?", const="", metavar="all", help=text)
    return arguments
