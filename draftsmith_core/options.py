"""Options: one frozen dataclass per command, filled from `--config FILE` and the command line by jsonargparse.

Added to jsonargparse: errors of one line that name file, line, key and the nearest right key; lists as
`--draft a=x b=y` or `--draft a=x --draft b=y`; switches that need no value.
"""

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from draftsmith_core.errors import InputError
from draftsmith_core.option_types import check_utf8
from draftsmith_core.sampling_options import check_seed

C = TypeVar("C")
_OWN_KEYS = ("config", "print_config", "json", "help")
# Values are never evaluated beyond JSON/YAML scalars, and help shows the sentences under the fields.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def option_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted option names of a configuration dataclass and their types."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            found |= option_types(kind, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = kind
    return found


def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
    """A configuration from plain values, groups of options as dictionaries: what `dataclasses.asdict` gives."""
    hints = typing.get_type_hints(cls)
    groups = {key: from_values(hints[key], part) for key, part in values.items() if isinstance(part, dict)}
    return cls(**{**values, **groups})


def parse(cls: type[C], command: str, argv: list[str]) -> tuple[C, bool]:
    """The configuration of a command and whether `--json` was asked for. Raises InputError for any misuse."""
    types = option_types(cls)
    words, given = _normalise(argv, types)
    places = _check_files(given.get("config", []), types)
    _check_complete(cls, given, places)
    parser = _parser(cls, command, "help" in given)  # type: ignore[arg-type]
    try:
        values = parser.parse_args(words)
        instance = parser.instantiate(values)
    except ArgumentError as error:
        raise InputError(_one_line(str(error), places)) from None
    fields = {field.name: instance[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, said in given.items():
        # YAML reads '# a heading' as a comment, so as null; use the text as it was typed.
        if types.get(key) == str | None and said[-1] not in ("null", "~"):
            group, _, name = key.rpartition(".")
            if not group:
                fields[key] = said[-1] if fields[key] is None else fields[key]
            elif getattr(fields[group], name) is None:
                fields[group] = dataclasses.replace(fields[group], **{name: said[-1]})
    try:
        config = cls(**fields)
        check_seed(getattr(config, "seed", 0))
        return config, "json" in given and given["json"][-1:] != ["false"]
    except InputError as error:
        key = str(error).partition(":")[0]
        where = f"{places[key]}: " if key in places and key not in given else ""
        raise InputError(f"{where}{error}") from None


def check_file(cls: type, file: Path) -> None:
    """InputError, with its line, for a key of a YAML file that the configuration dataclass does not have."""
    _check_files([str(file)], option_types(cls))


@cache
def _parser(cls: type, command: str, helps: bool) -> ArgumentParser:
    """Made once per process: jsonargparse reads the source of the class for its descriptions."""
    description = (cls.__doc__ or "").strip().splitlines()[0]
    parser = ArgumentParser(prog=f"draftsmith {command}", description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    if helps:
        # Known to jsonargparse only for --help: --print_config must not print it, because --config does not take it.
        parser.add_argument("--json", action="store_true", help="end standard output with one JSON object, the summary")
    parser.add_class_arguments(cls)
    return parser


def typed(argv: list[str]) -> set[str]:
    """The keys of the options on a command line, before it is known which options the command has."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def _normalise(argv: list[str], types: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Words for jsonargparse (`--key=value` each), and what was given by key. Refuses unknown options."""
    given: dict[str, list[str]] = {}
    words: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "-h":
            word = "--help"
        if not word.startswith("--"):
            raise InputError(f"{word!r}: unexpected word; options are written --key value")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if key not in types and key not in _OWN_KEYS:
            raise InputError(f"--{key}: unknown option{_nearest(key, [*types, *_OWN_KEYS], '--')}")
        values = [value] if equals else []
        many = key in types and _is_list(types[key])
        switch = key in ("json", "help", "print_config") or types.get(key) is bool
        while not equals and position < len(argv) and not _is_option(argv[position]):
            if types.get(key) is bool and not values and argv[position].lower() not in ("true", "false"):
                raise InputError(f"--{key}: expected true or false, got {argv[position]!r}")
            if not many and (values or (switch and argv[position].lower() not in ("true", "false"))):
                raise InputError(f"{argv[position]!r}: unexpected word after --{key}")
            values.append(argv[position])
            position += 1
        if not values and not switch:
            raise InputError(f"--{key}: needs a value")
        given.setdefault(key, []).extend(values)
        if not many and key != "json":
            words.append(f"--{key}={values[0]}" if values else (f"--{key}=true" if key in types else f"--{key}"))
    for key, values in given.items():
        if key in types and _is_list(types[key]):
            items = typing.get_args(types[key])
            listed: list[Any] = values if items == (str,) else [_scalar(value) for value in values]
            # YAML reads what JSON writes, but not its two halves of a character beyond U+FFFF (an emoji).
            check_utf8(f"--{key}", values)
            shown = json.dumps(listed, ensure_ascii=False)
            words.append(f"--{key}=" + re.sub("[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", shown))
    # The file first, so that options on the command line override it wherever they stand.
    words.sort(key=lambda word: not word.startswith("--config="))
    return words, given


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):  # 2026-02-30 is read as a day, and is none
        return text


def _nearest(key: str, known: list[str], dashes: str = "") -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close:
        # `--lrr` means `optim.lr`: the part behind the dot is what people remember.
        by_last = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    return f"; did you mean {dashes}{close[0]}?" if close else "; --help lists them"


def _check_files(files: list[str], types: dict[str, Any]) -> dict[str, str]:
    """Where each key of the YAML files stands: `{dotted key: "file:line"}`. Refuses unknown keys and broken YAML."""
    places: dict[str, str] = {}
    for name in files:
        try:
            root = yaml.compose(Path(name).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise InputError(f"{name}:{line}: not valid YAML ({error.problem})") from None
        except yaml.YAMLError as error:
            raise InputError(f"{name}: not valid YAML ({str(error).splitlines()[0]})") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(f"--config {name}: cannot be read ({reason})") from None
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise InputError(f"{name}:{root.start_mark.line + 1}: expected `key: value` lines")
        found = {} if root is None else _keys(root, name, "", types)
        if root is None or all(value.tag.endswith(":null") for _, value in root.value):
            raise InputError(f"--config {name}: sets no option; write `key: value` lines")
        places |= found
    return places


def _keys(node: yaml.MappingNode, name: str, prefix: str, types: dict[str, Any]) -> dict[str, str]:
    places: dict[str, str] = {}
    for key_node, value_node in node.value:
        key, where = f"{prefix}{key_node.value}", f"{name}:{key_node.start_mark.line + 1}"
        if key in places:
            raise InputError(f"{where}: {key}: stands twice in the file ({places[key]}); keep one")
        if any(known.startswith(f"{key}.") for known in types):
            if not isinstance(value_node, yaml.MappingNode):
                raise InputError(f"{where}: {key}: expected indented `key: value` lines below it")
            places |= _keys(value_node, name, f"{key}.", types)
        elif key not in types:
            raise InputError(f"{where}: {key}: unknown key{_nearest(key, list(types))}")
        else:
            try:
                yaml.constructor.SafeConstructor().construct_document(value_node)
            except (ValueError, yaml.YAMLError) as error:  # 2026-02-30 is read as a day, and is none
                reason = getattr(error, "problem", None) or str(error).partition(";")[0]
                raise InputError(f"{where}: {key}: cannot be read ({reason}); put text in quotes") from None
        places[key] = where
    return places


def _check_complete(cls: type, given: dict[str, list[str]], places: dict[str, str]) -> None:
    if "help" in given or "print_config" in given:
        return
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given and field.name not in places:
            raise InputError(f"--{field.name}: is missing, and has no default; --help says what it means")


def _one_line(message: str, places: dict[str, str]) -> str:
    """A message of jsonargparse, several lines long, as one: where, which key, what was expected."""
    key_match = re.search(r'[Kk]ey "?([\w.]+)"?', message)
    key = key_match.group(1) if key_match else ""
    expected = re.findall(r"(?:Expected|expected) .*?(?=\. Got|$)", message, flags=re.MULTILINE)
    got = re.search(r"(?:[Gg]ot|Given) value: (.*)", message)
    where = f"{places[key]}: {key}" if key in places else f"--{key}"
    if key and expected:
        kind = re.sub(r"<class '(\w+)'>", r"\1", expected[0]).rstrip(" :")
        kind = re.sub(r"typing\.", "", kind).replace(" a int", " an int")
        if choice := re.search(r"Literal\[(.*)\]", kind):
            kind = f"expected one of {choice.group(1).replace(chr(39), '')}"
        return f"{where}: {kind[0].lower()}{kind[1:]}" + (f", got {got.group(1).strip()}" if got else "")
    return " ".join(message.split())
