"""The target in this process, decoded on a preallocated cache: batches of unequal lengths, one generator per row."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

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
        # A killed run asks whole groups again: in another batch an answer could round otherwise at a tie.
        self.keeps_answers = False
        self._batch_size = config.batch_size
        self._max_new_tokens = config.max_new_tokens
        self._eos_ids = () if config.ignore_eos else eos_ids(model)

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, `batch_size` requests at a time, shortest prompts first: what is computed for
        padding, and what attention reads of it, goes with the longest prompt of a batch.
        """
        for group in groups:
            waiting = list(group)
            while waiting:
                waiting.sort(key=lambda request: (request.temperature or 0.0, len(request.prompt_ids)))
                following = []
                for batch in self._batches(waiting):
                    for request, answer in zip(batch, self._generate(batch), strict=True):
                        if (after := done(request, answer)) is not None:
                            following.append(after)
                waiting = following

    def _batches(self, requests: Sequence[AnswerRequest]) -> Iterator[list[AnswerRequest]]:
        """Requests of one temperature each, in their order."""
        for _, alike in groupby(requests, key=lambda request: request.temperature):
            while batch := list(islice(alike, self._batch_size)):
                yield batch

    def _generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        batch = self._decoder.generate(
            [request.prompt_ids for request in requests],
            at_temperature(self.sampling.sampling, requests[0].temperature),
            self._max_new_tokens,
            [generator(request.seed) for request in requests],
            self._eos_ids,
        )
        return [Answer(tuple(g.output_ids), g.finish_reason) for g in batch.generations]

    def score(self, request: AnswerRequest, response: Answer, k: int) -> TeacherRows:
        """The target's distribution at every token of an answer, as `distill.score.score` gives it."""
        return score(self._model, request.prompt_ids, response.response_ids, k)
