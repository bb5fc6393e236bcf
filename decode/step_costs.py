"""What a step costs on this machine: the one table that `--tree auto` and `draftsmith plan` choose
by.

Steps of a few trees are timed in the engine, by the clock between their tokens, and their drafting
apart from the rest. What copies is timed on chains that cost nothing to draft.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import mul
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.sampling import Sampling
from draftsmith.decode.batch_run import NoDraft
from draftsmith.decode.engine import SpeculativeDecoder
from draftsmith.decode.propose.protocol import Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.tree import Tree
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.tree_spec import kary

T = TypeVar("T")
Widths = tuple[int, ...]
# Trees that are timed, where no draft limits them, and the depth of one that costs nothing.
SHAPES: tuple[Widths, ...] = ((1,), (1, 1, 1), (4,), (4, 1))
FREE: tuple[Widths, ...] = ((1,), (1,) * 4, (1,) * 8)
CONTEXT = (1, 2)
TOKENS = 5
ROUNDS = 2

Curve = dict[int, float]


@dataclass(frozen=True)
class StepCosts:
    """Seconds at batch 1. target: of a step without a draft, by the rows that it verifies. first:
    what the first level of a tree adds. more: what a further level adds, by nodes that it expands.
    """

    target: Curve
    first: float
    more: Curve

    def step(self, widths: Sequence[int], rows: int = 1, *, drafts: bool = True) -> float:
        """Seconds of a step on a tree with so many children on each level, in a batch of `rows`.
        drafts: False for what is copied.
        """
        nodes = list(accumulate(widths, mul))
        verified = self.at(self.target, rows * (1 + sum(nodes)))
        if not nodes or not drafts:
            return verified
        opened = self.first + self.at(self.more, rows) - self.at(self.more, 1)
        return verified + opened + sum(self.at(self.more, rows * count) for count in nodes[:-1])

    @staticmethod
    def at(curve: Curve, size: int) -> float:
        """The curve at a size, on straight lines between and beyond those that were timed."""
        sizes = sorted(curve)
        if len(sizes) == 1:
            return curve[sizes[0]]
        end = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[end - 1], sizes[end]
        slope = (curve[high] - curve[low]) / (high - low)
        return curve[low] + slope * (size - low)


class _Free(NoDraft, Proposer):
    """Drafts one token over and over, at no cost."""

    def start(self, setup: SessionSetup) -> Session:
        assert isinstance(setup.tree, Tree)
        tokens_BM = torch.zeros(1, setup.tree.size + 1, dtype=torch.long, device=setup.device)
        tokens_BM[:, 0] = -1
        tree = TreeBatch.build(setup.tree, setup.device)
        self.proposal = Proposal(tree, tokens_BM, None, "deterministic")
        return self

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return self.proposal


class _Stopwatch:
    """Notes the times between steps, and the seconds of drafting until then."""

    def __init__(self, device: torch.device) -> None:
        self.on_cpu = device.type == "cpu"
        self.drafting = 0.0
        self.marks: list[tuple[float, float]] = []

    def now(self) -> float:
        """Seconds. On a CPU those in which this thread ran, whatever else the machine does."""
        if self.on_cpu:
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self, *_: object) -> None:
        """Note the end of a step."""
        self.marks.append((self.now(), self.drafting))

    def timed(self, call: Callable[..., T]) -> Callable[..., T]:
        """A call that counts as drafting."""

        def run(given: object) -> T:
            began = self.now()
            result = call(given)
            self.drafting += self.now() - began
            return result

        return run

    def beside(self, draft: Proposer) -> Proposer:
        """A proposer whose sessions are timed."""

        def start(setup: SessionSetup) -> Session:
            session = draft.start(setup)
            session.propose = self.timed(session.propose)  # type: ignore[method-assign]
            session.commit = self.timed(session.commit)  # type: ignore[method-assign]
            return session

        watched = copy(draft)
        watched.start = start  # type: ignore[method-assign]
        return watched


def measure(
    target: PreTrainedModel,
    draft: Proposer | None,
    sampling: Sampling,
    *,
    trees: bool,
    compile: bool | str = False,  # noqa: A002
) -> StepCosts:
    """Time steps of a pair; `trees`: whether it takes trees other than chains. Takes some fifty
    steps.
    """
    decoders: dict[Widths, SpeculativeDecoder] = {(): SpeculativeDecoder(target, compile=compile)}
    watch = _Stopwatch(target.device)
    proposer = watch.beside(draft) if draft else _Free(1, target.device)
    for widths in FREE if draft is None else SHAPES:
        if len(widths) <= (proposer.deepest or 8) and (trees or max(widths) == 1):
            tree = kary(widths)
            decoders[widths] = SpeculativeDecoder(target, proposer, tree, compile=compile)
    target_s: dict[Widths, float] = {}
    drafting_s: dict[Widths, float] = {}
    for turn in range(ROUNDS + 1):
        for widths, decoder in decoders.items():
            watch.marks = []
            most = TOKENS if turn else 2  # the first warms up
            decoder.generate([CONTEXT], sampling, most, eos_ids=(), on_tokens=watch.mark, seed=turn)
            for (began, before), (ended, after) in pairwise(watch.marks):
                drafting = after - before
                # Others on the machine only add time, so the fastest step counts.
                target_s[widths] = min(target_s.get(widths, inf), ended - began - drafting)
                drafting_s[widths] = min(drafting_s.get(widths, inf), drafting)
    return fit(target_s, drafting_s)


def fit(target: Mapping[Widths, float], drafting: Mapping[Widths, float]) -> StepCosts:
    """The table, of seconds by tree; no step is taken to cost less than one with fewer rows, nor
    any drafting less than nothing.
    """
    by_rows = {1 + sum(accumulate(tree, mul)): seconds for tree, seconds in target.items()}
    sizes = sorted(by_rows)
    rising = accumulate((by_rows[size] for size in sizes), max)
    first = drafting.get((1,), 0.0)
    level = max(drafting.get((1, 1, 1), first) - first, 0.0) / 2
    more = {1: level}
    if (4, 1) in drafting:
        more[4] = max(drafting[4, 1] - first, level)
    return StepCosts(dict(zip(sizes, rising, strict=True)), first, more)
