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
                # Rules across fields begin with the key.
                raise InputError("beta: needs --objective jsd")

    config, as_json = command_line.parse(TrainConfig, "train", argv)

`@options` makes a frozen, keyword-only pydantic dataclass. Wrong values are an InputError of one
line, from Python too. The docstring under a field is its help. `Rare[...]` hides an option from
`--help` (`--help=all` shows it); `NotIdentity[...]` marks an option that does not change the
result, `ByContent[...]` a file, directory or hub name that a run's identity holds by its content,
so that a moved run resumes, `Annotated[..., Of("engine", ["openai"])]` one that is read beside
--engine openai alone. The first sentence of an inherited or nested class is the heading of
its section.
"""

import dataclasses
import functools
import inspect
import os
import re
import shlex
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
)
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from draftsmith.core.errors import InputError, OptionError, check_keywords, without_secrets
from draftsmith.core.io import JsonObject, hash_json, sha256_file
from draftsmith.core.settings import MIN_TEMPERATURE, device_map_called

C = TypeVar("C")
T = TypeVar("T")


def partial_of(config: type) -> type:
    """Return a TypedDict of the fields of a config, none of them required."""
    types: dict[str, object] = {}
    hints = typing.get_type_hints(config, include_extras=True)
    for name, field in _fields(config).items():
        group = field.annotation
        types[name] = partial_of(group) if _is_group(group) else hints[name]
    partial = TypedDict("partial", types, total=False)  # type: ignore[misc]
    partial.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return typing.cast(type, partial)


def _fields(config: type) -> dict[str, FieldInfo]:
    """The fields of a class that `options` made, by name; their metadata has the marks."""
    return config.__pydantic_fields__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class PartOf:
    """Marks a group as a dictionary of some options of another command."""

    config: type

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(partial_of(self.config))


_OF_ONE_MACHINE = ("out", "device", "endpoint", "head.features", "states", "states_from")
NotIdentity = Annotated[T, "not identity"]
ByContent = Annotated[T, "by content"]
Rare = Annotated[T, "rare"]


class Of:
    """Marks an option that is read only if another one has one of these values; without values, if
    it is given. An option that is null is open to all.
    """

    def __init__(self, option: str, values: Collection[str] = ()) -> None:
        self.option = option
        self.values = values

    def reads(self, given: object) -> bool:
        if self.values:
            return given is None or given in self.values
        return bool(given)

    def __str__(self) -> str:
        return f"--{self.option} {' or '.join(self.values)}".rstrip()


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    return value


def _date(value: str) -> str:
    if re.fullmatch(r"\d{4}-\d\d-\d\d", value) is None:
        raise ValueError("must be YYYY-MM-DD")
    return date.fromisoformat(value).isoformat()


Date = Annotated[str, AfterValidator(_date)]
AtLeast0 = NonNegativeInt
AtLeast1 = Annotated[int, Field(ge=1)]
NonNegative = NonNegativeFloat
Positive = PositiveFloat
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Temperature = Annotated[NonNegative, AfterValidator(_temperature)]
TopP = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Shown(str):
    """What stands for a value in the help."""


Url = Annotated[Text, Shown("URL")]
Spec = Annotated[str, Shown("SPEC")]
File = Annotated[str, Shown("FILE")]
Directory = Annotated[Text, Shown("DIR")]
Model = Annotated[Text, Shown("PATH|HUB")]
NamedModel = Annotated[str, Shown("NAME=PATH")]
Prompts = Annotated[str, Shown("FILE|HUB")]
NamedPrompts = Annotated[str, Shown("NAME=PATH")]
Out = Annotated[Text, AfterValidator(os.path.expanduser), Shown("DIR")]
OutFile = Annotated[Text, AfterValidator(os.path.expanduser), Shown("FILE")]
Device = str
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DeviceMap = Annotated[str, AfterValidator(device_map_called), Shown("auto|auto:GIB")]


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def options(cls: type[C]) -> type[C]:
    """Make a configuration class of a command or a group; see the module."""
    settings = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    validated: Callable[[object], None] = getattr(cls, "__post_init__", lambda self: None)

    def check(self: object) -> None:
        validated(self)
        _refuse_unread(self)

    cls.__post_init__ = check  # type: ignore[attr-defined]
    decorate = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)
    decorated = typing.cast(type[C], decorate(cls))
    validating_init: Callable[..., None] = decorated.__init__

    @functools.wraps(validating_init)
    def init(self: C, **values: object) -> None:
        try:
            validating_init(self, **{key: _plain(value) for key, value in values.items()})
        except ValidationError as error:
            _refuse_unknown(cls, error)
            raise InputError(reason_of(error).line) from None

    decorated.__init__ = init  # type: ignore[method-assign, assignment]
    return decorated


def _refuse_unknown(cls: type, error: ValidationError) -> None:
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    given = [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] in unknown]
    check_keywords(given, [option.key for option in options_of(cls)], cls.__name__)


def configured(cls: type[C], config: C | None, given: JsonObject) -> C:
    """Return `config` with `given` replaced; build one from `given` alone if `config` is None."""
    if config is None:
        return cls(**given)
    if not isinstance(config, cls):
        name = cls.__name__
        kind = type(config).__name__
        raise OptionError(f"expected {name}(...) or options by name (**options), got a {kind}")
    return replace(config, **given) if given else config  # type: ignore[type-var]


def _refuse_unread(config: object) -> None:
    """Raise InputError for an option that was set although its `Of` says that nothing reads it."""
    values = asdict(config)  # type: ignore[call-overload]
    table = {option.key: option for option in options_of(type(config))}
    for key, option in table.items():
        mark = option.of
        if mark is None or mark.option not in table or value_at(values, key) == option.default:
            continue
        if not mark.reads(value_at(values, mark.option)):
            raise InputError(f"{key}: is for {mark}; leave it out")


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@options
class CodeOptions:
    """How models are loaded."""

    trust_remote_code: Rare[bool] = False
    """Run model code that comes with a checkpoint."""


@options
class RevisionOptions(CodeOptions):
    """How models are loaded."""

    revision: Rare[str | None] = None
    """Branch, tag or commit of the target on the hub."""


@options
class ModelOptions(CodeOptions):
    """How models are loaded."""

    device: NotIdentity[Device] = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Rare[Dtype] = "auto"
    """Type of the weights; auto is float32 on a CPU, else the checkpoint's own."""


@options
class TargetOptions(ModelOptions, RevisionOptions):
    """How models are loaded."""

    chat_template: Rare[File | None] = None
    """Jinja file with a chat template, in place of the one in the target's tokenizer."""
    date: Rare[NotIdentity[Date | None]] = None
    """For a chat template that prints the date: YYYY-MM-DD. Default: that of the run, set or draft
    that goes on, else today's.
    """


@options
class SpreadTargetOptions(TargetOptions):
    """How models are loaded."""

    target_device_map: Rare[NotIdentity[DeviceMap | None]] = None
    """For a target that fits no device: spread its layers over GPUs, memory and disk, in one
    process; with :GIB at most that much of each GPU.
    """


@options
class LargeTargetOptions(SpreadTargetOptions):
    """How models are loaded."""

    target_parallel: Rare[NotIdentity[AtLeast1]] = 1
    """For a target that fits no device: this many neighbouring processes of a launch hold it
    together, and rows are divided over groups of them.
    """


@options
class SamplingOptions:
    """How tokens are sampled."""

    temperature: Temperature | None = None
    """0 is greedy. Default: the target's generation_config.json if that samples, else 0."""
    top_k: Rare[AtLeast0 | None] = None
    """Keep the k most probable tokens; 0 keeps all. Default: generation_config.json, else 0."""
    top_p: Rare[TopP | None] = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: generation_config.json,
    else 1.
    """
    min_p: Rare[Share | None] = None
    """Keep tokens of at least this share of the greatest probability. Default:
    generation_config.json, else 0.
    """


@options
class PenaltyOptions(SamplingOptions):
    """How tokens are sampled, given those before."""

    repetition_penalty: Rare[Positive | None] = None
    """Divide positive logits of tokens in prompt or answer by this, and multiply negative ones.
    Default: generation_config.json, else 1.
    """
    presence_penalty: Rare[float | None] = None
    """Take this off the logits of tokens in the answer."""
    frequency_penalty: Rare[float | None] = None
    """Take this off the logits of a token for each time that the answer holds it."""


@options
class PromptOptions:
    """Which prompts are read."""

    max_prompts: AtLeast1 | None = None
    """Use only the first prompts."""
    prompt_tokens: Rare[AtLeast1] = 32
    """For rows with `text`: number of leading tokens that make the prompt."""


@options
class RunOptions:
    """Where the run writes, and its seed."""

    out: NotIdentity[Out]
    """Directory to write."""
    seed: Seed = 0
    """Seed of sampled tokens, order of rows, fresh weights."""


@dataclass(frozen=True)
class Option:
    """One option of a command, with dotted key, for parsing, help, completion and the
    documentation.
    """

    key: str
    hint: object
    default: object
    required: bool
    help: str
    section: str
    rare: bool
    identity: bool
    by_content: bool
    shown: str = "TEXT"
    of: Of | None = None
    # The group of another command's options that it is in.
    part: str = ""

    @property
    def nullable(self) -> bool:
        return NoneType in _members(self.hint)

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return typing.get_origin(_members(self.hint)[0]) is list

    @property
    def item(self) -> object:
        """The type of a value; of a list, that of its items."""
        value = _members(self.hint)[0]
        return _members(typing.get_args(value)[0])[0] if self.many else value

    @property
    def choices(self) -> list[str]:
        is_literal = typing.get_origin(self.item) is Literal
        return list(typing.get_args(self.item)) if is_literal else []

    @property
    def metavar(self) -> str:
        """What stands for its value in the help."""
        names: dict[object, str] = {int: "N", float: "F", bool: "true|false"}
        return "|".join(self.choices) or names.get(self.item, self.shown)

    @property
    def default_text(self) -> str:
        """The default as it is typed; empty if there is nothing to say."""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default is None else str(self.default)


# The options of each class that was asked for: `generate` asks at every call.
_READ: dict[type, tuple[Option, ...]] = {}


def options_of(cls: type) -> tuple[Option, ...]:
    """Every option of a configuration class: its own first, then those it inherits, then nested
    groups.
    """
    if cls not in _READ:
        _READ[cls] = tuple(sorted(_walk(cls), key=lambda option: "." in option.key))
    return _READ[cls]


def _walk(
    cls: type, prefix: str = "", rare: bool = False, identity: bool = True
) -> Iterator[Option]:
    """Yield the options of a configuration class, by class that declares them.

    rare, identity: inherited from the group that `cls` is in.
    """
    fields = dict(_fields(cls))
    for owner in cls.__mro__:
        section = "Options" if owner is cls and not prefix else _summary(cls if prefix else owner)
        for name in inspect.get_annotations(owner):
            field = fields.pop(name, None)
            if field is None:
                continue
            key = f"{prefix}{name}"
            group = field.annotation
            if part := next((mark for mark in field.metadata if isinstance(mark, PartOf)), None):
                yield from _part(part.config, name, _fields(cls))
                continue
            is_rare = rare or "rare" in field.metadata
            by_content = "by content" in field.metadata
            is_identity = identity and not by_content and "not identity" not in field.metadata
            if _is_group(group):
                yield from _walk(group, f"{key}.", is_rare, is_identity)
            else:
                required = field.is_required()
                yield Option(
                    key=key,
                    hint=group,
                    default=None if required else field.get_default(call_default_factory=True),
                    required=required,
                    help=" ".join((_fields(owner)[name].description or "").split()),
                    section=section,
                    rare=is_rare,
                    identity=is_identity,
                    by_content=by_content,
                    shown=_shown([*field.metadata, group]),
                    of=next((mark for mark in field.metadata if isinstance(mark, Of)), None),
                )


def _part(cls: type, name: str, taken: Iterable[str]) -> Iterator[Option]:
    """Yield the options of another command that a group may have. taken: names that are given
    without the group.
    """
    for option in options_of(cls):
        if not option.required and option.key not in taken:
            decides = option.identity or option.by_content
            part = replace(option, default=None, identity=decides, by_content=False, of=None)
            key = f"{name}.{option.key}"
            yield replace(part, key=key, part=name, section="Options of the stages")


def _shown(parts: Iterable[object]) -> str:
    """What a mark in a type says that stands for its values in the help."""
    for part in parts:
        if isinstance(part, Shown):
            return part
        if (shown := _shown(typing.get_args(part))) != "TEXT":
            return shown
    return "TEXT"


def _is_group(hint: object) -> typing.TypeGuard[type]:
    return dataclasses.is_dataclass(hint)


def _members(hint: object) -> list[object]:
    """The members of a union, None last and without bounds; any other type alone."""
    if typing.get_origin(hint) is Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) not in (Union, UnionType):
        return [hint]
    members = list(chain.from_iterable(map(_members, typing.get_args(hint))))
    return sorted(members, key=lambda member: member is NoneType)


def _summary(cls: type) -> str:
    """The first sentence of a docstring."""
    paragraph, _, _ = (cls.__doc__ or "").partition("\n\n")
    sentence, _, _ = " ".join(paragraph.split()).partition(". ")
    return sentence.rstrip(".:")


def identity(config: object) -> JsonObject:
    """The options that decide what a run makes, as plain values without secrets: all but those
    marked `NotIdentity` or `ByContent`.
    """
    return _values(config, lambda option: option.identity)


def known_by_content(config: object) -> JsonObject:
    """The options marked `ByContent`, as plain values without secrets."""
    return _values(config, lambda option: option.by_content)


def for_all(config: object) -> JsonObject:
    """The options that the processes of a run must share: all but those of one machine. Of those
    that are known by content, the hash of what is a file, and whether the others are given.
    """
    values = _values(config, lambda option: option.key not in _OF_ONE_MACHINE)
    for key, value in known_by_content(config).items():
        sources = value if isinstance(value, list) else [value]
        values[key] = hash_json([_content(source) for source in sources])
    return values


def _content(source: str | None) -> str | bool:
    if source is None or not os.path.isfile(source):
        return bool(source)
    return sha256_file(Path(source))


def _values(config: object, is_chosen: Callable[[Option], bool]) -> JsonObject:
    values: JsonObject = {}
    plain = without_secrets(asdict(config))  # type: ignore[call-overload]
    for option in filter(is_chosen, options_of(type(config))):
        value = value_at(plain, option.key)
        if value is not None or not option.part:
            put(values, option.key, value)
    return values


def command_line(command: str, config: object) -> str:
    """The command line that gives the options of `config`; those at their defaults are left out."""
    given = asdict(config)  # type: ignore[call-overload]
    words = ["draftsmith", command]
    for option in options_of(type(config)):
        value = value_at(given, option.key)
        if value != option.default:
            values = value if isinstance(value, list) else [value]
            words += [f"--{option.key}", *map(str, values)]
    return shlex.join(words)


def put(values: JsonObject, key: str, value: object) -> None:
    """Set a dotted key in nested dictionaries."""
    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


def value_at(values: object, key: str, default: object = None) -> object:
    """The value of a dotted key in nested dictionaries."""
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return default
        values = values[name]
    return values


@dataclass(frozen=True)
class Reason:
    """Why a configuration is invalid. line: begins with the dotted key."""

    key: str
    line: str


def reason_of(error: ValidationError) -> Reason:
    """The first error of a validation; a value that is wrong comes before one that is missing."""
    first = min(error.errors(), key=lambda each: each["type"] == "missing")
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        # Raised by a __post_init__, with the key in its message.
        line = f"{key}.{raised}" if key else str(raised)
        start, _, _ = line.partition(":")
        return Reason(start.removeprefix("--").split()[0], line)
    if first["type"] == "missing":
        return Reason(key, f"{key}: is missing")
    text = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    # Pydantic's "Input should be a valid number, unable to parse string as a number" says it twice.
    line = f"{key}: " + re.sub(r", (unable to|got a number with) .*", "", text)
    got = "null" if first["input"] is None else repr(first["input"])[:200]
    return Reason(key, f"{line}, got {got}")
