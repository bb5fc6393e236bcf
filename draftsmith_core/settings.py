"""How tokens are sampled and models are loaded, without torch, so that options are checked before
anything loads.
"""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from draftsmith_core.errors import InputError

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution to draw tokens from: temperature, then top-k, top-p and min-p. Temperature 0
    is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Logits divided by a smaller temperature can leave the range of fp32 and give NaN.
        for key, possible in (
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            ),
            ("top_k", self.top_k >= 0),
            ("top_p", 0 < self.top_p <= 1),
            ("min_p", 0 <= self.min_p <= 1),
        ):
            if not possible:
                raise ValueError(f"{key}: cannot be {getattr(self, key)}")

    @property
    def greedy(self) -> bool:
        """True when the distribution is a point mass on the most probable token."""
        return self.temperature == 0


Quantize = Literal["none", "nf4"]


def loading(config: Any) -> dict[str, Any]:
    """Return the options that `load_model` and `load_models` take for a command's target."""
    return {
        key: getattr(config, key) for key in ("device", "dtype", "trust_remote_code", "revision")
    }


def tokenizing(config: Any) -> dict[str, Any]:
    """Return the options that `load_tokenizer` takes for a command's target."""
    return {key: getattr(config, key) for key in ("trust_remote_code", "chat_template", "revision")}


_warn_once = cache(logging.getLogger(__name__).warning)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Keys of a generation config that change what `generate` gives and are not followed here, by the
# value that is off.
_IGNORED = {
    None: "bad_words_ids begin_suppress_tokens exponential_decay_length_penalty "
    "forced_bos_token_id sequence_bias "
    "forced_eos_token_id stop_strings suppress_tokens watermarking_config",
    0: "assistant_ensemble_weight encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff "
    "min_length min_new_tokens "
    "no_repeat_ngram_size penalty_alpha renormalize_logits",
    1: "encoder_repetition_penalty guidance_scale num_beams repetition_penalty top_h typical_p",
}


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
        values = ", ".join(f"{key} {value:g}" for key, value in self.from_target.items())
        return f"{values} from the target's generation_config.json" if values else ""


def sampling_options(config: Any) -> dict[str, Any]:
    """Return the options that `resolve_sampling` takes."""
    return {key: getattr(config, key) for key in _SAMPLING}


def resolve_sampling(
    name: str,
    target: Any,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    default_temperature: float = 0.0,
) -> ResolvedSampling:
    """The given options; for those that are None, as in `generate` and vLLM, the generation config
    of target `name`.

    Without `do_sample: true` in that file the temperature is `default_temperature` if that is 0; a
    command that samples by default takes the file's temperature either way. Without sampling the
    other three are not looked up.
    """
    config: Any = target.generation_config
    if ignored := ignored_keys(target):
        keys = ", ".join(f"{key}={str(value)[:30]}" for key, value in sorted(ignored.items()))
        _warn_once(
            f"{name}: its generation_config.json sets {keys}; this is ignored here, and "
            "`generate` follows it"
        )
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    samples = default_temperature > 0 or bool(getattr(config, "do_sample", None))
    if temperature is not None:
        samples = temperature > 0
    values: dict[str, float] = {key: value for key, value in given.items() if value is not None}
    file = {key: getattr(config, key, None) for key in _SAMPLING if given[key] is None and samples}
    taken = {key: value for key, value in file.items() if value is not None}
    values = {"temperature": (default_temperature or 1.0) if samples else 0.0} | taken | values
    try:
        return ResolvedSampling(Sampling(**values), taken)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        from_file = str(error).partition(":")[0] in taken or isinstance(error, TypeError)
        place = f"{name}/generation_config.json: " if from_file else ""
        raise InputError(f"{place}{error}") from None


def ignored_keys(target: Any) -> dict[str, Any]:
    """Return the keys of the target's generation config that change the output of `generate` and
    are ignored here.
    """
    off = {key: value for value, keys in _IGNORED.items() for key in keys.split()}
    values = {key: getattr(target.generation_config, key, None) for key in off}
    return {
        key: value
        for key, value in values.items()
        if not (value is None or value is False or value in ([], {}) or value == off[key])
    }
