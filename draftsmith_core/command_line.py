"""The command line of a configuration class: words and YAML files to values, help, completion, `--print_config`.

Lists are written `--draft a=x b=y` or `--draft a=x --draft b=y`; switches need no value; what is typed overrides files.
Every misuse is one line that names the file and line or the option, and the nearest right one.
"""

import argparse
import difflib
import functools
import sys
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.options import Option, options_of, parts, put, reason_of

C = TypeVar("C")
_SWITCHES = ("json", "help", "print_config")


def parse(cls: type[C], command: str, argv: list[str]) -> tuple[C, bool]:
    """The configuration of a command and whether `--json` was given. Raise InputError for any misuse."""
    table = {option.key: option for option in options_of(cls)}
    typed = _read_words(argv, table)
    if "help" in typed:
        sys.stdout.write(parser(cls, command, everything="all" in typed["help"]).format_help())
        raise SystemExit(0)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name in typed.get("config", []):
        places |= _read_file(name, table, values)
    for key, texts in typed.items():
        if key in table:
            is_null = texts[-1:] in (["null"], ["~"]) and NoneType in parts(table[key].hint)
            put(values, key, texts if table[key].many else None if is_null else texts[-1])
    if "print_config" in typed:
        _print_config(table, values)
        raise SystemExit(0)
    for option in table.values():
        if option.default is MISSING and "." not in option.key and option.key not in values:
            raise InputError(f"--{option.key}: is missing; --help says what it means")
    try:
        return TypeAdapter(cls).validate_python(values), "json" in typed
    except ValidationError as error:
        key, line = reason_of(error)
        where = "--" if key in typed else f"{places[key]}: " if key in places else ""
        raise InputError(where + line.removeprefix("--")) from None


def check_file(cls: type, file: Path) -> None:
    """Raise InputError, with its line, for a key of a YAML file that the configuration class does not have."""
    _read_file(str(file), {option.key: option for option in options_of(cls)}, {})


def _read_words(argv: list[str], table: dict[str, Option]) -> dict[str, list[str]]:
    """The texts that were typed, by key."""
    groups: list[tuple[str, list[str], str]] = []
    for word in argv:
        word = "--help" if word == "-h" else word
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            groups.append((key.replace("-", "_"), [value] if equals else [], equals))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise InputError(f"{word!r}: unexpected word; options are written --key value")
    typed: dict[str, list[str]] = {}
    for key, texts, equals in groups:
        many, switch = key in table and table[key].many, key in table and table[key].switch
        most = len(texts) if many else 0 if key in _SWITCHES and not equals else 1
        problem = ""
        if key not in table and key not in ("config", *_SWITCHES):
            problem = f"--{key}: unknown option{_nearest(key, ['config', *_SWITCHES, *table], '--')}"
        elif switch and texts and texts[0] not in ("true", "false"):
            problem = f"--{key}: expected true or false, got {texts[0]!r}"
        elif len(texts) > most:
            problem = f"{texts[most]!r}: unexpected word after --{key}"
        elif not texts and not switch and key not in _SWITCHES:
            problem = f"--{key}: needs a value"
        if problem:
            raise InputError(problem)
        typed[key] = (typed.get(key, []) if many or key == "config" else []) + (texts or ["true"])
    return typed


def _nearest(key: str, known: list[str], dashes: str = "") -> str:
    # `--lrr` means `optim.lr`: the part behind the dot is what people remember.
    by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = [by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {dashes}{close[0]}?" if close else "; --help=all lists them"


def _read_file(name: str, table: dict[str, Option], values: dict[str, Any]) -> dict[str, str]:
    """Merge a YAML file into `values`; return where each key stands: `{dotted key: "file:line"}`."""
    try:
        root = yaml.compose(Path(name).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise InputError(f"--config {name}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or one_line(error)})") from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"--config {name}: expected `key: value` lines")
    places: dict[str, str] = {}
    _read_mapping(root, name, "", table, values, places)
    return places


def _read_mapping(
    root: yaml.MappingNode,
    name: str,
    prefix: str,
    table: dict[str, Option],
    values: dict[str, Any],
    places: dict[str, str],
) -> None:
    for key_node, node in root.value:
        key, where = f"{prefix}{key_node.value}", f"{name}:{key_node.start_mark.line + 1}"
        problem = ""
        if key in places:
            problem = f"stands twice in the file ({places[key]}); keep one"
        elif key in table:
            try:
                put(values, key, yaml.constructor.SafeConstructor().construct_document(node))
            except (ValueError, yaml.YAMLError) as error:
                problem = str(getattr(error, "problem", None) or error)
        elif not any(known.startswith(f"{key}.") for known in table):
            problem = f"unknown key{_nearest(key, list(table))}"
        elif isinstance(node, yaml.MappingNode):
            _read_mapping(node, name, f"{key}.", table, values, places)
        else:
            problem = "expected indented `key: value` lines below it"
        if problem:
            raise InputError(f"{where}: {key}: {problem}")
        places[key] = where


def _print_config(table: dict[str, Option], values: dict[str, Any]) -> None:
    """Print the configuration as YAML that `--config` reads."""
    filled: dict[str, Any] = {}
    for option in table.values():
        put(filled, option.key, None if option.default is MISSING else option.default)
        try:
            value = functools.reduce(lambda group, name: group[name], option.key.split("."), values)
        except KeyError:
            continue
        try:
            value = TypeAdapter(option.hint).validate_python(value)
        except ValidationError as error:
            raise InputError(f"--{option.key}{reason_of(error)[1]}") from None
        put(filled, option.key, value)
    sys.stdout.write(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True))


def parser(cls: type, command: str, everything: bool = True) -> argparse.ArgumentParser:
    """The options of a command for argparse, which formats help, and for shtab, which completes words."""
    arguments = argparse.ArgumentParser(
        prog=f"draftsmith {command}",
        usage=f"draftsmith {command} [--config FILE] [--key value ...]",
        description=(cls.__doc__ or "").strip().partition("\n\n")[0],
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        add_help=False,
    )
    table = options_of(cls)
    sections = {option.section: arguments.add_argument_group(option.section) for option in table}
    for option in table:
        if everything or not option.rare:
            default = "required" if option.default is MISSING else f"default: {option.default_text}"
            text = f"{option.help} ({default})" if default != "default: " else option.help
            words: dict[str, Any] = {"choices": option.choices or None, "nargs": "*" if option.many else None}
            group = sections[option.section]
            group.add_argument(f"--{option.key}", metavar=option.kind, help=text.replace("%", "%%"), **words)
    common = arguments.add_argument_group("Every command")
    common.add_argument("--config", metavar="FILE", help="YAML file with any of these options; typed ones override it")
    common.add_argument("--print_config", action="store_true", help="print the options as such a file")
    common.add_argument("--json", action="store_true", help="end standard output with one JSON object, the summary")
    if hidden := sum(option.rare for option in table):
        common.add_argument("--help=all", action="store_true", help=f"list {hidden} rarely used options as well")
    return arguments
