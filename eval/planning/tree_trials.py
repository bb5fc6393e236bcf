"""The steps of a plan: time a step, try the trees, confirm the best by the clock.

Legend: M methods, B batches.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from draftsmith.core.asked_hash import Groups
from draftsmith.core.prompts import Prompt
from draftsmith.decode import SpeculativeDecoder, takes_trees
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.decode.propose.choosing import menu, name_of
from draftsmith.decode.step_costs import StepCosts, measure
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, depth_limit
from draftsmith.eval.bootstrap import Floats
from draftsmith.eval.copying import AnyDraft, CopyingDraft, JoinedDraft, model_of, proposer_of
from draftsmith.eval.groups import groups_of
from draftsmith.eval.timing import Contender, Task, decoder_of

T = TypeVar("T")

# Trees that are tried beside those of `--tree auto`.
LARGER = ("chain:12", "chain:16", "kary:8", "kary:8,2")
STOPPING = ("chain:6,stop=0.1", "chain:8,stop=0.3", "chain:12,stop=0.5")
# A longer block costs nothing extra, so a block drafter drafts the whole block and stops within it.
BLOCK_STOPS = (0.05, 0.15, 0.3, 0.5)
GROWING = (
    "eagle2:depth=3,beam=3,nodes=8",
    "eagle2:depth=5,beam=4,nodes=16",
    "opt:nodes=12,depth=5,gain=0.2",
)
# What copies drafts nothing at some steps, so all its trees are timed.
COPIED = (
    *(f"chain:{length}" for length in (1, 2, 3, 4, 6, 8, 12)),
    "chain:8,stop=0.6",
    "kary:2,1,1",
)
# Prompts and tokens of a run that tries a tree.
TRY_PROMPTS = 3
TRY_TOKENS = 32
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S = 1.0
CONFIRM_ROUNDS = 5


class Candidate(NamedTuple):
    """A method that may be best. rate: its tokens per second on a few prompts."""

    method: Method
    rate: float


@dataclass(frozen=True)
class Planner:
    """A pair and the traffic to plan for. Its clock starts when it is made."""

    task: Task
    draft: AnyDraft
    started: float = field(default_factory=time.perf_counter)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def model(self) -> Draft | None:
        """The model that the draft drafts with, if any."""
        return model_of(self.draft)

    @property
    def trees_fit(self) -> bool:
        """Whether the pair takes trees other than chains."""
        return takes_trees(self.task.target, self.model)

    def contender(self, method: Method | None) -> Contender:
        """Return what is timed of a method (None: no draft); raise ValueError if the draft cannot
        draft its tree.
        """
        task = self.task
        if method is None:
            return Contender(SpeculativeDecoder(task.target, compile=task.compile))
        decoder = decoder_of(task.target, self.draft, method, task.compile)
        return Contender(decoder, method=method)

    def batches(self, count: int) -> list[Sequence[Prompt]]:
        """The first `count` batches of prompts."""
        return _batches(self.task.prompts, self.task.batch_size, count)

    def batch_groups(self, count: int) -> list[int]:
        """The group of each of the first `count` batches: those that share a group of prompts are
        one.
        """
        groups = groups_of(self.task.prompts)
        return Groups(_batches(groups, self.task.batch_size, count)).numbers()

    def costs(self) -> StepCosts:
        """Time steps, as `--tree auto` does."""
        task = self.task
        draft = None if self.model is None else proposer_of(self.model)
        trees = self.trees_fit
        return measure(task.target, draft, task.sampling, trees=trees, compile=task.compile)

    def tried(self) -> list[str]:
        """Specs of the trees to time."""
        draft = self.draft
        if isinstance(draft, CopyingDraft):
            return list(COPIED) if draft.reads_text else [OWN_TREE]
        deepest = None if self.model is None else depth_limit(self.model)
        chosen = map(name_of, menu(deepest, chains_only=not self.trees_fit))
        if isinstance(draft, JoinedDraft):
            return [*chosen, *STOPPING, *GROWING]
        if isinstance(draft, BlockHead):
            stopping = [f"chain:{draft.depths},stop={stop}" for stop in BLOCK_STOPS]
            return [*chosen, *stopping, *GROWING]
        return [*chosen, *LARGER, *STOPPING, *GROWING]

    def timed(
        self,
        methods: Sequence[Method | None],
        batches: Sequence[Sequence[Prompt]],
        tokens: int,
        rounds: int = 1,
    ) -> Floats:
        """Decode the batches by M methods (None: no draft), at most so often, until each has run
        `CONFIRM_S`. Return tokens and seconds by method and batch, round after round, `[M, B, 2]`.
        """
        contenders = list(map(self.contender, methods))
        ran_MB2 = np.zeros((len(methods), 0, 2))
        for _ in range(rounds):
            if ran_MB2[:, :, 1].sum(1).min() < CONFIRM_S:
                self.task.race(contenders, batches, min(tokens, self.task.max_new_tokens))
                ran_MB2 = np.array([contender.ran() for contender in contenders])
        return ran_MB2

    def try_trees(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """Time the trees on a few prompts. Return also those that the draft cannot draft, with the
        reason.
        """
        candidates: list[Candidate] = []
        not_tried = []
        for spec in self.tried():
            method = Method.of(spec, None if self.model else "exact")
            try:
                ran_1B2 = self.timed([method], self.batches(TRY_PROMPTS), TRY_TOKENS)
            except ValueError as error:
                not_tried.append({"tree": spec, "reason": str(error)})
                continue
            tokens, seconds = ran_1B2.sum((0, 1))
            candidates.append(Candidate(method, tokens / seconds))
        return candidates, not_tried


def _batches(values: Sequence[T], size: int, count: int) -> list[Sequence[T]]:
    """The first `count` batches of values by prompt, or all."""
    starts = range(0, min(len(values), count * size), size)
    return [values[start : start + size] for start in starts]
