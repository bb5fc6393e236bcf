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
    default_verifier,
    takes_trees,
)
from draftsmith.decode.method import OWN_TREE, Method
from draftsmith.decode.propose.choosing import menu, name_of
from draftsmith.decode.step_costs import StepCosts, measure
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, depth_limit
from draftsmith.eval.bootstrap import PromptSums, quotient, resamples
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
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S = 1.0
CONFIRM_ROUNDS = 5
# Time limit. As it nears, skip optional work: more trees, prompts and rounds.
LIMIT_S = 900.0


@dataclass(frozen=True)
class Candidate:
    """A tree that may be best. rate: its tokens per second on a few prompts."""

    family: str
    spec: str
    shape: TreeShape
    rate: float

    def row(self) -> JsonObject:
        """The candidate as JSON."""
        return {"family": self.family, "tree": self.spec, "tokens_per_s": self.rate}


class Ran(NamedTuple):
    """What one batch emitted, in how many seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Confirmed:
    """The target alone and the finalists by the clock, as JSON. `alone_s`: the target's seconds per
    token, run by run. batches: how many were timed.
    """

    finalists: Sequence[Candidate]
    rows: list[JsonObject]
    alone_s: list[float]
    batches: int


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

    def verifier(self, shape: TreeShape) -> str:
        """The rule that verifies a tree."""
        return default_verifier(shape, draws=self.model is not None)

    def within(self, share: float) -> bool:
        """Whether less than this share of the time limit is over."""
        return time.perf_counter() - self.started < share * LIMIT_S

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

    def try_trees(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """Time the trees on a few prompts. Return also the skipped trees with the reason."""
        candidates: list[Candidate] = []
        not_tried = []
        batches = self.batches(TRY_PROMPTS)
        for spec in self.tried():
            if candidates and not self.within(0.7):
                not_tried.append({"tree": spec, "reason": "no time was left"})
                continue
            shape = Method.of(spec).shape
            try:
                decoder = self.decoder(shape)
            except ValueError as error:
                not_tried.append({"tree": spec, "reason": str(error)})
                continue
            self.run(decoder, batches[0], 4, ends=False)  # warm-up
            runs = [self.run(decoder, batch, TRY_TOKENS, ends=True) for batch in batches]
            rate = sum(ran.tokens for ran in runs) / sum(ran.seconds for ran in runs)
            candidates.append(Candidate(_family(spec), spec, shape, rate))
        return candidates, not_tried

    def confirm(self, finalists: Sequence[Candidate], count: int) -> Confirmed:
        """Time the target alone and every finalist on `count` batches, interleaved in rotating
        order, until each has run `CONFIRM_S`.
        """
        batches = self.batches(count)
        decoders = [self.decoder(None)]
        decoders += [self.decoder(finalist.shape) for finalist in finalists]
        for decoder in decoders:
            self.run(decoder, batches[0], 8, ends=False)  # warm-up
        tokens_MB = np.zeros((len(decoders), len(batches)))
        seconds_MB = np.zeros_like(tokens_MB)
        alone_s: list[float] = []
        for round_ in range(CONFIRM_ROUNDS):
            for index, batch in enumerate(batches):
                if alone_s and not self.within(1.0):
                    break
                for turn in range(len(decoders)):
                    method = (round_ + index + turn) % len(decoders)
                    ran = self.run(decoders[method], batch, self.max_new_tokens, ends=True)
                    tokens_MB[method, index] += ran.tokens
                    seconds_MB[method, index] += ran.seconds
                    if method == 0:
                        alone_s.append(ran.seconds / ran.tokens)
            if seconds_MB.sum(1).min() >= CONFIRM_S or not self.within(1.0):
                break
        timed = int((seconds_MB[0] > 0).sum())
        picks = resamples(self.batch_groups(timed), 2000, row_seed(self.seed, "plan/confirm"))
        alone, *others = map(PromptSums, tokens_MB[:, :timed], seconds_MB[:, :timed])
        rows: list[JsonObject] = [
            {"tree": "the target alone", "tokens_per_s": alone.pooled, "speedup": None}
        ]
        for finalist, sums in zip(finalists, others, strict=True):
            row = {
                "tree": finalist.spec,
                "tokens_per_s": sums.pooled,
                "speedup": quotient(sums, alone, picks),
                "tried": finalist.rate,
                "family": finalist.family,
            }
            rows.append(row)
        return Confirmed(finalists, rows, alone_s, timed)


def _batches(values: Sequence[T], size: int, count: int) -> list[Sequence[T]]:
    """The first `count` batches of values by prompt, or all."""
    starts = range(0, min(len(values), count * size), size)
    return [values[start : start + size] for start in starts]


def _family(spec: str) -> str:
    kind = spec.partition(":")[0]
    if "stop" in spec:
        return "stop"
    return kind if kind in ("chain", "kary") else "grows"
