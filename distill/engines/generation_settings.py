"""What a target that is not loaded here asks for in its generation_config.json."""

from transformers import GenerationConfig

from draftsmith_core.tokenization import Tokenizer


class GenerationSettings:
    """The generation config of a target that is not loaded, as `resolve_sampling` reads it from a model."""

    def __init__(self, name: str) -> None:
        try:
            self.generation_config = GenerationConfig.from_pretrained(name)
        except OSError:  # a tokenizer alone: the target asks for nothing
            self.generation_config = GenerationConfig()

    def eos_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens that end an answer; the first is put where a server says `stop` and shows no token for it."""
        eos = self.generation_config.eos_token_id
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        own = tokenizer.eos_token_id
        if own is not None and (own in ids or not ids):
            ids = [own, *(each for each in ids if each != own)]
        return tuple(ids)
