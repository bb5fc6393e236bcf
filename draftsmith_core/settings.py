"""How tokens are sampled and models are loaded, without torch, so that options are checked before anything loads.

What the user leaves open comes from the target's generation_config.json, key by key, as in transformers' `generate` and
vLLM. Keys of that file that change outputs and are not followed here are named in one warning.
"""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypedDict

from draftsmith_core.errors import InputError

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution to draw tokens from: temperature, then top-k, top-p and min-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature} is not a finite number >= 0")
        if 0 < self.temperature < MIN_TEMPERATURE:
            # Logits divided by less can leave the range of fp32 and give NaN.
            raise ValueError(f"temperature: {self.temperature} is below {MIN_TEMPERATURE}; use 0 for greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative; use 0 to keep the whole vocabulary")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]; use 1 to keep everything")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: {self.min_p} is not in [0, 1]; use 0 to keep everything")

    @property
    def greedy(self) -> bool:
        """True when the distribution is a point mass on the most probable token."""
        return self.temperature == 0


Quantize = Literal["none", "nf4"]


class LoadingOptions(TypedDict):
    """Where and in what dtype a model is loaded, and whether code that comes with it may run."""

    device: str
    dtype: str
    trust_remote_code: bool


def loading(config: Any) -> LoadingOptions:
    """Of the options of a command, those that `load_model` and `load_pair` take."""
    return {"device": config.device, "dtype": config.dtype, "trust_remote_code": config.trust_remote_code}


log = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Keys that are followed, and keys that cannot change which tokens a causal model's `generate` gives (the longest output
# is an option of every command; those that act on beams alone come with `num_beams`, which is named).
_HARMLESS = frozenset(
    """
    temperature top_k top_p min_p do_sample eos_token_id bos_token_id pad_token_id decoder_start_token_id
    max_length max_new_tokens num_return_sequences return_dict_in_generate transformers_version trust_remote_code
    output_attentions output_hidden_states output_scores output_logits use_cache cache_implementation cache_config
    max_cache_len is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size
    speculation_type use_mtp compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size
    early_stopping length_penalty num_beam_groups diversity_penalty
    """.split()
)
# Values that switch a key off, beside None, False and the empty ones.
_OFF = {
    "assistant_ensemble_weight": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "top_h": 1,
    "typical_p": 1,
}


class Configured(Protocol):
    """What has a generation config: a model that is loaded, or the settings of one that runs on a server."""

    @property
    def generation_config(self) -> Any:
        """An object like `transformers.GenerationConfig`."""


@dataclass(frozen=True)
class ResolvedSampling:
    """The sampling to use, and which of its values (by name) are from the target's generation_config.json."""

    sampling: Sampling
    from_target: dict[str, float]

    @property
    def note(self) -> str:
        """For people: "temperature 0.6, top_p 0.9 from the target's generation_config.json"; empty when nothing is."""
        values = ", ".join(f"{key} {value:g}" for key, value in self.from_target.items())
        return f"{values} from the target's generation_config.json" if values else ""


def sampling_options(config: Any) -> dict[str, Any]:
    """Of the options of a command, those that `resolve_sampling` takes."""
    return {key: getattr(config, key) for key in _SAMPLING}


def resolve_sampling(
    name: str,
    target: Configured,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    default_temperature: float = 0.0,
) -> ResolvedSampling:
    """The options that were given, and for those that are None the generation config of the target `name`.

    A file that does not say `do_sample: true` leaves the temperature at `default_temperature`, as long as that is 0;
    a command that samples by default takes the file's temperature either way. Without sampling the other three are
    not looked up. Raises InputError for values that no sampling can have, naming the file when they are from there.
    """
    config: Any = target.generation_config
    warn_ignored(name, target)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    samples = default_temperature > 0 or bool(getattr(config, "do_sample", None))
    if temperature is not None:
        samples = temperature > 0
    values: dict[str, float] = {key: value for key, value in given.items() if value is not None}
    file = {key: getattr(config, key, None) for key in _SAMPLING if given[key] is None and samples}
    taken = {key: value for key, value in file.items() if value is not None}
    for key, value in taken.items():
        if isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float):
            raise InputError(f"{name}/generation_config.json: {key}: expected a number, found {value!r}")
    values = {"temperature": (default_temperature or 1.0) if samples else 0.0} | taken | values
    try:
        return ResolvedSampling(Sampling(**values), taken)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        key = str(error).partition(":")[0]
        place = f"{name}/generation_config.json: " if key in taken or isinstance(error, TypeError) else ""
        raise InputError(f"{place}{error}") from None


def ignored_keys(target: Configured) -> dict[str, Any]:
    """What the target's generation config sets that changes the output of `generate` and is not followed here."""
    config: Any = target.generation_config
    if config is None:
        return {}
    return {
        key: value
        for key, value in config.to_diff_dict().items()
        if not (key.startswith("_") or key in _HARMLESS)
        and not (value is None or value is False or value in ([], {}, ""))
        and not (key in _OFF and value == _OFF[key])
    }


def warn_ignored(name: str, target: Configured) -> None:
    """One warning per target that names what `ignored_keys` finds."""
    ignored = ignored_keys(target)
    if ignored:
        _warn(name, ", ".join(f"{key}={_short(value)}" for key, value in sorted(ignored.items())))


@cache
def _warn(name: str, keys: str) -> None:
    log.warning("%s: its generation_config.json sets %s; this is ignored here, and `generate` follows it", name, keys)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."
