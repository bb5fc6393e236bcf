"""On-policy data: the draft answers as it stands at a step, and the target scores what it says.

GKD (Agarwal et al. 2024, arXiv 2306.13649, algorithm 1) draws whole batches by a coin; here single sequences are
drawn, so that every step mixes. Which sequences, and what is said in them, are functions of the seed, the place in the
stream of training and the weights: not of what shares a batch, of how many processes there are, or of where a run was
resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from decode import SpeculativeDecoder
from draftsmith.errors import InputError
from draftsmith.models import context_length, eos_ids
from draftsmith.sampling import Sampling, generator, row_seed
from train.config import OnPolicy
from train.data import Examples

# (prompt, answer) by index in a batch.
Answers = dict[int, tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Answerer:
    """The draft in training as one that answers. Its weights are read at every call, as they are then."""

    draft: PreTrainedModel
    decoder: SpeculativeDecoder
    policy: OnPolicy
    max_length: int
    seed: int

    def is_drawn(self, place: int) -> bool:
        """Whether the sequence at this place of the stream is the draft's: a coin of its own for each."""
        return bool(np.random.default_rng([self.seed, 2**32 + 1, place]).random() < self.policy.fraction)

    def answer(self, prompts: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
        """The draft's continuations, EOS included where it ended, cut to `max_length` with their prompts."""
        was_training = self.draft.training
        self.draft.eval()
        try:
            drawn = self.decoder.generate(
                prompts,
                Sampling(temperature=self.policy.temperature),
                self.policy.max_new_tokens,
                [generator(row_seed(self.seed, f"answer {place}")) for place in places],
                eos_ids(self.draft),
            )
        finally:
            self.draft.train(was_training)
        return [
            row.output_ids[: self.max_length - len(prompt)]
            for row, prompt in zip(drawn.generations, prompts, strict=True)
        ]

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


def make_answerer(draft: PreTrainedModel, policy: OnPolicy, max_length: int, seed: int) -> Answerer:
    """Made once a run. InputError, one line, for a draft that cannot answer here."""
    limit = context_length(draft)
    longest = max_length - 1 + policy.max_new_tokens
    if limit is not None and longest > limit:
        raise InputError(
            f"on_policy.max_new_tokens: {policy.max_new_tokens} behind a prompt of up to {max_length - 1} tokens is "
            f"more than the draft's {limit} positions; lower it or max_length"
        )
    try:
        # Its weights change at every step: nothing may be packed.
        decoder = SpeculativeDecoder(draft, fast=False)
    except ValueError as error:
        raise InputError(f"on_policy: {error}") from None
    return Answerer(draft, decoder, policy, max_length, seed)
