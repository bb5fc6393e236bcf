"""What a step costs on this machine: the one table that `--tree auto` and `draftsmith plan` choose
by.

Steps are timed whole, in the engine, by the clock between their tokens: of the target alone, of
chains that cost nothing to draft, which give the target's price by its rows, and of the draft on
three trees.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.models import context_length, vocabulary_size
from draftsmith.core.sampling import Sampling
from draftsmith.decode.engine import SpeculativeDecoder
from draftsmith.decode.propose.protocol import Outcome, Proposal, Proposer, Session, SessionSetup
from draftsmith.decode.tree import Tree, chain
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.tree_spec import kary

# Rows of the target that are timed behind the first.
MORE_ROWS = (1, 2, 4, 8)
CONTEXT = 8
STEPS = 6
ROUNDS = 3

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
        nodes = list(accumulate(widths, lambda above, width: above * width))
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


class _Free(Proposer, Session):
    """Drafts one token over and over, at no cost."""

    def start(self, setup: SessionSetup) -> Session:
        self.tree = TreeBatch.build(setup.tree, setup.device)  # type: ignore[arg-type]
        self.tokens_BM = torch.zeros(1, setup.tree.size + 1, dtype=torch.long, device=setup.device)
        self.tokens_BM[:, 0] = -1
        return self

    def propose(self, u_BN: Tensor | None) -> Proposal:
        return Proposal(self.tree, self.tokens_BM, None, "deterministic")

    def commit(self, outcome: Outcome) -> None:
        return

    def select_rows(self, rows: Sequence[int]) -> None:
        return


def measure(
    target: PreTrainedModel,
    draft: Proposer | None,
    sampling: Sampling,
    *,
    trees: bool,
    compile: bool | str = False,  # noqa: A002
) -> StepCosts:
    """Time steps of a pair; `trees`: whether it takes trees other than chains. Takes some hundred
    steps.
    """
    decoder = partial(SpeculativeDecoder, target, compile=compile)
    shapes: dict[str, Tree] = {}
    if draft is not None:
        shapes["first"] = chain(1)
        if draft.deepest is None or draft.deepest > 2:
            shapes["levels"] = chain(3)
            if trees:
                shapes["wide"] = kary((4, 1))
    decoders = {"alone": decoder()}
    for count in MORE_ROWS:
        decoders[f"rows:{count}"] = decoder(_Free(), chain(count))
    for name, tree in shapes.items():
        decoders[name] = decoder(draft, tree)
    context = [1 + index % (vocabulary_size(target) - 1) for index in range(CONTEXT)]
    room = (context_length(target) or 1024) - CONTEXT
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for turn in range(ROUNDS + 1):
        for name, timed in decoders.items():
            clock = _Clock(target.device)
            most = min((STEPS + 1) * (timed.tree.depth + 1), room)
            timed.generate([context], sampling, most, eos_ids=(), stop=clock, seed=turn)
            if turn:  # the first warms up
                seconds[name] += [after - before for before, after in pairwise(clock.times)]
    # Others on the machine only add time, so the fastest step counts.
    return fit({name: min(values) for name, values in seconds.items() if values})


def fit(seconds: dict[str, float]) -> StepCosts:
    """The table of seconds per step by name; no step is taken to cost less than one with fewer
    rows, nor any drafting less than nothing.
    """
    names = ["alone", *(f"rows:{count}" for count in MORE_ROWS)]
    rising = accumulate((seconds[name] for name in names), max)
    target = dict(zip([1, *(1 + count for count in MORE_ROWS)], rising, strict=True))
    at = StepCosts.at

    def added(name: str, rows: int, below: float) -> float:
        return max(seconds[name] - at(target, rows) - below, 0.0)

    first = added("first", 2, 0.0) if "first" in seconds else 0.0
    more = {1: 0.0}
    if "levels" in seconds:
        more[1] = added("levels", 4, first) / 2
    if "wide" in seconds:
        more[4] = max(added("wide", 9, first), more[1])
    return StepCosts(target, first, more)


class _Clock:
    """A stop condition that notes the time of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, ids: Sequence[int], new: int) -> int | None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        return new if len(self.times) > STEPS else None
