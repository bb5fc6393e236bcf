"""On-policy data: the draft answers as it stands at a step, and the target scores what it says.

GKD (Agarwal et al. 2024, arXiv 2306.13649, algorithm 1) draws whole batches by a coin; here single sequences are
drawn, so that every step mixes. Which sequences, and what is said in them, are functions of the seed, the place in the
stream of training and the weights: not of what shares a batch, of how many processes there are, or of where a run was
resumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from decode import SpeculativeDecoder
from draftsmith_core.errors import InputError
from draftsmith_core.models import eos_ids, vocabulary_size
from draftsmith_core.sampling import Sampling, generator, row_seed
from train.config import OnPolicy
from train.data import Examples

# (prompt, answer) by index in a batch.
Answers = dict[int, tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Answerer:
    """The draft in training as one that answers. Its weights are read at every call, as they are then.

    vocabulary: how many of its tokens the target knows too; it says no others, as in decoding.
    """

    draft: PreTrainedModel
    decoder: SpeculativeDecoder
    policy: OnPolicy
    max_length: int
    seed: int
    vocabulary: int

    def is_drawn(self, place: int) -> bool:
        """Whether the sequence at this place of the stream is the draft's: a coin of its own for each."""
        return bool(np.random.default_rng([self.seed, 2**32 + 1, place]).random() < self.policy.fraction)

    def answer(self, prompts: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
        """The draft's continuations, EOS included where it ended, never beyond `max_length` with their prompts."""
        by_room: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_room.setdefault(min(self.policy.max_new_tokens, self.max_length - len(prompt)), []).append(index)
        was_training = self.draft.training
        self.draft.eval()
        answers: dict[int, list[int]] = {}
        hook = self.draft.register_forward_hook(self._narrow)
        try:
            for room, indices in by_room.items():
                drawn = self.decoder.generate(
                    [prompts[index] for index in indices],
                    Sampling(temperature=self.policy.temperature),
                    room,
                    [generator(row_seed(self.seed, f"answer {places[index]}")) for index in indices],
                    eos_ids(self.draft),
                )
                answers |= {index: row.output_ids for index, row in zip(indices, drawn.generations, strict=True)}
        finally:
            hook.remove()
            self.draft.train(was_training)
        return [answers[index] for index in range(len(prompts))]

    def _narrow(self, draft: Any, given: Any, out: CausalLMOutputWithPast) -> None:
        assert out.logits is not None
        out.logits[..., self.vocabulary :] = -math.inf

    def draw(self, examples: Examples, rows: Sequence[int], places: Sequence[int]) -> Answers:
        """Prompt and answer by index in `rows`, for those of them that are drawn.

        The prompt is the row's own; of text, which has none, its first quarter.
        """
        chosen = [index for index, place in enumerate(places) if self.is_drawn(place)]
        if not chosen:
            return {}
        prompts = [_prompt(examples, rows[index]) for index in chosen]
        answers = self.answer(prompts, [places[index] for index in chosen])
        return dict(zip(chosen, zip(prompts, answers, strict=True), strict=True))


def _prompt(examples: Examples, row: int) -> list[int]:
    found = examples.rows[row]
    prompt: list[int] = found["prompt_ids"]
    if prompt:
        return prompt
    text: list[int] = found["response_ids"]
    return text[: max(1, min(len(text), examples.max_length) // 4)]


def make_answerer(
    draft: PreTrainedModel, policy: OnPolicy, max_length: int, seed: int, target_vocabulary: int
) -> Answerer:
    """Made once a run; `max_length` is within the context. InputError, one line, for a draft that cannot answer."""
    try:
        # Its weights change at every step: nothing may be packed.
        decoder = SpeculativeDecoder(draft, fast=False)
    except ValueError as error:
        raise InputError(f"on_policy: {error}") from None
    return Answerer(draft, decoder, policy, max_length, seed, min(vocabulary_size(draft), target_vocabulary))
