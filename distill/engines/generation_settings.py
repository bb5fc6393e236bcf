"""The distribution that a run draws from, and what a target that is not loaded here says of it."""

from transformers import GenerationConfig

from distill.config import DistillConfig
from draftsmith_core.generation_defaults import Configured, ResolvedSampling, resolve_sampling, sampling_options
from draftsmith_core.models import end_tokens
from draftsmith_core.tokenization import Tokenizer


def sampling_of(config: DistillConfig, target: Configured) -> ResolvedSampling:
    """What the options give, and for those that are left open the target's generation config, else temperature 1."""
    options = sampling_options(config)
    if mixture := [temperature for temperature, _ in config.mixture()]:
        options["temperature"] = max(mixture)
    return resolve_sampling(config.target, target, **options, default_temperature=1.0)


class GenerationSettings:
    """The generation config of a target that is not loaded, as `sampling_of` reads it from a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.generation_config = GenerationConfig.from_pretrained(name)
        except OSError:  # a tokenizer alone: the target asks for nothing
            self.generation_config = GenerationConfig()

    def eos_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens that end an answer; the first is put where a server says `stop` and shows no token for it."""
        ids = list(end_tokens(self.name, self.generation_config.eos_token_id))
        own = tokenizer.eos_token_id
        if own is not None and (own in ids or not ids):
            ids = [own, *(each for each in ids if each != own)]
        return tuple(ids)
