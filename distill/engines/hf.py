"""The target in this process, decoded on a preallocated cache: batches that are refilled, one generator per row."""

from bisect import insort
from collections.abc import Iterator, Sequence

import torch

from decode import PROPOSERS, SpeculativeDecoder, parse_tree, take_over
from distill.config import DistillConfig
from distill.engines import WAVE_BATCHES, Answer, AnswerRequest, Done, DraftingEngine, at_temperature, sampling_of
from distill.score import score
from drafts.load import Draft, depth_limit, draft_fingerprint, kind_of, load_pair
from draftsmith_core.errors import InputError
from draftsmith_core.io import hash_json, read_tree_file
from draftsmith_core.models import dtype_name, eos_ids, fingerprint
from draftsmith_core.prompts import room_for_prompts
from draftsmith_core.sampling import generator
from draftsmith_core.settings import loading
from draftsmith_core.tokenization import Tokenizer

# Tokens of each row that are decoded to measure whether a draft pays.
_MEASURED_TOKENS, _MEASURED_ROUNDS = 32, 2
# Tokens that are drafted per step, to choose from where the options name no tree.
_CHAINS = (1, 2, 4)


class HFEngine(DraftingEngine):
    """A transformers model in this process, and the distribution that its answers are drawn from."""

    def __init__(self, config: DistillConfig, tokenizer: Tokenizer) -> None:
        drafts = [] if config.draft is None else [config.draft]
        pair = load_pair(config.target, drafts, tokenizer=tokenizer, **loading(config))
        self._model = model = pair.target
        self.identity = {"target_fingerprint": fingerprint(model), "target_dtype": dtype_name(model)}
        self.max_prompt_tokens = room_for_prompts(pair.context, config.max_new_tokens)
        self.tree = ""
        take_over(model, *pair.drafts.values())
        try:
            self._decoders = {"": SpeculativeDecoder(model)}
            for draft in pair.drafts.values():
                proposer = PROPOSERS[kind_of(draft)].make(draft)
                for spec in [config.tree] if config.tree is not None else _chains(draft):
                    tree = parse_tree(spec, read_tree_file)
                    self._decoders[spec] = SpeculativeDecoder(model, proposer, tree)
                trees = [repr(decoder.tree) for decoder in self._decoders.values()]
                self.identity["drafted_trees"] = hash_json(trees)[:16]  # which may be from a file
                self.identity["draft_fingerprint"] = draft_fingerprint(draft)
        except ValueError as error:
            raise InputError(f"{config.draft or config.target}: {error}") from None
        self.sampling = sampling_of(config, model)
        self._batch_size, self._teacher_top_k = config.batch_size, config.teacher_top_k
        self.wave = WAVE_BATCHES * config.batch_size
        self._max_new_tokens = config.max_new_tokens
        self._eos_ids = () if config.ignore_eos else eos_ids(model)

    def run(self, groups: Iterator[Sequence[AnswerRequest]], done: Done) -> None:
        """Ask group after group, in batches of `batch_size` in which the next request takes the place of one that has
        ended.
        """
        for group in groups:
            for temperature in sorted({request.temperature for request in group}, key=lambda value: value or 0.0):
                self._ask([request for request in group if request.temperature == temperature], temperature, done)

    def _ask(self, requests: list[AnswerRequest], temperature: float | None, done: Done) -> None:
        # Longest first: rows that share a batch are of like lengths, so that little is computed for padding, and what
        # a batch needs in memory is known with its first rows. The next turns of chats find their place among them.
        waiting = sorted(requests, key=_length)

        def source(free: int) -> list[tuple[AnswerRequest, Sequence[int], torch.Generator]]:
            taken = [waiting.pop() for _ in range(min(free, len(waiting)))]
            return [(request, request.prompt_ids, generator(request.seed)) for request in taken]

        decode = self._decoders[self.tree].continuous
        sampling = at_temperature(self.sampling.sampling, temperature)
        answers = decode(source, self._batch_size, sampling, self._max_new_tokens, self._eos_ids)
        for request, generation in answers:
            ids, k = tuple(generation.output_ids), self._teacher_top_k
            teacher = score(self._model, request.prompt_ids, ids, k) if k else None
            following = done(request, Answer(ids, generation.finish_reason, teacher=teacher))
            if following is not None:
                insort(waiting, following, key=_length)

    def seconds_per_token(self, requests: Sequence[AnswerRequest]) -> dict[str, float]:
        """Time each tree, and the target alone as "", on these requests as one batch."""
        tokens = min(_MEASURED_TOKENS, self._max_new_tokens)
        spent: dict[str, list[float]] = {tree: [] for tree in self._decoders}
        for count in (1, *[tokens] * _MEASURED_ROUNDS):  # the first one packs weights
            for tree, decoder in self._decoders.items():
                batch = decoder.generate(
                    [request.prompt_ids for request in requests],
                    at_temperature(self.sampling.sampling, requests[0].temperature),
                    count,
                    [generator(request.seed) for request in requests],
                    self._eos_ids,
                )
                made = sum(len(each.output_ids) for each in batch.generations)
                # Answers are longer than what is measured, and prompts are not.
                prefill_s = batch.prefill_s * count / self._max_new_tokens
                spent[tree].append((batch.decode_s + prefill_s) / made)
        return {tree: min(times[1:]) for tree, times in spent.items()}


def _length(request: AnswerRequest) -> int:
    return len(request.prompt_ids)


def _chains(draft: Draft) -> list[str]:
    return [f"chain:{length}" for length in _CHAINS if length <= (depth_limit(draft) or length)]
