"""The steps of a plan: read answers, time steps, choose trees, confirm the best by the clock."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedModel

from draftsmith.core.asked_hash import Groups
from draftsmith.core.errors import counted
from draftsmith.core.io import JsonObject
from draftsmith.core.models import eos_ids, vocabulary_size
from draftsmith.core.progress import Advance
from draftsmith.core.prompts import Prompt
from draftsmith.core.sampling import Sampling, generator, row_seed
from draftsmith.decode import (
    SpeculativeDecoder,
    Tree,
    TreeShape,
    default_verifier,
    takes_trees,
)
from draftsmith.decode.tree import chain
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.load import Draft, depth_limit
from draftsmith.eval.alpha import Reader
from draftsmith.eval.bootstrap import PromptSums, estimate, quotient, resamples
from draftsmith.eval.copying import AnyDraft, CopyingDraft, JoinedDraft, model_of, proposer_of
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.groups import groups_of
from draftsmith.eval.method import OWN_TREE, Method
from draftsmith.eval.planning.expected_tokens import JointRuns, kary_space
from draftsmith.eval.planning.step_costs import Costs, Rounds, fit, time_shapes
from draftsmith.eval.predict import Traces, chances, predict
from draftsmith.eval.schema import Estimate
from draftsmith.eval.timing import answers

T = TypeVar("T")

# Most nodes and levels of a tree that is chosen.
NODES = 64
DEPTH = 16
# Siblings per node that are predicted: RANKS if drawing that many is quick, else FEW_RANKS.
RANKS = 32
FEW_RANKS = 8
MANY_ELEMENTS = 2**25
# Trees that are timed, because their steps vary in size or cost.
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
JOINED = (*(f"chain:{length}" for length in (1, 2, 3, 4, 6)), "kary:4", "kary:2,1", "kary:3,2")
TEXT_BATCH = 16
# Tokens of a run that times a step.
STEP_TOKENS = 16
# Prompts and tokens of a run that tries a tree.
TRY_PROMPTS = 3
TRY_TOKENS = 32
# Time finalists again, with the same seeds, until each has run this long, in at most this many
# rounds.
CONFIRM_S = 1.0
CONFIRM_ROUNDS = 5
# Time limit. As it nears, skip optional work: more prompts, rounds, trees whose tau cannot be
# predicted.
LIMIT_S = 900.0


@dataclass(frozen=True)
class Candidate:
    """A tree that may be best. spec: None for a tree without a name. rate: tokens per second.
    step_s: of a tree whose rate follows from acceptance and the costs of a step; None if steps vary
    in size or cost, so that its rate was timed on a few prompts.
    """

    family: str
    spec: str | None
    shape: TreeShape
    rate: float
    step_s: float | None = None

    @property
    def name(self) -> str:
        """The spec, or the size of a tree without one."""
        size = f"{counted(self.shape.size, 'node')} in {counted(self.shape.depth, 'level')}"
        return self.spec or f"static, {size}"

    def row(self, tau: Estimate | None = None) -> JsonObject:
        """The candidate as JSON. A tree that was timed has no predicted tau."""
        return {
            "family": self.family,
            "tree": self.name,
            "tokens_per_s": self.rate,
            "step_s": self.step_s,
            "tau": tau,
        }


class Ran(NamedTuple):
    """What one batch emitted, in how many seconds and steps."""

    tokens: int
    seconds: float
    steps: int


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
    def predicts(self) -> bool:
        """Whether all steps of a tree cost alike, so that trees are ranked without trying them."""
        return not isinstance(self.draft, CopyingDraft | JoinedDraft)

    @property
    def depth_limit(self) -> int | None:
        """Most levels that the draft can draft; None without a limit."""
        return None if self.model is None else depth_limit(self.model)

    @property
    def depth(self) -> int:
        """Most levels of a tree."""
        return min(DEPTH, self.depth_limit or DEPTH)

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
            steps=max(row.stats.target_calls for row in rows),
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

    def answers(self) -> list[Continuation]:
        """Continue the prompts with the target; stop after 30 % of the time."""
        rows: list[Continuation] = []
        while len(rows) < len(self.prompts) and (not rows or self.within(0.3)):
            rows += answers(
                self.target,
                self.prompts[len(rows) : len(rows) + TEXT_BATCH],
                self.sampling,
                max_new_tokens=self.max_new_tokens,
                batch_size=TEXT_BATCH,
                seed=self.seed,
            )
        return rows

    def ranks(self, texts: Sequence[Continuation]) -> int:
        """Number of siblings whose acceptance is measured."""
        positions = sum(len(row.output_ids) for row in texts)
        elements = positions * vocabulary_size(self.target)
        return RANKS if self.sampling.greedy or elements <= MANY_ELEMENTS else FEW_RANKS

    def traces(self, texts: Sequence[Continuation]) -> Traces:
        """Read the acceptance of chains and trees off the answers."""
        methods = [
            Method.of(f"chain:{self.depth}", "naive"),
            Method.of(f"kary:{self.ranks(texts)}", "mcsd"),
        ]
        reader = Reader(self.target, {"d": self.draft}, self.sampling, methods, TEXT_BATCH)
        return reader.read(texts)["d"]

    def time_steps(self, texts: Sequence[Continuation]) -> Rounds:
        """Time steps on trees of several shapes, or on whole chains, round by round. Contexts are
        the first two thirds of each prompt plus answer.
        """
        contexts = []
        for row in texts:
            length = max(1, 2 * len(row.ids) // 3)
            contexts.append(row.ids[:length])
        batch = [contexts[index % len(contexts)] for index in range(self.batch_size)]
        decoder = cache(self.decoder)

        def seconds(tree: Tree | None) -> float:
            ran = self.run(decoder(tree), batch, STEP_TOKENS, ends=False)
            return ran.seconds / ran.steps

        return time_shapes(
            seconds,
            self.depth_limit,
            lambda: self.within(0.5),
            trees_fit=self.trees_fit,
        )

    def try_trees(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """Time the trees of `tried` on a few prompts. Return also the skipped trees with the
        reason.
        """
        candidates: list[Candidate] = []
        not_tried = []
        batches = self.batches(TRY_PROMPTS)
        for spec in tried(self.draft):
            needed = not (self.predicts or candidates)
            if not needed and not self.within(0.7):
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
                "tree": finalist.name,
                "tokens_per_s": sums.pooled,
                "speedup": quotient(sums, alone, picks),
                "predicted_or_tried": finalist.rate,
                "family": finalist.family,
            }
            rows.append(row)
        return Confirmed(finalists, rows, alone_s, timed)

    def expect(self, advance: Advance) -> "Expected":
        """Read and time what static trees are ranked by."""
        advance(1, "the target's answers")
        texts = self.answers()
        advance(1, "acceptance")
        traces = self.traces(texts)
        advance(1, "costs of a step")
        rounds = self.time_steps(texts)
        advance(1, "choosing")
        return Expected(self, texts, traces, rounds)


@dataclass(frozen=True)
class Expected:
    """Predictions for static trees, from one forward over the target's answers and the seconds of
    steps.
    """

    planner: Planner
    texts: Sequence[Continuation]
    traces: Traces
    rounds: Rounds

    @cached_property
    def costs(self) -> Costs:
        return fit(self.rounds)

    def tokens_per_call(self, tree: TreeShape, verifier: str) -> PromptSums:
        """Tokens of every text over its predicted target calls."""
        counts = predict(tree, verifier, self.planner.sampling, self.traces)
        assert counts is not None
        return PromptSums.of(self.traces.lengths_P.tolist(), counts["target_calls"])

    def row(self, candidate: Candidate) -> JsonObject:
        """A candidate as JSON, with its predicted tau."""
        groups = self.planner.groups[: len(self.texts)]
        picks = resamples(groups, 500, row_seed(self.planner.seed, "plan/tau"))
        verifier = default_verifier(candidate.shape)
        return candidate.row(estimate(self.tokens_per_call(candidate.shape, verifier), picks))

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Static trees with their predicted rates, fastest first."""
        planner = self.planner
        ranks = planner.ranks(self.texts)
        chances_DKPL = chances(ranks, "mcsd", planner.sampling, self.traces)
        runs = JointRuns(chances_DKPL, self.traces.lengths_P)
        found: dict[Tree, Candidate] = {}

        def add(family: str, spec: str | None, tree: Tree) -> None:
            if tree not in found:
                step_s = self.costs.step(tree)
                rate = planner.batch_size * runs.length(tree) / step_s
                found[tree] = Candidate(family, spec, tree, rate, step_s)

        for levels in range(1, planner.depth + 1):
            add("chain", f"chain:{levels}", chain(levels))
        if planner.trees_fit:
            for spec, tree in kary_space(NODES, planner.depth, ranks).items():
                add("kary", spec, tree)
            for levels in range(2, planner.depth + 1):
                for tree in runs.grow(NODES, levels):
                    if not tree.is_chain:
                        add("grown", None, tree)
        return sorted(found.values(), key=lambda candidate: -candidate.rate)


def _batches(values: Sequence[T], size: int, count: int) -> list[Sequence[T]]:
    """The first `count` batches of values by prompt, or all."""
    starts = range(0, min(len(values), count * size), size)
    return [values[start : start + size] for start in starts]


def _family(spec: str) -> str:
    kind = spec.partition(":")[0]
    if "stop" in spec:
        return "stop"
    return kind if kind in ("chain", "kary") else "grows"


def tried(draft: AnyDraft) -> list[str]:
    """Specs of the trees to time: their steps vary in size or cost, so they cannot be predicted."""
    if isinstance(draft, CopyingDraft):
        return list(COPIED) if draft.reads_text else [OWN_TREE]
    if isinstance(draft, JoinedDraft):
        return [*JOINED, *tried(draft.model)]
    if isinstance(draft, BlockHead):
        stopping = [f"chain:{draft.depths},stop={stop}" for stop in BLOCK_STOPS]
        return [*stopping, *GROWING]
    return [*STOPPING, *GROWING]
