"""The target in this process, on vLLM: its own batching, prefix caching and tensor parallelism."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from distill.config import DistillConfig
from distill.engines.generation_settings import GenerationSettings, sampling_of
from distill.engines.protocol import Answer, AnswerRequest, Done, at_temperature
from draftsmith_core.errors import InputError, one_line
from draftsmith_core.processes import require_single_process
from draftsmith_core.teacher_rows import pack
from draftsmith_core.tokenization import Tokenizer

# Groups are taken until there are so many requests: enough for vLLM to keep its batch full, and what bounds the memory.
_TOGETHER = 4096
_LOWEST_TEMPERATURE = 0.01  # vLLM raises what is lower


class VLLMEngine:
    """A model in vLLM, and the distribution that its answers are drawn from.

    Each request has its seed, but vLLM's arithmetic depends on what shares a batch, so that bytes are not promised.
    """

    keeps_answers = False
    takes_ids = True

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        require_single_process("distill --engine vllm --tensor_parallel_size N")
        settings = GenerationSettings(config.target)
        self.sampling = sampling_of(config, settings)
        asked = [self.sampling.sampling.temperature, *(temperature for temperature, _ in config.mixture())]
        if low := [temperature for temperature in asked if 0 < temperature < _LOWEST_TEMPERATURE]:
            raise InputError(
                f"temperature: vLLM draws at {_LOWEST_TEMPERATURE} where {low[0]} is asked for; use 0 for greedy"
            )
        try:
            self._llm = LLM(
                model=config.target,
                dtype=config.dtype,
                tensor_parallel_size=config.tensor_parallel_size,
                trust_remote_code=config.trust_remote_code,
                enable_prefix_caching=True,
                max_logprobs=-1,  # no bound of its own
                logprobs_mode="raw_logprobs",
                seed=config.seed % 2**32,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"{config.target}: vLLM cannot run it: {one_line(error)[:300]}") from None
        model = self._llm.llm_engine.model_config
        self.max_prompt_tokens: int | None = model.max_model_len - config.max_new_tokens
        self.identity: dict[str, Any] = {"target_fingerprint": None, "target_dtype": str(model.dtype)}
        self._max_new_tokens, self._k = config.max_new_tokens, min(config.teacher_top_k, model.get_vocab_size())
        self._vocabulary = model.get_vocab_size()
        self._stop_ids = [] if config.ignore_eos else list(settings.eos_ids(tokenizer))
        self._scores: dict[tuple[int, int, int], bytes] = {}

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask everything in `groups`, several at a time; the turns that follow are asked together."""
        waiting: list[AnswerRequest] = []
        while True:
            while len(waiting) < _TOGETHER and (group := next(groups, None)) is not None:
                waiting += group
            if not waiting:
                return
            now, waiting = waiting[:_TOGETHER], waiting[_TOGETHER:]
            answers = self._generate(now)
            if self._k:
                self._score(now, answers)
            for request, answer in zip(now, answers, strict=True):
                if (after := done(request, answer)) is not None:
                    waiting.append(after)
                self._scores.pop(request.key, None)

    def _generate(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        params = [self._params(request) for request in requests]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        made = [output.outputs[0] for output in self._llm.generate(prompts, params, use_tqdm=False)]
        return [Answer(tuple(each.token_ids), "stop" if each.finish_reason == "stop" else "length") for each in made]

    def _params(self, request: AnswerRequest) -> SamplingParams:
        sampling = at_temperature(self.sampling.sampling, request.temperature)
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=request.seed,
            max_tokens=self._max_new_tokens,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the target's ends are all among the stop tokens, and come with the answer
            detokenize=False,
        )

    def _score(self, requests: Sequence[AnswerRequest], answers: Sequence[Answer]) -> None:
        """Teacher rows from a forward over prompt and answer, at temperature 1 and over the whole vocabulary."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=self._k, detokenize=False)
        texts = [[*r.prompt_ids, *a.response_ids] for r, a in zip(requests, answers, strict=True)]
        outputs = self._llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        for request, output in zip(requests, outputs, strict=True):
            self._scores[request.key] = _teacher_rows(
                output.prompt_logprobs[len(request.prompt_ids) :], self._k, self._vocabulary
            )

    def score(self, request: AnswerRequest, response: Answer, k: int) -> bytes:
        """What was computed when the answer came."""
        return self._scores[request.key]

    def close(self) -> None:
        """vLLM ends its own processes with this one."""


def _teacher_rows(rows: Sequence[Any], k: int, vocabulary: int) -> bytes:
    """Of one dict a token, from token id to what has `logprob` and `rank`; it holds the text's own token as well."""
    best = [sorted(row.items(), key=lambda item: item[1].rank)[:k] for row in rows]
    ids_RK = np.array([[token for token, _ in row] for row in best])
    logprobs_RK = np.array([[found.logprob for _, found in row] for row in best])
    return pack(ids_RK, logprobs_RK, np.maximum(0, 1 - np.exp(logprobs_RK).sum(-1)), vocabulary)
