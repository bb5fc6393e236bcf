"""Options: one frozen dataclass per command, filled from `--config FILE` and the command line.

    @options
    class TrainConfig(ModelOptions, RunOptions):
        \"\"\"Fit a draft to a distilled set.\"\"\"

        data: list[str]
        \"\"\"Distilled sets.\"\"\"
        batch_size: NotIdentity[AtLeast1] = 8
        \"\"\"Rows per forward.\"\"\"
        beta: Rare[Share] = 0.5
        \"\"\"Interpolation weight.\"\"\"
        optim: Optim = field(default_factory=Optim)

        def __post_init__(self) -> None:
            if ...:
                raise InputError("beta: needs --objective jsd")  # rules across fields; begin with the key

    config, as_json = parse(TrainConfig, "train", argv)

`@options` makes a pydantic dataclass: frozen, keyword-only, no unknown keys. Types carry bounds and choices, and are
checked once, in the constructor; from Python and from the command line a wrong value is an InputError of one line.
Python callers may pass paths for texts and tuples for lists. The docstring under a field is its help. `Rare[...]` hides
an option from `--help` (`--help=all` shows it); `NotIdentity[...]` keeps it out of `identity(config)`, because it does
not change what comes out. The first docstring line of an inherited or nested class is the heading of its section.
`Annotated[dict[str, Any], Given(DistillConfig, without=("out",))]` nests the options of a config, all of them open.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs, core_schema
from typing_extensions import TypedDict

from draftsmith_core.errors import InputError, one_line
from draftsmith_core.settings import MIN_TEMPERATURE

C = TypeVar("C")
T = TypeVar("T")


class _NotIdentity:
    pass


class _Rare:
    pass


class Given:
    """Marks a dict that holds options of other configs: those that were given; the others are left open.

    without: fields that are no options, because the outer config sets them. shown: options for the short --help.
    """

    def __init__(self, *configs: type, without: Sequence[str] = (), shown: Sequence[str] = ()) -> None:
        self.configs, self.without, self.shown = configs, without, shown

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Check the values by the types of the configs; a null leaves the option open."""
        return core_schema.no_info_before_validator_function(
            _without_nulls,
            handler.generate_schema(_partial(self.configs, self.without)),
        )


def _without_nulls(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_nulls(value) for key, value in values.items() if value is not None}


def _partial(configs: Sequence[Any], without: Sequence[str] = ()) -> Any:
    """A TypedDict of the fields of configs, none of which is required."""
    types: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config, include_extras=True)
        for name in [field.name for field in dataclasses.fields(config) if field.name not in without]:
            group, _ = _split(hints[name])
            types[name] = _partial([group]) if dataclasses.is_dataclass(group) else hints[name]
    partial: Any = TypedDict("partial", types, total=False)  # type: ignore[misc]
    partial.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return partial


NotIdentity = Annotated[T, _NotIdentity()]
Rare = Annotated[T, _Rare()]


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    return value


def _out(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty; name where to write")
    if value.startswith("~"):
        raise ValueError("the shell has not expanded ~; write the whole path")
    return value


AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]
TopP = Annotated[float, Field(gt=0, le=1)]
Out = Annotated[str, AfterValidator(_out)]
Text = Annotated[str, Field(min_length=1)]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def options(cls: type[C]) -> type[C]:
    """Make a configuration class of a command or a group; see the module."""
    made: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )(cls)
    validating_init = made.__init__

    @functools.wraps(validating_init)
    def init(self: Any, **values: Any) -> None:
        try:
            validating_init(self, **{key: _plain(value) for key, value in values.items()})
        except ValidationError as error:
            raise InputError(_reason(error)[1]) from None

    made.__init__ = init
    return typing.cast(type[C], made)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@options
class CodeOptions:
    """Models."""

    trust_remote_code: Rare[bool] = False
    """Run model code that comes with a checkpoint."""


@options
class ModelOptions(CodeOptions):
    """Models."""

    device: NotIdentity[str] = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Weights: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""


@options
class ChatModelOptions(ModelOptions):
    """Models."""

    chat_template: Rare[str | None] = None
    """Jinja file with a chat template, in place of the one in the target's tokenizer."""


@options
class SamplingOptions:
    """Sampling."""

    temperature: Temperature | None = None
    """0 is greedy. Default: the target's generation_config.json if that samples, else 0."""
    top_k: AtLeast0 | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: generation_config.json, else 0."""
    top_p: TopP | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: generation_config.json, else 1."""
    min_p: Rare[Share | None] = None
    """Keep tokens of at least this share of the greatest probability. Default: generation_config.json, else 0."""


@options
class PromptOptions:
    """Prompts."""

    max_prompts: AtLeast1 | None = None
    """Use only the first prompts."""
    prompt_tokens: Rare[AtLeast1] = 32
    """For rows with `text`: number of leading tokens that make the prompt."""


@options
class RunOptions:
    """Run."""

    out: NotIdentity[Out]
    """Directory to write."""
    seed: Seed = 0
    """Base seed. Each output derives its own seed from it."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command, with dotted key, for parsing, help, completion and the documentation."""

    key: str
    hint: Any
    default: Any
    help: str
    section: str
    rare: bool
    identity: bool

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return any(typing.get_origin(part) is list for part in _parts(self.hint))

    @property
    def switch(self) -> bool:
        """Whether it may stand without a value."""
        return bool in _parts(self.hint)

    @property
    def _item(self) -> Any:
        part = next(part for part in _parts(self.hint) if part is not NoneType)
        return _parts(typing.get_args(part)[0])[0] if self.many else part

    @property
    def choices(self) -> list[str]:
        """The words that a value is one of; empty if it is no choice."""
        return list(typing.get_args(self._item)) if typing.get_origin(self._item) is Literal else []

    @property
    def kind(self) -> str:
        """What to write behind the key."""
        names = {int: "N", float: "F", bool: "true|false"}
        return "|".join(self.choices) or names.get(self._item, "TEXT")

    @property
    def default_text(self) -> str:
        """The default as it is typed; empty if there is nothing to say."""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        return "" if self.default is None else str(self.default).replace("True", "true").replace("False", "false")


def options_of(cls: type) -> list[Option]:
    """Every option of a configuration class: its own first, then those it inherits, then nested groups."""
    return sorted(_walk(cls), key=lambda option: "." in option.key)


def _walk(
    cls: type, prefix: str = "", rare: bool = False, same: bool = True, without: Sequence[str] = ()
) -> Iterator[Option]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for owner in cls.__mro__:
        helps = _field_docstrings(owner)
        for name in [name for name in inspect.get_annotations(owner) if name in fields and name not in without]:
            hint, marks = _split(hints[name])
            is_rare = rare or any(isinstance(mark, _Rare) for mark in marks)
            is_identity = same and not any(isinstance(mark, _NotIdentity) for mark in marks)
            field = fields.pop(name)
            if dataclasses.is_dataclass(hint):
                yield from _walk(typing.cast(type, hint), f"{prefix}{name}.", is_rare, is_identity)
                continue
            if given := next((mark for mark in marks if isinstance(mark, Given)), None):
                for option in [o for c in given.configs for o in _walk(c, f"{name}.", rare, same, given.without)]:
                    shown = option.key.partition(".")[2] in given.shown
                    yield dataclasses.replace(option, default=None, rare=not shown)
                continue
            default = field.default if field.default_factory is MISSING else field.default_factory()
            section = "Options" if owner is cls and not prefix else _summary(owner if not prefix else cls)
            yield Option(f"{prefix}{name}", hint, default, helps.get(name, ""), section, is_rare, is_identity)


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its outer marks, and the marks."""
    return (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())


def _parts(hint: Any) -> list[Any]:
    """The members of a union, without bounds."""
    plain, _ = _split(hint)
    is_union = typing.get_origin(plain) in (Union, UnionType)
    return [part for member in typing.get_args(plain) for part in _parts(member)] if is_union else [plain]


@functools.cache
def _field_docstrings(cls: type) -> dict[str, str]:
    from docstring_parser import parse_from_object

    if not dataclasses.is_dataclass(cls):
        return {}
    return {item.arg_name: " ".join((item.description or "").split()) for item in parse_from_object(cls).params}


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0].rstrip(".:")


def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
    """A configuration from plain values, groups of options as dictionaries: what `dataclasses.asdict` gives."""
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        raise InputError(_reason(error)[1]) from None


def identity(config: Any) -> dict[str, Any]:
    """The options that decide what a run makes, as plain values: all but those marked `NotIdentity`."""
    values: dict[str, Any] = {}
    plain = dataclasses.asdict(config)
    for option in options_of(type(config)):
        if option.identity:
            _put(values, option.key, functools.reduce(_get, option.key.split("."), plain))
    return values


def _get(group: Any, name: str) -> Any:
    return group.get(name)


def parse(cls: type[C], command: str, argv: list[str]) -> tuple[C, bool]:
    """The configuration of a command and whether `--json` was given. Raises InputError for any misuse."""
    table = {option.key: option for option in options_of(cls)}
    typed = _read_words(argv, table)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if any(key.startswith(f"{field.name}.") for key in table) and field.default_factory is not MISSING:
            default: Any = field.default_factory()
            values[field.name] = default if isinstance(default, dict) else dataclasses.asdict(default)
    places: dict[str, str] = {}
    if "help" in typed:
        sys.stdout.write(parser(cls, command, everything="all" in typed["help"]).format_help())
        raise SystemExit(0)
    for name in typed.get("config", []):
        places |= _read_file(name, table, values)
    for key, texts in typed.items():
        if key in table:
            _put(values, key, _value(table[key], texts))
    if "print_config" in typed:
        _print_config(table, values)
        raise SystemExit(0)
    for option in table.values():
        if option.default is MISSING and "." not in option.key and option.key not in values:
            raise InputError(f"--{option.key}: is missing; --help says what it means")
    try:
        return TypeAdapter(cls).validate_python(values), typed.get("json", ["false"])[-1:] != ["false"]
    except ValidationError as error:
        key, line = _reason(error)
        where = "--" if key in typed else f"{places[key]}: " if key in places else ""
        raise InputError(where + line.removeprefix("--")) from None


def typed(argv: list[str]) -> set[str]:
    """The keys of the options on a command line, before it is known which options the command has."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def check_file(cls: type, file: Path) -> None:
    """Raise InputError, with its line, for a key of a YAML file that the configuration class does not have."""
    _read_file(str(file), {option.key: option for option in options_of(cls)}, {})


_SWITCHES = ("json", "help", "print_config")


def _read_words(argv: list[str], table: dict[str, Option]) -> dict[str, list[str]]:
    typed: dict[str, list[str]] = {}
    key = ""
    room = 0  # values that the last key may still take
    for word in argv:
        word = "--help" if word == "-h" else word
        if word.startswith("--") and len(word) > 2:
            _check_values(typed, key, table)
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key not in table and key not in ("config", *_SWITCHES):
                raise InputError(f"--{key}: unknown option{_nearest(key, ['config', *_SWITCHES, *table], '--')}")
            many = key in table and table[key].many
            typed[key] = [*(typed.get(key, []) if many or key == "config" else []), *([value] if equals else [])]
            room = 0 if equals or key in _SWITCHES else len(argv) if many else 1
        elif room and not (table[key].switch if key in table else False) or (room and word in ("true", "false")):
            typed[key].append(word)
            room -= 1
        elif room:
            raise InputError(f"--{key}: expected true or false, got {word!r}")
        elif key:
            raise InputError(f"{word!r}: unexpected word after --{key}")
        else:
            raise InputError(f"{word!r}: unexpected word; options are written --key value")
    _check_values(typed, key, table)
    return typed


def _check_values(typed: dict[str, list[str]], key: str, table: dict[str, Option]) -> None:
    if not key or typed[key]:
        return
    if key in table and table[key].switch:
        typed[key] = ["true"]
    elif key not in _SWITCHES:
        raise InputError(f"--{key}: needs a value")


def _value(option: Option, texts: list[str]) -> Any:
    if option.many:
        return texts
    return None if texts[-1] in ("null", "~") and NoneType in _parts(option.hint) else texts[-1]


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


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
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{name}:{line}: not valid YAML ({error.problem})") from None
    except OSError as error:
        raise InputError(f"--config {name}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {name}: not valid YAML ({one_line(error)})") from None
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
        if key in places:
            raise InputError(f"{where}: {key}: stands twice in the file ({places[key]}); keep one")
        places[key] = where
        if key in table:
            try:
                _put(values, key, yaml.constructor.SafeConstructor().construct_document(node))
            except (ValueError, yaml.YAMLError) as error:
                raise InputError(f"{where}: {key}: {getattr(error, 'problem', None) or error}") from None
        elif not any(known.startswith(f"{key}.") for known in table):
            raise InputError(f"{where}: {key}: unknown key{_nearest(key, list(table))}")
        elif isinstance(node, yaml.MappingNode):
            _read_mapping(node, name, f"{key}.", table, values, places)
        else:
            raise InputError(f"{where}: {key}: expected indented `key: value` lines below it")


# What to say for the error types of pydantic; others keep pydantic's message.
_REASONS = {
    "missing": "is missing",
    "missing_keyword_only_argument": "is missing",
    "unexpected_keyword_argument": "no such option",
    "extra_forbidden": "no such option",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "finite_number": "must be finite",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected a text",
    "string_too_short": "is empty",
    "list_type": "expected a list",
    "too_short": "name at least {min_length}",
    "too_long": "name at most {max_length}",
    "literal_error": "expected one of {expected}",
    "value_error": "{error}",
}


def _reason(error: ValidationError) -> tuple[str, str]:
    """The dotted key of the first error of a validation, and one line that begins with it."""
    first = error.errors()[0]
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    text = _REASONS.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    got = first["input"]
    if first["type"] == "value_error" and isinstance(got, dict | ArgsKwargs):
        # Raised by a __post_init__, with the key in its message.
        line = f"{key}.{text}" if key else text
        return line.partition(":")[0].removeprefix("--"), line
    if first["type"] == "literal_error":
        text = text.replace("'", "").replace(" or ", ", ")
    if "missing" not in first["type"]:
        text += ", got " + ("null" if got is None else repr(got) if got == "" else str(got)[:200])
    return key, f"{key}: {text}"


def _print_config(table: dict[str, Option], values: dict[str, Any]) -> None:
    """Print the configuration as YAML that `--config` reads."""
    filled: dict[str, Any] = {}
    for option in table.values():
        _put(filled, option.key, None if option.default is MISSING else option.default)
        try:
            value = functools.reduce(lambda group, name: group[name], option.key.split("."), values)
        except KeyError:
            continue
        try:
            value = TypeAdapter(option.hint).validate_python(value)
        except ValidationError as error:
            raise InputError(f"--{option.key}{_reason(error)[1]}") from None
        _put(filled, option.key, value)
    sys.stdout.write(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True))


def parser(cls: type, command: str, everything: bool = True) -> argparse.ArgumentParser:
    """The options of a command for argparse, which formats help, and for shtab, which completes words."""
    made = argparse.ArgumentParser(
        prog=f"draftsmith {command}",
        usage=f"draftsmith {command} [--config FILE] [--key value ...]",
        description=(cls.__doc__ or "").strip().partition("\n\n")[0],
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        add_help=False,
    )
    table = options_of(cls)
    sections = {option.section: made.add_argument_group(option.section) for option in table}
    for option in table:
        if everything or not option.rare:
            default = "required" if option.default is MISSING else f"default: {option.default_text}"
            text = f"{option.help} ({default})" if default != "default: " else option.help
            words: dict[str, Any] = {"choices": option.choices or None, "nargs": "*" if option.many else None}
            group = sections[option.section]
            group.add_argument(f"--{option.key}", metavar=option.kind, help=text.replace("%", "%%"), **words)
    common = made.add_argument_group("Every command")
    common.add_argument("--config", metavar="FILE", help="YAML file with any of these options; typed ones override it")
    common.add_argument("--print_config", action="store_true", help="print the options as such a file")
    common.add_argument("--json", action="store_true", help="end standard output with one JSON object, the summary")
    if hidden := sum(option.rare for option in table):
        common.add_argument("--help=all", action="store_true", help=f"list {hidden} rarely used options as well")
    return made
