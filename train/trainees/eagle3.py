"""EAGLE-3: a head on three layers of the target, trained on its own features as it will be used.

Legend: B rows, T tokens, W = T - 1 pairs of a row, N pairs that count, C pairs of a chunk, H hidden size,
V target vocabulary, D draft vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafts.heads.eagle3 import Eagle3Head
from train.chunked import projected
from train.data import Batch
from train.features import FeatureCache, freeze
from train.loss_sums import Sums
from train.objective import Objective
from train.teacher import Head, LiveTeacher, Reduced, Teacher
from train.trainees.head_training import DECAY, Pairs, add_up, check_objective, count_pairs, pairs_at, unroll


def count_vocabulary(rows: Iterable[Sequence[int]], size: int) -> list[int]:
    """The `size` commonest tokens of these sequences, as sorted ids; of equally common ones the smaller id.

    Give it what must be drafted, the responses. Tokens that never occur fill up what is missing, smallest id first.
    """
    counts = np.zeros(size, dtype=np.int64)
    for rows_at_once in _batched(iter(rows)):
        tokens = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows_at_once])
        found = np.bincount(tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    commonest = np.argsort(-counts, kind="stable")[:size]
    return sorted(map(int, commonest))


def _batched(rows: Iterator[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    while batch := list(islice(rows, 1024)):
        yield batch


class Eagle3Trainee(nn.Module):
    """The training-time test (arXiv 2503.01840, section 3.2): `test_steps` depths on the head's own features.

    Depth j weighs step_decay ** (j - 1). The objective compares the draft's law with the target's on the draft
    vocabulary, made to add up to one there; `fkl` is the paper's soft cross-entropy less the target's own entropy:
    another value, the same gradient. An objective with `ce` leaves out tokens of the data that the draft has no word
    for. Acceptance is against the target's whole law, and `missing` is what of that lies outside the draft vocabulary.
    All are sums over pairs that count (see `head_training`): no padding is in the mean that the loop takes.
    Raises InputError, one line.
    """

    def __init__(
        self,
        draft: Eagle3Head,
        objective: Objective,
        target: PreTrainedModel,
        packing: bool = False,
        cache: FeatureCache | None = None,
        chunk: int | None = None,
        test_steps: int = 7,
        step_decay: float = DECAY,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.objective = check_objective(objective, draft.kind)
        self.chunk, self.steps, self.decay = chunk, test_steps, step_decay
        self.target = freeze(target, draft.hidden_layers, packing, cache)
        self.head = Head(draft.lm_head, draft.borrowed.scale, draft.borrowed.softcap)

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` is a sum over, the `tokens` of `forward`, told without it."""
        return count_pairs(batch)

    def forward(self, batch: Batch) -> Sums:
        """Sums over the pairs that count."""
        states, last_BTH = self.target.read(batch)
        parts: list[Sums] = []
        for pairs, hidden_NH in self.drafts(batch, states):
            teacher: Teacher = LiveTeacher(pairs.laws(last_BTH), self.target.head)
            tokens_N, weights_N = self._draft_tokens(pairs.laws(batch.labels_BT))
            if self.draft.reduced:
                teacher = Reduced(teacher, self.draft.target_ids_D)
            sums = projected(
                hidden_NH,
                self.draft.lm_head.weight,
                None,
                teacher,
                tokens_N,
                weights_N,
                self.objective,
                self.chunk,
                self.head,
            )
            parts.append(sums)
        return add_up(parts, [self.decay**j for j in range(len(parts))], parts[0].missing)

    def drafts(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[tuple[Pairs, Tensor]]:
        """For every depth the pairs that count and the normed features `[N, H]` that the projection reads there."""
        features_BWH = self.draft.fuse([state_BTH[:, :-1] for state_BTH in states])
        for depth, states_BWH in enumerate(unroll(self.draft.states, batch, features_BWH, self.steps), start=1):
            pairs = pairs_at(batch, depth)
            yield pairs, self.draft.norm(pairs.states(states_BWH))

    def _draft_tokens(self, tokens_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens of the data as draft ids, and weights: 0 for one that has no draft id and would be asked for."""
        if not self.draft.reduced:
            return tokens_N, None
        ids_D = self.draft.target_ids_D
        draft_N = torch.searchsorted(ids_D, tokens_N).clamp_max(len(ids_D) - 1)
        if not self.objective.reads_tokens:
            return draft_N, None
        return draft_N, (ids_D[draft_N] == tokens_N).float()
