"""On-policy data: the draft generates answers with its current weights, and the target scores them.

GKD (Agarwal et al. 2024, arXiv 2306.13649, algorithm 1) chooses whole batches at random; here single sequences are
chosen, so that every step has both kinds. Which sequences, and what is generated, depend on the seed, the place in the
stream of training data and the weights alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from decode import SpeculativeDecoder
from drafts.draft_vocabulary import draft_vocabulary, to_target
from drafts.load import Draft
from draftsmith_core.models import eos_ids, vocabulary_size
from draftsmith_core.sampling import Sampling, generator, row_seed
from train.config import OnPolicy, TrainConfig
from train.data import Examples

# (prompt, answer) by index in a batch.
Answers = dict[int, tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Answerer:
    """Generates with the draft's current weights. vocabulary: the size that draft and target share; no other tokens are
    generated, as in decoding, nor any outside the draft vocabulary.
    """

    draft: PreTrainedModel
    decoder: SpeculativeDecoder
    policy: OnPolicy
    max_length: int
    seed: int
    vocabulary: int

    def is_drawn(self, place: int) -> bool:
        """Whether the draft generates the sequence at this place of the stream: an independent draw per place."""
        return bool(np.random.default_rng([self.seed, 2**32 + 1, place]).random() < self.policy.fraction)

    def answer(self, prompts: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
        """The draft's continuations, with EOS where it ended; none is longer than `max_length` with its prompt."""
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
        if (ids_D := draft_vocabulary(draft)) is not None:
            out.logits = to_target(out.logits[..., ids_D], ids_D, out.logits.shape[-1])

    def draw(self, examples: Examples, rows: Sequence[int], places: Sequence[int]) -> Answers:
        """Prompt and answer by index in `rows`, for those that the draft generates.

        The prompt is the row's own; of text, which has none, its first quarter.
        """
        chosen = [index for index, place in enumerate(places) if self.is_drawn(place)]
        prompts = []
        for index in chosen:
            row = examples.rows[rows[index]]
            text = row["response_ids"]
            prompts.append(row["prompt_ids"] or text[: max(1, min(len(text), examples.max_length) // 4)])
        answers = self.answer(prompts, [places[index] for index in chosen]) if chosen else []
        return dict(zip(chosen, zip(prompts, answers, strict=True), strict=True))


def make_answerer(config: TrainConfig, draft: Draft, target: PreTrainedModel | None) -> Answerer | None:
    """What generates with the draft if training is on-policy, else None."""
    if config.on_policy.fraction == 0:
        return None
    assert isinstance(draft, PreTrainedModel) and target is not None
    shared = min(vocabulary_size(draft), vocabulary_size(target))
    # Not fast: packed copies of the weights would go stale, because the weights change at every step.
    decoder = SpeculativeDecoder(draft, fast=False)
    return Answerer(draft, decoder, config.on_policy, config.max_length, config.seed, shared)
