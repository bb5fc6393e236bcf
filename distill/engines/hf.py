"""The target in this process, decoded on a preallocated cache: batches that are refilled, one
generator per row.
"""

from bisect import insort
from collections.abc import Sequence

import torch

from draftsmith.core.errors import InputError
from draftsmith.core.models import dtype_name, eos_ids, fingerprint
from draftsmith.core.prompts import room_for_prompts
from draftsmith.core.sampling import generator
from draftsmith.core.settings import Sampling, loading
from draftsmith.core.tokenization import Tokenizer
from draftsmith.decode import SpeculativeDecoder, take_over
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import (
    WAVE_BATCHES,
    Answer,
    AnswerRequest,
    Done,
    Engine,
    Groups,
    sampling_of,
)
from draftsmith.distill.score import score
from draftsmith.drafts.load import load_models


class HFEngine(Engine):
    """A transformers model in this process, and the distribution that its answers are drawn
    from.
    """

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        pair = load_models(config.target, [], tokenizer=tokenizer, **loading(config))
        self._model = model = pair.target
        self.identity = {
            "target_fingerprint": fingerprint(model),
            "target_dtype": dtype_name(model),
        }
        self.max_prompt_tokens = room_for_prompts(pair.context, config.max_new_tokens)
        take_over(model)
        try:
            self._decoder = SpeculativeDecoder(model)
        except ValueError as error:
            raise InputError(f"{config.target}: {error}") from None
        self.sampling = sampling_of(config, model)
        self._batch_size = config.batch_size
        self._teacher_top_k = config.teacher_top_k
        self.wave = WAVE_BATCHES * config.batch_size
        self._max_new_tokens = config.max_new_tokens
        self._eos_ids = () if config.ignore_eos else eos_ids(model)

    def run(self, groups: Groups, done: Done) -> None:
        """Ask group after group, in batches of `batch_size` in which the next request takes the
        place of one that has ended.
        """
        for group in groups:
            mixture = {request.sampling for request in group}
            for sampling in sorted(mixture, key=lambda each: each.temperature):
                requests = [request for request in group if request.sampling == sampling]
                self._ask(requests, sampling, done)

    def _ask(self, requests: list[AnswerRequest], sampling: Sampling, done: Done) -> None:
        # Longest first: rows that share a batch are of like lengths, so that little is computed for
        # padding, and what a batch needs in memory is known with its first rows. The next turns of
        # chats find their place among them.
        waiting = sorted(requests, key=_length)

        def next_rows(free: int) -> list[tuple[AnswerRequest, Sequence[int], torch.Generator]]:
            taken = [waiting.pop() for _ in range(min(free, len(waiting)))]
            return [(request, request.prompt_ids, generator(request.seed)) for request in taken]

        decode = self._decoder.continuous
        answers = decode(next_rows, self._batch_size, sampling, self._max_new_tokens, self._eos_ids)
        for request, generation in answers:
            ids = tuple(generation.output_ids)
            teacher = None
            if self._teacher_top_k:
                teacher = score(self._model, request.prompt_ids, ids, self._teacher_top_k)
            following = done(request, Answer(ids, generation.finish_reason, teacher=teacher))
            if following is not None:
                insort(waiting, following, key=_length)


def _length(request: AnswerRequest) -> int:
    return len(request.prompt_ids)
