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
result. The first sentence of an inherited or nested class is the heading of its section.
`Annotated[dict[str, Any], Given(DistillConfig)]` nests another config's options.
"""

import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from draftsmith_core.errors import InputError, without_secrets
from draftsmith_core.settings import MIN_TEMPERATURE

C = TypeVar("C")
T = TypeVar("T")


class Given:
    """Marks a dict that holds those options of other configs that were given.

    without: fields that the outer config sets. shown: options for the short --help.
    """

    def __init__(
        self, *configs: type, without: Sequence[str] = (), shown: Sequence[str] = ()
    ) -> None:
        self.configs, self.without, self.shown = configs, without, shown

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Check the values by the types of the configs; a null leaves the option open."""
        partial: Any = Annotated[
            partial_of(self.configs, self.without), BeforeValidator(_without_nulls)
        ]
        return handler.generate_schema(partial)


def _without_nulls(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: _without_nulls(value) for key, value in values.items() if value is not None}


def partial_of(configs: Sequence[Any], without: Sequence[str] = ()) -> Any:
    """A TypedDict of the fields of configs, none of them required."""
    types: dict[str, Any] = {}
    for config in configs:
        hints = typing.get_type_hints(config, include_extras=True)
        for name in [
            field.name for field in dataclasses.fields(config) if field.name not in without
        ]:
            group, _ = _split(hints[name])
            types[name] = partial_of([group]) if dataclasses.is_dataclass(group) else hints[name]
    partial: Any = TypedDict("partial", types, total=False)  # type: ignore[misc]
    partial.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return partial


NotIdentity = Annotated[T, "not identity"]
Rare = Annotated[T, "rare"]


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
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
Text = Annotated[str, Field(min_length=1)]
Out = Annotated[Text, AfterValidator(os.path.expanduser)]


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def options(cls: type[C]) -> type[C]:
    """Make a configuration class of a command or a group; see the module."""
    decorated: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )(cls)
    validating_init = decorated.__init__

    @functools.wraps(validating_init)
    def init(self: Any, **values: Any) -> None:
        try:
            validating_init(self, **{key: _plain(value) for key, value in values.items()})
        except ValidationError as error:
            raise InputError(reason_of(error)[1]) from None

    decorated.__init__ = init
    return typing.cast(type[C], decorated)


def configured(cls: type[C], config: C | None, given: dict[str, Any]) -> C:
    """The configuration of a call: made of the given options, or `config` with these laid over
    it.
    """
    if config is None:
        return cls(**given)
    return (
        typing.cast(C, dataclasses.replace(typing.cast(Any, config), **given)) if given else config
    )


def _plain(value: Any) -> Any:
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

    device: NotIdentity[str] = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """Weights: auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."""


@options
class TargetOptions(ModelOptions, RevisionOptions):
    """How models are loaded."""

    chat_template: Rare[str | None] = None
    """Jinja file with a chat template, in place of the one in the target's tokenizer."""


@options
class SamplingOptions:
    """How tokens are sampled."""

    temperature: Temperature | None = None
    """0 is greedy. Default: the target's generation_config.json if that samples, else 0."""
    top_k: AtLeast0 | None = None
    """Keep the k most probable tokens; 0 keeps all. Default: generation_config.json, else 0."""
    top_p: TopP | None = None
    """Keep the smallest set of tokens with this mass; 1 keeps all. Default: generation_config.json,
    else 1.
    """
    min_p: Rare[Share | None] = None
    """Keep tokens of at least this share of the greatest probability. Default:
    generation_config.json, else 0.
    """


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
    """Base seed. Each output derives its own seed from it."""


@dataclasses.dataclass
class Option:
    """One option of a command, with dotted key, for parsing, help, completion and the
    documentation.
    """

    key: str
    hint: Any
    default: Any
    help: str
    section: str
    rare: bool
    identity: bool

    def __post_init__(self) -> None:
        item = next(part for part in parts(self.hint) if part is not NoneType)
        self.many = typing.get_origin(item) is list  # whether it takes several values
        item = parts(typing.get_args(item)[0])[0] if self.many else item
        self.switch = item is bool  # whether it may stand without a value
        self.choices = list(typing.get_args(item)) if typing.get_origin(item) is Literal else []
        self.kind = "|".join(self.choices) or {int: "N", float: "F", bool: "true|false"}.get(
            item, "TEXT"
        )

    @property
    def default_text(self) -> str:
        """The default as it is typed; empty if there is nothing to say."""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        return (
            ""
            if self.default is None
            else str(self.default).replace("True", "true").replace("False", "false")
        )


def options_of(cls: type) -> list[Option]:
    """Every option of a configuration class: its own first, then those it inherits, then nested
    groups.
    """
    return sorted(_walk(cls), key=lambda option: "." in option.key)


def _walk(
    cls: type, prefix: str = "", rare: bool = False, same: bool = True, without: Sequence[str] = ()
) -> Iterator[Option]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for owner in cls.__mro__:
        helps = _field_docstrings(owner)
        for name in [
            name
            for name in inspect.get_annotations(owner)
            if name in fields and name not in without
        ]:
            hint, marks = _split(hints[name])
            is_rare = rare or "rare" in marks
            is_identity = same and "not identity" not in marks
            field = fields.pop(name)
            if dataclasses.is_dataclass(hint):
                yield from _walk(typing.cast(type, hint), f"{prefix}{name}.", is_rare, is_identity)
                continue
            if given := next((mark for mark in marks if isinstance(mark, Given)), None):
                for option in [
                    o
                    for c in given.configs
                    for o in _walk(c, f"{name}.", rare, same, given.without)
                ]:
                    shown = option.key.partition(".")[2] in given.shown
                    yield dataclasses.replace(option, default=None, rare=not shown)
                continue
            default = field.default if field.default_factory is MISSING else field.default_factory()
            section = (
                "Options" if owner is cls and not prefix else _summary(owner if not prefix else cls)
            )
            yield Option(
                f"{prefix}{name}", hint, default, helps.get(name, ""), section, is_rare, is_identity
            )


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its outer marks, and the marks."""
    return (
        (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())
    )


def parts(hint: Any) -> list[Any]:
    """The members of a union, without bounds."""
    plain, _ = _split(hint)
    is_union = typing.get_origin(plain) in (Union, UnionType)
    return (
        [part for member in typing.get_args(plain) for part in parts(member)]
        if is_union
        else [plain]
    )


@functools.cache
def _field_docstrings(cls: type) -> dict[str, str]:
    from docstring_parser import parse_from_object

    if not dataclasses.is_dataclass(cls):
        return {}
    return {
        item.arg_name: " ".join((item.description or "").split())
        for item in parse_from_object(cls).params
    }


def _summary(cls: type) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def identity(config: Any) -> dict[str, Any]:
    """The options that decide what a run makes, as plain values without secrets: all but those
    marked `NotIdentity`.
    """
    values: dict[str, Any] = {}
    plain = without_secrets(dataclasses.asdict(config))
    for option in options_of(type(config)):
        if option.identity:
            put(values, option.key, value_at(plain, option.key))
    return values


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries."""
    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


def value_at(values: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key in nested dictionaries."""
    try:
        return functools.reduce(lambda group, name: group[name], key.split("."), values)
    except (KeyError, TypeError):
        return default


def reason_of(error: ValidationError) -> tuple[str, str]:
    """The dotted key of the first error of a validation, and one line that begins with it."""
    first = error.errors()[0]
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    if isinstance(raised := first.get("ctx", {}).get("error"), InputError):
        # Raised by a __post_init__, with the key in its message.
        line = f"{key}.{raised}" if key else str(raised)
        return line.partition(":")[0].removeprefix("--").split()[0], line
    got = "null" if first["input"] is None else repr(first["input"])[:200]
    # Pydantic's "Input should be a valid number, unable to parse string as a number" says it twice.
    text = re.sub(
        r", (unable to|got a number with) .*", "", first["msg"].removeprefix("Value error, ")
    )
    return key, f"{key}: {text.replace('Input should', 'must', 1)}" + (
        "" if "missing" in first["type"] else f", got {got}"
    )
