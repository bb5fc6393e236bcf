"""The target in this process, on vLLM: its own batching, prefix caching and tensor parallelism."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from draftsmith.core.errors import InputError, RunError, one_line
from draftsmith.core.prompts import room_for_prompts
from draftsmith.core.ranks import require_single_process
from draftsmith.core.teacher_rows import pack_likeliest
from draftsmith.core.tokenization import Tokenizer
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.engines import (
    Answer,
    AnswerRequest,
    Done,
    Engine,
    Failed,
    Groups,
    RemoteTarget,
    sampling_of,
)
from draftsmith.distill.engines.state_writer import WITH_ANSWER, StateWriter

# Requests handed to vLLM at a time: enough to keep its batch full; bounds the memory.
_TOGETHER = 4096


class VLLMEngine(Engine):
    """A model in vLLM. Every request has its seed, but rounding depends on the batch, so bytes may
    differ.
    """

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        require_single_process("distill --engine vllm --tensor_parallel_size N")
        target = RemoteTarget(config.target, tokenizer)
        self.sampling = sampling_of(config, target)
        more = {}
        if config.states is not None:
            self.states = StateWriter(config)
            more = self.states.engine_options()
        try:
            self._llm = LLM(
                model=config.target,
                revision=config.revision,
                dtype=config.dtype,
                tensor_parallel_size=config.tensor_parallel_size,
                trust_remote_code=config.trust_remote_code,
                enable_prefix_caching=True,
                max_logprobs=-1,  # no bound of its own
                logprobs_mode="raw_logprobs",
                seed=config.seed % 2**32,
                **more,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"{config.target}: vLLM cannot run it: {one_line(error)[:300]}"
            ) from None
        model = self._llm.llm_engine.model_config
        self.max_prompt_tokens = room_for_prompts(model.max_model_len, config.max_new_tokens)
        self.identity = {
            "target_fingerprint": None,
            "target_dtype": str(model.dtype),
        }
        self._max_new_tokens = config.max_new_tokens
        self._vocabulary = model.get_vocab_size()
        self._k = min(config.teacher_top_k, self._vocabulary)
        self._stop_ids = [] if config.ignore_eos else list(target.eos_ids)

    def run(self, groups: Groups, done: Done) -> None:
        waiting: list[AnswerRequest] = []
        while True:
            while len(waiting) < _TOGETHER and (group := next(groups, None)) is not None:
                waiting += group
            if not waiting:
                return
            now, waiting = waiting[:_TOGETHER], waiting[_TOGETHER:]
            answers = self._generate(now)
            for request, answer in zip(now, answers, strict=True):
                if (following := done(request, answer)) is not None:
                    waiting.append(following)

    def _generate(self, requests: Sequence[AnswerRequest]) -> list[Answer | Failed]:
        params = [self._params(request) for request in requests]
        outputs = self._call([request.prompt_ids for request in requests], params)
        answers: list[Answer | Failed] = []
        for request, output in zip(requests, outputs, strict=True):
            drawn = output.outputs[0]
            if drawn.finish_reason in ("stop", "length"):
                ids = tuple(drawn.token_ids)
                answers.append(Answer(ids, drawn.finish_reason, teacher=self._teacher(drawn)))
                if self.states is not None:
                    path = (output.kv_transfer_params or {}).get("hidden_states_path")
                    own = len(ids) if request.sampling.temperature <= 1 else 0
                    whole = (*request.prompt_ids, *ids)
                    self.states.take(path, request.key.row, whole, own, "the engine")
            else:
                answers.append(Failed(f"vLLM ended it with {drawn.finish_reason!r}"))
        return answers

    def _call(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        try:
            ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs: list[Any] = self._llm.generate(ids, params, use_tqdm=False)
        except Exception as error:  # vLLM's engine has errors of its own
            raise RunError(
                f"vllm: {one_line(error)[:300]}; run the same command again to resume"
            ) from None
        return outputs

    def _params(self, request: AnswerRequest) -> SamplingParams:
        return SamplingParams(
            **request.sampling.record(),
            seed=request.seed,
            max_tokens=request.max_new_tokens or self._max_new_tokens,
            logprobs=self._k or None,
            stop_token_ids=self._stop_ids,
            # the target's ends are all among the stop tokens, and come with the answer
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": WITH_ANSWER} if self.states is not None else None,
        )

    def _teacher(self, drawn: Any) -> bytes | None:
        """The likeliest tokens at each token of an answer, at temperature 1 and over the whole
        vocabulary.
        """
        if not self._k:
            return None
        likeliest = []
        for row in drawn.logprobs:
            # By token id; the drawn one is beside the k likeliest.
            best = sorted(row.items(), key=lambda item: item[1].rank)[: self._k]
            likeliest.append([(token, entry.logprob) for token, entry in best])
        return pack_likeliest(likeliest, self._vocabulary)
