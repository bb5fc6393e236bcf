"""How tokens are sampled and models are loaded, without torch, so that options are checked before
anything loads.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

from draftsmith.core.errors import InputError, warn_once
from draftsmith.core.io import JsonObject, read_words

MIN_TEMPERATURE = 1e-5
# Options of a distribution, which a target's generation config may have too.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Of them those that need the text, with the value that is off.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution to draw tokens from: penalties (`core.penalties`), temperature, then top-k,
    top-p and min-p. Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        # Logits divided by a smaller temperature can leave the range of fp32 and give NaN.
        possible = {
            "temperature": self.greedy or MIN_TEMPERATURE <= self.temperature < math.inf,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
        }
        for key in possible:
            if not possible[key]:
                raise ValueError(f"{key}: cannot be {getattr(self, key)}")

    @property
    def greedy(self) -> bool:
        """True when the distribution is a point mass on the most probable token."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether probabilities depend on the tokens that the text holds."""
        return any(getattr(self, key) != off for key, off in PENALTIES.items())

    def record(self) -> dict[str, float]:
        """Return all that files keep: temperature and filters, and the penalties that are on."""
        values: dict[str, float] = asdict(self)
        on = {key: values[key] for key in PENALTIES if values[key] != PENALTIES[key]}
        return {key: values[key] for key in _SAMPLING} | on


def device_map_called(value: str) -> str:
    """Return where a target's layers go, as it is. Raise ValueError for what is not a way."""
    if not re.fullmatch(r"auto(:\d*\.?\d+)?", value):
        raise ValueError("must be auto, or auto:GIB for so much of each device")
    return value


class HasGenerationConfig(Protocol):
    """A model, or what stands for one that runs elsewhere."""

    generation_config: Any


Quantize = Literal["none", "nf4"]
# Options for a target that fits no device.
LARGE = ("target_parallel", "target_device_map")


def loading(config: object) -> JsonObject:
    """Return the options that `load_model` and `load_models` take for a command's target."""
    keys = ("device", "dtype", "trust_remote_code", "revision", *LARGE)
    return {key: getattr(config, key) for key in keys if hasattr(config, key)}


def tokenizing(config: object) -> JsonObject:
    """Return the options that `load_tokenizer` takes for a command's target."""
    return {key: getattr(config, key) for key in ("trust_remote_code", "chat_template", "revision")}


Given: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True)
class ResolvedSampling:
    """The sampling to use, and which of its values (by name) are from the target's
    generation_config.json.
    """

    sampling: Sampling
    from_target: dict[str, float]

    @property
    def note(self) -> str:
        """For people: "temperature 0.6, top_p 0.9 from the target's generation_config.json"; may be
        empty.
        """
        if not self.from_target:
            return ""
        values = [f"{key} {value:g}" for key, value in self.from_target.items()]
        return f"{', '.join(values)} from the target's generation_config.json"


def sampling_options(config: object) -> JsonObject:
    """Return what a command was given for `resolve_sampling`. Distilling takes no penalties."""
    return {key: getattr(config, key) for key in (*_SAMPLING, *PENALTIES) if hasattr(config, key)}


def resolve_sampling(
    name: str,
    target: HasGenerationConfig,
    given: Given,
    *,
    default_temperature: float = 0.0,
) -> ResolvedSampling:
    """The given options; for those that are missing or None, as in `generate` and vLLM, the
    generation config of target `name`.

    Without `do_sample: true` in that file the temperature is `default_temperature` if that is 0; a
    command that samples by default takes the file's temperature either way. Without sampling the
    filters are not looked up. Penalties are followed if `given` has their keys.
    """
    config = target.generation_config
    say_ignored(name, target, followed=given)
    temperature = given.get("temperature")
    samples = default_temperature > 0 or bool(getattr(config, "do_sample", None))
    if temperature is not None:
        samples = temperature > 0
    values: dict[str, float] = {"temperature": (default_temperature or 1.0) if samples else 0.0}
    taken: dict[str, float] = {}
    for key in (*_SAMPLING, *PENALTIES):
        value = given.get(key)
        in_file = getattr(config, key, None)
        follows = key in given if key in PENALTIES else samples
        if value is not None:
            values[key] = value
        elif follows and in_file not in (None, PENALTIES.get(key)):
            taken[key] = in_file
    try:
        return ResolvedSampling(Sampling(**values | taken), taken)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        key, _, _ = str(error).partition(":")
        from_file = key in taken or isinstance(error, TypeError)
        file = f"{name}/generation_config.json: " if from_file else ""
        raise InputError(f"{file}{error}") from None


def say_ignored(name: str, target: HasGenerationConfig, followed: Collection[str] = ()) -> None:
    """Warn, once a model, of what its generation config sets and decoding does not follow."""
    ignored = {key: value for key, value in ignored_keys(target).items() if key not in followed}
    if ignored:
        keys = [f"{key}={str(value)[:30]}" for key, value in sorted(ignored.items())]
        warn_once(
            f"{name}: its generation_config.json sets {', '.join(keys)}; this is ignored here, and "
            "`generate` follows it"
        )


def ignored_keys(target: HasGenerationConfig) -> dict[str, object]:
    """Return the keys of the target's generation config that change the output of `generate` and
    are ignored here.
    """
    ignored: dict[str, object] = {}
    for key, off in read_words(__file__)["ignored"].items():
        value = getattr(target.generation_config, key, None)
        if value is not None and value is not False and value not in ([], {}, off):
            ignored[key] = value
    return ignored
