"""The steps of a plan: time a step, try the trees, confirm the best by the clock."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedModel

from draftsmith.core.asked_hash import Groups
from draftsmith.core.io import JsonObject
from draftsmith.core.models import eos_ids
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.decode import (
    SpeculativeDecoder,
    TreeShape,
    takes_trees,
)
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.decode.propose.choosing import menu, name_of
from draftsmith.decode.step_costs import StepCosts, measure
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, depth_limit
from draftsmith.eval.bootstrap import Floats, PromptSums, quotient, resamples
from draftsmith.eval.copying import AnyDraft, CopyingDraft, JoinedDraft, model_of, proposer_of
from draftsmith.eval.groups import groups_of

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
WARM_UP_TOKENS = 8
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S = 1.0
CONFIRM_ROUNDS = 5


@dataclass(frozen=True)
class Candidate:
    """A tree that may be best. rate: its tokens per second on a few prompts."""

    spec: str
    shape: TreeShape
    rate: float


class Ran(NamedTuple):
    """What one batch emitted, in how many seconds."""

    tokens: int
    seconds: float


class Confirmed(NamedTuple):
    """The target alone and the finalists by the clock, as JSON. `alone_s`: the target's seconds per
    token, run by run.
    """

    rows: list[JsonObject]
    alone_s: list[float]


@dataclass(frozen=True)
class Planner:
    """A pair and the traffic to plan for. Its clock starts when it is made."""

    target: PreTrainedModel
    draft: AnyDraft
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int
    max_new_tokens: int
    seed: int
    compile: bool = False
    started: float = field(default_factory=time.perf_counter)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def model(self) -> Draft | None:
        """The model that the draft drafts with, if any."""
        return model_of(self.draft)

    @property
    def deepest(self) -> int | None:
        """Most levels that the draft can draft; None without a limit."""
        return None if self.model is None else depth_limit(self.model)

    @property
    def trees_fit(self) -> bool:
        """Whether the pair takes trees other than chains."""
        return takes_trees(self.target, self.model)

    def decoder(self, shape: TreeShape | None) -> SpeculativeDecoder:
        """Return a decoder for this tree (None: no draft); raise ValueError if the draft cannot
        draft this shape.
        """
        proposer = None if shape is None else proposer_of(self.draft)
        return SpeculativeDecoder(self.target, proposer, shape, compile=self.compile)

    def run(
        self,
        decoder: SpeculativeDecoder,
        contexts: Sequence[Sequence[int]],
        tokens: int,
        *,
        ends: bool,
    ) -> Ran:
        """Decode one batch; `ends`: whether the target's end tokens end a row."""
        seeds = [generator(row_seed(self.seed, f"plan/{index}")) for index in range(len(contexts))]
        tokens = min(tokens, self.max_new_tokens)
        eos = eos_ids(self.target) if ends else ()
        batch = decoder.generate(contexts, self.sampling, tokens, seeds, eos)
        rows = batch.generations
        return Ran(
            tokens=sum(len(row.output_ids) for row in rows),
            seconds=batch.decode_s,
        )

    def batches(self, count: int) -> list[Sequence[tuple[int, ...]]]:
        """Token ids of the first `count` batches of prompts."""
        return _batches([prompt.ids for prompt in self.prompts], self.batch_size, count)

    @cached_property
    def groups(self) -> list[int]:
        """The group of each prompt."""
        return groups_of(self.prompts)

    def batch_groups(self, count: int) -> list[int]:
        """The group of each of the first `count` batches: those that share a group of prompts are
        one.
        """
        return Groups(_batches(self.groups, self.batch_size, count)).numbers()

    def costs(self) -> StepCosts:
        """Time steps, as `--tree auto` does."""
        draft = None if self.model is None else proposer_of(self.model)
        trees = self.trees_fit
        return measure(self.target, draft, self.sampling, trees=trees, compile=self.compile)

    def tried(self) -> list[str]:
        """Specs of the trees to time."""
        draft = self.draft
        if isinstance(draft, CopyingDraft):
            return list(COPIED) if draft.reads_text else [OWN_TREE]
        chosen = map(name_of, menu(self.deepest, chains_only=not self.trees_fit))
        if isinstance(draft, JoinedDraft):
            return [*chosen, *STOPPING, *GROWING]
        if isinstance(draft, BlockHead):
            stopping = [f"chain:{draft.depths},stop={stop}" for stop in BLOCK_STOPS]
            return [*chosen, *stopping, *GROWING]
        return [*chosen, *LARGER, *STOPPING, *GROWING]

    def timed(
        self,
        decoders: Sequence[SpeculativeDecoder],
        batches: Sequence[Sequence[Sequence[int]]],
        tokens: int,
        rounds: int,
    ) -> Floats:
        """Decode the batches with M decoders, interleaved in rotating order, until each has run
        `CONFIRM_S`. Return tokens and seconds by round, decoder and batch, `[R, M, B, 2]`.
        """
        for decoder in decoders:
            self.run(decoder, batches[0], WARM_UP_TOKENS, ends=False)
        ran: list[Floats] = []
        slowest_s = 0.0
        while len(ran) < rounds and slowest_s < CONFIRM_S:
            ran_MB2 = np.zeros((len(decoders), len(batches), 2))
            for index, batch in enumerate(batches):
                for turn in range(len(decoders)):
                    method = (len(ran) + index + turn) % len(decoders)
                    ran_MB2[method, index] = self.run(decoders[method], batch, tokens, ends=True)
            ran.append(ran_MB2)
            slowest_s += ran_MB2[:, :, 1].sum(1).min()
        return np.stack(ran)

    def try_trees(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """Time the trees on a few prompts. Return also those that the draft cannot draft, with the
        reason.
        """
        candidates: list[Candidate] = []
        not_tried = []
        batches = self.batches(TRY_PROMPTS)
        for spec in self.tried():
            shape = Method.of(spec).shape
            try:
                decoder = self.decoder(shape)
            except ValueError as error:
                not_tried.append({"tree": spec, "reason": str(error)})
                continue
            tokens, seconds = self.timed([decoder], batches, TRY_TOKENS, rounds=1).sum((0, 1, 2))
            candidates.append(Candidate(spec, shape, tokens / seconds))
        return candidates, not_tried

    def confirm(self, finalists: Sequence[Candidate], count: int) -> Confirmed:
        """Time the target alone and every finalist on `count` batches."""
        shapes = [None, *(finalist.shape for finalist in finalists)]
        decoders = [self.decoder(shape) for shape in shapes]
        ran_RMB2 = self.timed(decoders, self.batches(count), self.max_new_tokens, CONFIRM_ROUNDS)
        alone_s = ran_RMB2[:, 0, :, 1] / ran_RMB2[:, 0, :, 0]
        ran_MB2 = ran_RMB2.sum(0)
        sums = [PromptSums(ran_B2[:, 0], ran_B2[:, 1]) for ran_B2 in ran_MB2]
        picks = resamples(self.batch_groups(count), 2000, row_seed(self.seed, "plan/confirm"))
        rows: list[JsonObject] = [
            {"tree": "the target alone", "tokens_per_s": sums[0].pooled, "speedup": None}
        ]
        for finalist, own in zip(finalists, sums[1:], strict=True):
            speedup = quotient(own, sums[0], picks)
            rows.append({"tree": finalist.spec, "tokens_per_s": own.pooled, "speedup": speedup})
        return Confirmed(rows, alone_s.ravel().tolist())


def _batches(values: Sequence[T], size: int, count: int) -> list[Sequence[T]]:
    """The first `count` batches of values by prompt, or all."""
    starts = range(0, min(len(values), count * size), size)
    return [values[start : start + size] for start in starts]
