"""The command line of a configuration class: words and YAML files to values, help, completion,
`--print_config`.

Lists are written `--draft a=x b=y` or `--draft a=x --draft b=y`; switches need no value; what is
typed overrides files. Every misuse is one line that names the file and line or the option, and the
nearest right one.
"""

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from draftsmith.core.errors import InputError, nearest_option, one_line
from draftsmith.core.io import JsonObject
from draftsmith.core.options import Option, options_of, partial_of, put, reason_of, value_at

C = TypeVar("C")
# Options of every command.
_COMMON = ("config", "json", "help", "print_config")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


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
        raise InputError(f"{key}: unknown option{_nearest(key[2:], table, '--')}")
    values: JsonObject = {}
    lines: dict[str, str] = {}
    for name in typed.get("config", []):
        lines |= _read_file(name, table, values)
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


def sub_command(modes: Iterable[str], argv: list[str]) -> str | None:
    """Return the option among `modes` that is typed, and makes the command another one."""
    chooser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for key in modes:
        chooser.add_argument(f"--{key}", nargs="*")
    typed, _ = chooser.parse_known_args([underscored(word) for word in argv])
    return next(iter(vars(typed)), None)


def asks_all(words: list[str]) -> bool:
    """Whether the help of every option is asked for."""
    return "--help=all" in words or words[-2:] == ["--help", "all"]


def _joined(argv: list[str], table: Mapping[str, Option]) -> list[str]:
    """Return the words with `_` for `-` in names, and a value joined to its option by `=`.

    Otherwise argparse takes a value that begins with a dash for an option.
    """
    known = {"-h"} | {f"--{key}" for key in (*_COMMON, *table)}
    words: list[str] = []
    for word in argv:
        option = table.get(words[-1].removeprefix("--")) if words and words[-1] in known else None
        is_value = underscored(word).partition("=")[0] not in known
        if option is not None and is_value and not _words_of(option):
            words[-1] += f"={word}"
        else:
            words.append(underscored(word))
    return words


def underscored(word: str) -> str:
    """A word of a command line with `_` for `-` in the name of its option."""
    key, equals, value = word.partition("=")
    is_key = word.startswith("--") and " " not in key
    name = key.removeprefix("--").replace("-", "_")
    return f"--{name}{equals}{value}" if is_key else word


def _nearest(key: str, table: Iterable[str], dashes: str = "") -> str:
    near = nearest_option(key, [*_COMMON, *table], dashes)
    return f"; did you mean {near}?" if near else "; --help=all lists them"


def _read_file(name: str, table: dict[str, Option], values: JsonObject) -> dict[str, str]:
    """Merge a YAML file into `values`; return the line of each key: `{dotted key: "file:line"}`."""
    try:
        # A wheel has recipes under the names of a checkout.
        shipped = Path(__file__).parents[1] / name
        is_shipped = name.startswith("configs/") and not Path(name).exists()
        text = (shipped if is_shipped else Path(name)).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"--config {name}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or one_line(error)
        raise InputError(f"{where}: not valid YAML ({problem})") from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"--config {name}: expected `key: value` lines")
    lines: dict[str, str] = {}

    def read(mapping: yaml.MappingNode, prefix: str) -> None:
        for key_node, node in mapping.value:
            key = f"{prefix}{key_node.value}"
            line = f"{name}:{key_node.start_mark.line + 1}"
            if key in lines:
                raise InputError(
                    f"{line}: {key}: appears twice in the file ({lines[key]}); keep one"
                )
            is_group = any(known.startswith(f"{key}.") for known in table)
            if key not in table and not is_group:
                raise InputError(f"{line}: {key}: unknown key{_nearest(key, table)}")
            lines[key] = line
            if is_group and isinstance(node, yaml.MappingNode):
                read(node, f"{key}.")
            else:
                put(values, key, value_at(document, key))

    read(root, "")
    return lines


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
    table = sorted(options_of(cls), key=lambda option: not option.required)
    groups = {}
    for option in table:
        section = option.section if everything else "Options that most people set"
        if option.required:
            section = "Required"
        if section not in groups:
            groups[section] = arguments.add_argument_group(section)
        text = option.help
        if option.default_text:
            text += f" (default: {option.default_text})"
        hidden = option.part or (option.rare and not everything)
        groups[section].add_argument(
            f"--{option.key}",
            metavar=(option.metavar, "") if option.many else option.metavar,
            help=argparse.SUPPRESS if hidden else text.replace("%", "%%"),
            choices=[*option.choices, *["null"] * option.nullable] if option.choices else None,
            **_words_of(option),
        )
    for part in dict.fromkeys(option.part for option in table if option.part):
        text = f"An option of `draftsmith {part}`, which its --help explains."
        groups[section].add_argument(f"--{part}.KEY", metavar="VALUE", help=text)
    if modes:
        group = arguments.add_argument_group("Other uses; add --help to one for its options")
        for key, what in modes.items():
            group.add_argument(f"--{key}", metavar="...", help=f"{what[0].upper()}{what[1:]}.")
    _add_common(arguments, table)
    return arguments


def _add_common(arguments: _Parser, table: Sequence[Option]) -> None:
    """Add the options of every command."""
    common = arguments.add_argument_group("Options of every command")
    text = "YAML file with any of these options; typed ones override it."
    common.add_argument("--config", metavar="FILE", action="append", help=text)
    common.add_argument(
        "--print_config", action="store_true", help="Print the options as such a file."
    )
    common.add_argument(
        "--json", action="store_true", help="End standard output with one JSON object, the summary."
    )
    rare = sum(option.rare and not option.part for option in table)
    more = f"; --help=all lists {rare} more" if rare else ""
    text = f"Show this{more}. Names may have - for _."
    common.add_argument("-h", "--help", nargs="?", const="", metavar="all", help=text)


def _words_of(option: Option) -> JsonObject:
    """How many words the option takes, for `add_argument`."""
    if option.many:
        return {"nargs": "+", "action": "extend"}
    return {"nargs": "?", "const": "true"} if option.item is bool else {}
