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
result, `ByContent[...]` a place whose content a run's identity holds instead of its name, so that
a moved run resumes. The first sentence of an inherited or nested class is the heading of its
section.
`Annotated[dict[str, Any], Given(DistillConfig)]` nests another config's options.
"""

import dataclasses
import difflib
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform

import pydantic.dataclasses
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from typing_extensions import TypedDict

from draftsmith_core.errors import InputError, without_secrets
from draftsmith_core.settings import MIN_TEMPERATURE

C = TypeVar("C")
T = TypeVar("T")


class Given:
    """Marker: a dict of options for an inner config, with only the keys that the user set.

    without: fields that the outer config sets. shown: options for the short --help.
    """

    def __init__(
        self, config: type, *, without: Sequence[str] = (), shown: Sequence[str] = ()
    ) -> None:
        self.config = config
        self.without = without
        self.shown = shown

    def __get_pydantic_core_schema__(
        self, marked: object, handler: GetCoreSchemaHandler
    ) -> Mapping[str, object]:
        """Check the values by the config's types, without nulls: they leave an option open."""
        partial = partial_of(self.config, self.without)
        return handler.generate_schema(Annotated[partial, BeforeValidator(_without_nulls)])


def _without_nulls(values: object) -> object:
    if not isinstance(values, dict):
        return values
    return {key: _without_nulls(value) for key, value in values.items() if value is not None}


def partial_of(config: type, without: Sequence[str] = ()) -> type:
    """Return a TypedDict of the fields of a config, none of them required."""
    types: dict[str, object] = {}
    hints = typing.get_type_hints(config, include_extras=True)
    for name in _field_names(config):
        if name not in without:
            group = _split(hints[name]).hint
            types[name] = partial_of(group) if _is_group(group) else hints[name]
    partial = TypedDict("partial", types, total=False)  # type: ignore[misc]
    partial.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return typing.cast(type, partial)


def _field_names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


NotIdentity = Annotated[T, "not identity"]
ByContent = Annotated[T, "by content"]
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
    settings = ConfigDict(extra="forbid", allow_inf_nan=False)
    decorate = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)
    decorated = typing.cast(type[C], decorate(cls))
    validating_init: Callable[..., None] = decorated.__init__

    @functools.wraps(validating_init)
    def init(self: C, **values: object) -> None:
        try:
            validating_init(self, **{key: _plain(value) for key, value in values.items()})
        except ValidationError as error:
            raise InputError(_unknown_option(cls, error) or reason_of(error).line) from None

    decorated.__init__ = init  # type: ignore[method-assign, assignment]
    return decorated


def _unknown_option(cls: type, error: ValidationError) -> str | None:
    """Return a line that names the option nearest to one that the class lacks, if one is given."""
    for each in error.errors():
        if each["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            key = ".".join(map(str, each["loc"]))
            near = nearest_option(key, [option.key for option in options_of(cls)])
            fix = f"did you mean {near}?" if near else f"help({cls.__name__}) lists them"
            return f"{key}: no option of {cls.__name__}; {fix}"
    return None


# What other tools call an option, by our names for it, the likeliest first.
_CALLED: list[tuple[Sequence[str], str]] = [
    (
        ("epochs", "steps"),
        "num_train_epochs num_epochs n_epochs train_epochs max_epochs epochs",
    ),
    (
        ("steps",),
        "max_steps num_steps total_steps train_steps training_steps max_train_steps "
        "num_training_steps iterations max_iters",
    ),
    (("optim.lr",), "learning_rate"),
    (("optim.schedule",), "lr_scheduler_type lr_scheduler lr_schedule scheduler"),
    (("optim.warmup_steps",), "warmup warmup_ratio num_warmup_steps"),
    (("optim.name",), "optimizer optim"),
    (("optim.clip_norm",), "max_grad_norm gradient_clipping grad_clip clip_grad_norm"),
    (("optim.beta1",), "adam_beta1"),
    (("optim.beta2",), "adam_beta2"),
    (
        ("train.batch_size", "batch_size"),
        "per_device_train_batch_size train_batch_size micro_batch_size",
    ),
    (("batch_size",), "batch bs"),
    (("eval.batch_size", "batch_size"), "per_device_eval_batch_size eval_batch_size"),
    (("rows_per_step", "accumulation"), "gradient_accumulation_steps grad_accum"),
    (("rows_per_step", "batch_size"), "global_batch_size total_batch_size"),
    (("gradient_checkpointing",), "activation_checkpointing recompute"),
    (
        ("max_length", "max_new_tokens"),
        "max_seq_length max_seq_len seq_length seq_len model_max_length cutoff_len max_length",
    ),
    (
        ("max_new_tokens", "max_length"),
        "max_tokens max_completion_length max_response_length max_output_tokens new_tokens",
    ),
    (("num_samples",), "n num_return_sequences num_generations samples_per_prompt best_of"),
    (
        ("out",),
        "output_dir output output_path output_file output_directory out_dir save_dir save_path o",
    ),
    (
        ("target",),
        "model model_name model_path model_id model_name_or_path target_model teacher "
        "teacher_model teacher_model_name_or_path",
    ),
    (("target", "base"), "base_model"),
    (
        ("draft",),
        "draft_model draft_model_name_or_path drafts drafter assistant assistant_model "
        "speculative_model speculative_draft_model_path student student_model",
    ),
    (
        ("data", "prompts", "id"),
        "dataset dataset_name dataset_path train_file train_data train_dataset training_data "
        "data_path data_files input input_file",
    ),
    (("prompts", "id", "data"), "data prompts prompt prompt_file prompts_file questions"),
    (("id",), "id_prompts eval_prompts"),
    (("ood",), "ood_prompts"),
    (("heldout", "id"), "validation_file eval_file eval_data eval_dataset test_file"),
    (
        ("heldout_fraction", "heldout_prompts"),
        "val_split validation_split validation_split_percentage test_size heldout",
    ),
    (
        ("max_prompts",),
        "limit num_prompts n_prompts num_examples max_examples max_samples max_rows "
        "max_train_samples",
    ),
    (("eval.max_prompts", "max_prompts"), "max_eval_samples"),
    (("replay_fraction",), "replay_ratio"),
    (("eval_every",), "eval_steps evaluation_steps eval_interval"),
    (("save_every",), "save_steps save_interval"),
    (("keep",), "save_total_limit"),
    (("patience",), "early_stopping early_stopping_patience"),
    (("precision", "dtype"), "bf16 fp16 mixed_precision amp"),
    (("dtype",), "torch_dtype precision"),
    (("quantize",), "load_in_4bit load_in_8bit quantization"),
    (("device",), "device_map cuda gpu gpus"),
    (("temperature",), "temp t"),
    (("stop",), "stop_strings stop_words"),
    (
        ("tree",),
        "num_speculative_tokens num_draft_tokens num_assistant_tokens speculative_num_steps "
        "speculative_num_draft_tokens draft_tokens draft_length draft_len depth gamma k",
    ),
    (("objective",), "loss loss_type loss_fn loss_function criterion divergence"),
    (("tracker",), "report_to logger log_with wandb use_wandb"),
    (("project",), "wandb_project project_name"),
    (("push_to_hub",), "hub_model_id hub_repo_id repo_id"),
    (("num_layers",), "layers n_layers num_hidden_layers"),
    (("draft_vocab_size",), "vocab_size draft_vocab"),
    (("base",), "baseline reference"),
    (("proposer", "method", "kind"), "method algorithm kind"),
    (("endpoint", "served"), "base_url api_base server server_url url"),
    (("concurrency",), "max_concurrency"),
    (("tensor_parallel_size",), "tp tensor_parallel tp_size"),
    (("seed",), "random_seed"),
    (("tokenizer",), "tokenizer_name"),
    (("config",), "config_file yaml recipe"),
]
_MEANT = {name: ours for ours, names in _CALLED for name in names.split()}
# How alike an unknown name and the suggested one are.
_ALIKE = 0.7


def nearest_option(key: str, known: Sequence[str], dashes: str = "") -> str | None:
    """Return the known dotted keys nearest to an unknown one, each after `dashes`, in words; None
    if none is near.

    A name of another tool stands for its meaning. Otherwise the spelling decides.
    """
    return " or ".join(f"{dashes}{name}" for name in _nearest_options(key, known)) or None


def _nearest_options(key: str, known: Sequence[str]) -> list[str]:
    # `lrr` means `optim.lr`: the part behind the dot is what people remember.
    last = _last(key).lower()
    if same := [name for name in known if _last(name) == last]:
        return difflib.get_close_matches(key, same, n=1) if "." in key else same
    for ours in _MEANT.get(last, ()):
        if ours in known:
            return [ours]
        if inner := [name for name in known if name.endswith(f".{ours}")]:
            return inner
    if last in _MEANT:
        return []
    near = difflib.get_close_matches(last, [_last(name) for name in known], n=1, cutoff=_ALIKE)
    if near:
        return [name for name in known if _last(name) == near[0]]
    return difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def configured(cls: type[C], config: C | None, given: Mapping[str, Any]) -> C:
    """Return `config` with `given` replaced; build one from `given` alone if `config` is None."""
    if config is None:
        return cls(**given)
    if not isinstance(config, cls):
        name = cls.__name__
        kind = type(config).__name__
        raise TypeError(f"expected {name}(...) or options by name (**options), got a {kind}")
    return dataclasses.replace(config, **given) if given else config  # type: ignore[type-var]


def refuse_unused(config: object, unused: Mapping[str, str], group: str = "") -> None:
    """Raise InputError for an option that was set although nothing reads it.

    unused: the reason by option. An option is set if it differs from its default. group: of the
    options, with its dot.
    """
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.name in unused and getattr(config, field.name) != default:
            key = f"{group}{field.name}"
            raise InputError(f"{key}: is not read: {unused[field.name]}; leave it out")


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

    device: NotIdentity[str] = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Rare[str] = "auto"
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


@dataclass(frozen=True)
class Option:
    """One option of a command, with dotted key, for parsing, help, completion and the
    documentation.
    """

    key: str
    hint: object
    default: object
    help: str
    section: str
    rare: bool
    identity: bool
    by_content: bool

    @property
    def nullable(self) -> bool:
        return NoneType in parts(self.hint)

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return typing.get_origin(self._value_type) is list

    @property
    def switch(self) -> bool:
        """Whether it may stand without a value."""
        return self._item_type is bool

    @property
    def choices(self) -> list[str]:
        item = self._item_type
        return list(typing.get_args(item)) if typing.get_origin(item) is Literal else []

    @property
    def metavar(self) -> str:
        """What stands for its value in the help."""
        names = {int: "N", float: "F", bool: "true|false"}
        return "|".join(self.choices) or names.get(self._item_type, "TEXT")  # type: ignore[call-overload]

    @property
    def _value_type(self) -> object:
        return next(part for part in parts(self.hint) if part is not NoneType)

    @property
    def _item_type(self) -> object:
        """The type of a value; of a list, that of its items."""
        value = self._value_type
        return parts(typing.get_args(value)[0])[0] if self.many else value

    @property
    def default_text(self) -> str:
        """The default as it is typed; empty if there is nothing to say."""
        if isinstance(self.default, list):
            return " ".join(map(str, self.default))
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default is None else str(self.default)


def options_of(cls: type) -> list[Option]:
    """Every option of a configuration class: its own first, then those it inherits, then nested
    groups.
    """
    return sorted(_walk(cls), key=lambda option: "." in option.key)


def _walk(
    cls: type, prefix: str = "", rare: bool = False, identity: bool = True
) -> Iterator[Option]:
    """Yield the options of a configuration class, by class that declares them.

    rare, identity: inherited from the group that `cls` is in.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for owner in cls.__mro__:
        helps = _field_docstrings(owner)
        if prefix:
            section = _summary(cls)
        else:
            section = "Options" if owner is cls else _summary(owner)
        for name in inspect.get_annotations(owner):
            field = fields.pop(name, None)
            if field is None:
                continue
            marked = _split(hints[name])
            is_rare = rare or "rare" in marked.marks
            is_identity = identity and not {"not identity", "by content"} & set(marked.marks)
            given = next((mark for mark in marked.marks if isinstance(mark, Given)), None)
            if given is not None:
                yield from _given_options(name, given)
            elif _is_group(marked.hint):
                yield from _walk(marked.hint, f"{prefix}{name}.", is_rare, is_identity)
            else:
                default = field.default
                if field.default_factory is not MISSING:
                    default = field.default_factory()
                yield Option(
                    key=f"{prefix}{name}",
                    hint=marked.hint,
                    default=default,
                    help=helps.get(name, ""),
                    section=section,
                    rare=is_rare,
                    identity=is_identity,
                    by_content="by content" in marked.marks,
                )


def _given_options(name: str, given: Given) -> Iterator[Option]:
    for option in _walk(given.config, f"{name}."):
        inner = option.key.removeprefix(f"{name}.")
        if inner.partition(".")[0] not in given.without:
            yield dataclasses.replace(option, default=None, rare=inner not in given.shown)


@dataclass(frozen=True)
class _Marked:
    """A type without its outer marks, and the marks."""

    hint: Any
    marks: tuple[object, ...]


def _split(hint: Any) -> _Marked:
    if typing.get_origin(hint) is Annotated:
        return _Marked(hint.__origin__, hint.__metadata__)
    return _Marked(hint, ())


def _is_group(hint: object) -> typing.TypeGuard[type]:
    return dataclasses.is_dataclass(hint)


def parts(hint: object) -> list[object]:
    """The members of a union, without bounds."""
    plain = _split(hint).hint
    if typing.get_origin(plain) not in (Union, UnionType):
        return [plain]
    members: list[object] = []
    for member in typing.get_args(plain):
        members += parts(member)
    return members


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
    paragraph, _, _ = (cls.__doc__ or "").partition("\n\n")
    sentence, _, _ = " ".join(paragraph.split()).partition(". ")
    return sentence.rstrip(".:")


def identity(config: object) -> dict[str, Any]:
    """The options that decide what a run makes, as plain values without secrets: all but those
    marked `NotIdentity` or `ByContent`.
    """
    return _values(config, [option for option in options_of(type(config)) if option.identity])


def places(config: object) -> dict[str, Any]:
    """The options marked `ByContent`, as plain values without secrets."""
    return _values(config, [option for option in options_of(type(config)) if option.by_content])


def _values(config: object, chosen: Sequence[Option]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    plain = without_secrets(dataclasses.asdict(config))  # type: ignore[call-overload]
    for option in chosen:
        put(values, option.key, value_at(plain, option.key))
    return values


def put(values: dict[str, Any], key: str, value: object) -> None:
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
    line += f", got {got}"
    if first["type"] == "list_type" and isinstance(first["input"], str):
        line += f"; write [{got}]"
    return Reason(key, line)
