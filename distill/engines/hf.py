"""The target in this process, decoded on a preallocated cache: batches that are refilled, one generator per row."""

from bisect import insort
from collections.abc import Iterator, Sequence

import torch

from decode import SpeculativeDecoder
from distill.config import DistillConfig
from distill.engines.protocol import Answer, AnswerRequest, Done, at_temperature
from distill.score import TeacherRows, score
from draftsmith_core.errors import InputError
from draftsmith_core.generation_defaults import resolve_sampling
from draftsmith_core.models import check_tokenizer, context_length, dtype_name, eos_ids, fingerprint, load_model
from draftsmith_core.sampling import generator
from draftsmith_core.tokenization import Tokenizer


class HFEngine:
    """A transformers model in this process, and the distribution that its answers are drawn from."""

    # A killed run asks whole groups again: in another batch an answer could round otherwise at a tie.
    keeps_answers = False

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        model = load_model(
            config.target,
            device=config.device,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        check_tokenizer(config.target, model, tokenizer)
        self._model = model
        self.identity = {"target_fingerprint": fingerprint(model), "target_dtype": dtype_name(model)}
        limit = context_length(model)
        self.max_prompt_tokens = None if limit is None else limit - config.max_new_tokens
        try:
            self._decoder = SpeculativeDecoder(model)
        except ValueError as error:
            raise InputError(f"{config.target}: {error}") from None
        self.sampling = resolve_sampling(
            config.target,
            model,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            default_temperature=1.0,
        )
        self._batch_size = config.batch_size
        self._max_new_tokens = config.max_new_tokens
        self._eos_ids = () if config.ignore_eos else eos_ids(model)

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, in batches of `batch_size` in which the next request takes the place of one that
        has ended. Who shares a batch with whom follows from the requests of a group alone, so that its answers are the
        same bytes whoever makes them.
        """
        for group in groups:
            for temperature in sorted({request.temperature for request in group}, key=lambda each: each or 0.0):
                self._ask([request for request in group if request.temperature == temperature], temperature, done)

    def _ask(self, requests: list[AnswerRequest], temperature: float | None, done: Done) -> None:
        # Longest first: rows that share a batch are of like lengths, so that little is computed for padding, and what
        # a batch needs in memory is known with its first rows. The next turns of chats find their place among them.
        waiting = sorted(requests, key=_length)

        def source(free: int) -> list[tuple[AnswerRequest, Sequence[int], torch.Generator]]:
            taken = [waiting.pop() for _ in range(min(free, len(waiting)))]
            return [(request, request.prompt_ids, generator(request.seed)) for request in taken]

        sampling = at_temperature(self.sampling.sampling, temperature)
        answers = self._decoder.continuous(source, self._batch_size, sampling, self._max_new_tokens, self._eos_ids)
        for request, made in answers:
            after = done(request, Answer(tuple(made.output_ids), made.finish_reason))
            if after is not None:
                assert after.temperature == temperature, "all turns of a chat are drawn at one temperature"
                insort(waiting, after, key=_length)

    def score(self, request: AnswerRequest, response: Answer, k: int) -> TeacherRows:
        """The target's distribution at every token of an answer, as `distill.score.score` gives it."""
        return score(self._model, request.prompt_ids, response.response_ids, k)


def _length(request: AnswerRequest) -> int:
    return len(request.prompt_ids)
