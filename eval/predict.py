"""Predict what decoding with a tree would count, from the traces of the target's own texts
(`eval.formulas`).

Given the output text, a step that begins at token n accepts at least d drafted tokens with chance
R_d(n): the product, along the tree's nodes, of the chances that the text's tokens were accepted.
The next step then begins at n + d + 1. So the expected target calls for a text are a sum over the
positions at which steps begin (`_walk`), weighted by how often they do. That uses the joint runs in
the text, not a power of alpha.

* Unbiased for E[target calls] and E[accepted at depth d] if the texts are the target's own
  continuations at the same sampling. tau is a ratio of two such sums, so its bias is of the order
  1/prompts.
* Block verification, given the text, accepts a prefix of i tokens with chance min over j <= i of
  min(1, Q_j / P_j). Q_j and P_j are the joint probabilities of its first j tokens (from Sun et al.
  2024, arXiv 2403.10444, where w(i) keeps i).
* Intervals: `eval.bootstrap`'s over prompts for the expectation; `away_of_run` for one run.
* Not predicted: trees that grow, because what they keep depends on tokens beside the text; the
  rules greedy, kseq and typical.

Legend: P prompts, L positions of the longest continuation, K ranks, D depths of a head (1 for a
language model).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.settings import Sampling
from draftsmith.decode import VERIFIERS, Tree, TreeShape
from draftsmith.decode.method import Method
from draftsmith.eval.bootstrap import PromptSums, Resamples, pooled_ratios

Floats = NDArray[np.float64]
# A head is unrolled once per depth, so that longer ones cost it time; those that are decoded are
# predicted too.
LONGEST_CHAIN = 8


class PredictedCounts(TypedDict):
    """Expected per prompt: target calls, their variance given the text, and by depth the steps that
    accepted and that reached it (`decode.stats.DecodeStats`).
    """

    target_calls: list[float]
    variance: list[float]
    accepted_by_depth: list[list[float]]
    reached_by_depth: list[list[float]]


@dataclass(frozen=True, eq=False)
class Traces:
    """What decides acceptance at the positions of P continuations of the target, for one draft.

    values: float64 arrays `[D, P, L]`, 0 where nothing was read. Of the first drafted token, with
    D = 1:
    * alpha: sum_x min(p, q)
    * greedy: p(argmax q)
    * match: sum_x p q
    * missing: p of the tokens that the draft cannot draft
    * if asked, those of `text_figures`

    Of the text's token x drafted at depth d. A language model drafts it alike at any depth, so
    there D = 1:
    * ratio: q(x) / p(x)
    * order: 1 if the draft finds no token more probable, 2 if it finds one
    * belief: what a confidence stop reads
    * every rule of `ranks_needed`, `[D, P, L, K]`: the chance that x was accepted at each rank
    * offers, of a draft that may propose nothing: 1 if it proposed a token there
    * copied and copied_alpha, of a draft that copies: 1 if it copied there; alpha if so, else 0
    * those of `copying.joined_traces`, of a model with lookup beside it

    confidence_PB3: sums of `parts.by_confidence` of each continuation.
    """

    lengths_P: NDArray[np.int64]
    any_depth: bool
    values: dict[str, Floats]
    confidence_PB3: Floats | None = None

    @classmethod
    def joined(cls, parts: Sequence["Traces"]) -> "Traces":
        """Put batches one after another."""
        longest = max(part.values["alpha"].shape[2] for part in parts)
        values = {}
        for key in parts[0].values:
            padded = []
            for part in parts:
                array = part.values[key]
                widths = [(0, 0)] * array.ndim
                widths[2] = (0, longest - array.shape[2])
                padded.append(np.pad(array, widths))
            values[key] = np.concatenate(padded, axis=1)
        lengths_P = np.concatenate([part.lengths_P for part in parts])
        sure = [part.confidence_PB3 for part in parts if part.confidence_PB3 is not None]
        return cls(lengths_P, parts[0].any_depth, values, np.concatenate(sure) if sure else None)

    def sums(self, key: str) -> list[float]:
        """By continuation, the sum of a value of the first drafted token."""
        pairs = zip(self.values[key][0], self.lengths_P, strict=True)
        return [float(values_L[:length].sum()) for values_L, length in pairs]


def chains(*, greedy: bool) -> list[Method]:
    """Chains of 1 to 8, above temperature 0 also under block verification."""
    lengths = range(1, LONGEST_CHAIN + 1)
    rules = ["speculative"] if greedy else ["speculative", "block"]
    return [Method.of(f"chain:{length}", rule) for rule, length in product(rules, lengths)]


def predictable(shape: TreeShape, rule: str, sampling: Sampling) -> bool:
    """Whether the counts of a tree and a rule follow from the traces; see the module."""
    if not isinstance(shape, Tree):
        return False  # its shape depends on what was drafted
    if sampling.greedy:
        return VERIFIERS[rule].lossless
    if rule in ("naive", "coupled") and shape.stop:
        return False  # the stop reads another distribution than the one drawn from
    return bool(VERIFIERS[rule].predicted)


def ranks_needed(methods: Sequence[Method], sampling: Sampling) -> dict[str, int]:
    """By rule whose chances by rank are drawn (`formulas.rank_chances`), the most candidates of
    one node; at temperature 0 nothing is drawn.
    """
    needed: dict[str, int] = {}
    for method in methods:
        drawn = VERIFIERS[method.verifier].predicted == "by rank" and not sampling.greedy
        if isinstance(method.shape, Tree) and drawn:
            width = max(method.shape.widths)
            needed[method.verifier] = max(needed.get(method.verifier, 0), width)
    return needed


def predict(
    shape: TreeShape, rule: str, sampling: Sampling, traces: Traces
) -> PredictedCounts | None:
    """Counts expected of decoding these texts with a tree and a rule; None if they cannot be
    predicted.
    """
    if not isinstance(shape, Tree) or not predictable(shape, rule, sampling):
        return None
    if not traces.any_depth and shape.depth > len(traces.values["ratio"]):
        return None
    joint = VERIFIERS[rule].predicted == "by path" and not sampling.greedy
    by_rank = None if joint else chances(max(shape.widths), rule, sampling, traces)
    return _walk(shape, traces, by_rank)


def chances(width: int, verifier: str, sampling: Sampling, traces: Traces) -> Floats:
    """`[D, K, P, L]`: chance that the text's token was accepted at each rank of up to `width`
    candidates.
    """
    if sampling.greedy or verifier == "naive":
        orders_K11 = np.arange(1, 1 + width)[:, None, None]
        same_DKPL = traces.values["order"][:, None] == orders_K11
        return same_DKPL.astype(np.float64)
    if VERIFIERS[verifier].predicted == "by rank":
        return traces.values[verifier].transpose(0, 3, 1, 2)
    return np.minimum(1.0, traces.values["ratio"])[:, None]


def _walk(tree: Tree, traces: Traces, chances_DKPL: Floats | None) -> PredictedCounts:
    """Expected counts of a chain of steps along every text; `chances_DKPL` None for block
    verification on a chain.
    """
    lengths_P = traces.lengths_P
    longest = int(lengths_P.max())
    inside_PL = np.arange(longest) < lengths_P[:, None]

    def at(values_DPL: Floats, level: int) -> Floats:
        """By root: the value of the text's token `level` positions later, drafted at that depth; 0
        beyond the text.
        """
        values_PL = values_DPL[min(level, len(values_DPL) - 1)]
        later_PL = np.pad(values_PL[:, level:], ((0, 0), (0, level)))
        return later_PL[:, :longest]

    one_PL = np.ones_like(inside_PL, dtype=np.float64)
    # By node, the root first: the chance to reach it, and the draft's joint probability of its
    # path.
    reach = [one_PL * inside_PL]
    belief = [one_PL]
    joint_PL = one_PL
    accepted = np.zeros((tree.depth + 2, *one_PL.shape))
    accepted[0] = reach[0]
    offered = np.zeros_like(accepted)
    for parent, rank, level in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        above = reach[parent + 1] * (belief[parent + 1] >= tree.stop)
        if rank == 0:
            offers = traces.values.get("offers")
            offered[level] += above if offers is None else above * at(offers, level - 1)
        if chances_DKPL is None:
            joint_PL = joint_PL * at(traces.values["ratio"], level - 1)
            here = np.minimum(above, joint_PL)
        else:
            here = above * at(chances_DKPL[:, rank], level - 1)
        reach.append(here)
        sure = at(traces.values["belief"], level - 1) if tree.stop else one_PL
        belief.append(belief[parent + 1] * sure)
        accepted[level] += here
    if "copied_same" in traces.values:
        # A step accepts what the better of copy and draft would.
        alone_PL = traces.values["alone"][0]
        run_PL = one_PL * inside_PL
        for level in range(1, tree.depth + 1):
            on_offer_PL = run_PL * at(traces.values["copied"], level - 1)
            run_PL = run_PL * at(traces.values["copied_same"], level - 1)
            offered[level] = np.maximum(offered[level] * (1 - alone_PL), on_offer_PL)
            accepted[level] = np.maximum(accepted[level] * (1 - alone_PL), run_PL)
    return _counted(accepted, offered, inside_PL)


def _counted(accepted: Floats, offered: Floats, inside_PL: NDArray[np.bool_]) -> PredictedCounts:
    """Expected counts of the steps along every text. accepted, offered: by depth and root, the
    chance that a token was accepted, and offered, there.
    """
    # Steps by the tokens they emit, the target's own included: 1 .. depth + 1.
    ends = dict(enumerate(accepted[:-1] - accepted[1:], 1))
    calls_PL, square_PL = _calls(ends, inside_PL)
    visits_PL = _visits(ends, inside_PL)
    left_PL = inside_PL.sum(1, keepdims=True) - np.arange(inside_PL.shape[1])
    accepted_by_depth = []
    reached_by_depth = []
    for depth in range(1, len(accepted) - 1):
        accepted_by_depth.append((visits_PL * accepted[depth]).sum(1))
        reached_PL = visits_PL * offered[depth] * (left_PL >= depth)
        reached_by_depth.append(reached_PL.sum(1))
    variance_P = square_PL[:, 0] - calls_PL[:, 0] ** 2
    return PredictedCounts(
        target_calls=calls_PL[:, 0].tolist(),
        variance=np.maximum(variance_P, 0.0).tolist(),
        accepted_by_depth=np.stack(accepted_by_depth, 1).tolist(),
        reached_by_depth=np.stack(reached_by_depth, 1).tolist(),
    )


def _calls(ends: dict[int, Floats], inside_PL: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Expected target calls from each position to the end of the text, and of their square."""
    prompts, longest = inside_PL.shape
    calls_PL = np.zeros((prompts, longest + len(ends) + 1))
    square_PL = np.zeros_like(calls_PL)
    for t in range(longest - 1, -1, -1):
        later_P = np.zeros(prompts)
        later_square_P = np.zeros(prompts)
        for j, end in ends.items():
            later_P += end[:, t] * calls_PL[:, t + j]
            later_square_P += end[:, t] * square_PL[:, t + j]
        calls_PL[:, t] = inside_PL[:, t] * (1 + later_P)
        square_PL[:, t] = inside_PL[:, t] * (1 + 2 * later_P + later_square_P)
    return calls_PL, square_PL


def _visits(ends: dict[int, Floats], inside_PL: NDArray[np.bool_]) -> Floats:
    """The chance that a step begins at each position."""
    prompts, longest = inside_PL.shape
    visits_PL = np.zeros((prompts, longest + len(ends) + 1))
    visits_PL[:, 0] = 1
    for t in range(longest):
        for j, end in ends.items():
            visits_PL[:, t + j] += visits_PL[:, t] * end[:, t]
    return visits_PL[:, :longest]


def away_of_run(
    sums: PromptSums, variance_P: Sequence[float] | Floats, picks: Resamples, seed: int
) -> Floats:
    """The differences `[R]` of the tau of a run over as many prompts from the predicted one.

    sums: predicted tokens over target calls. variance: of those calls. Both sides vary: the
    prediction by its texts, the run by its own texts and by what it accepts. So they are two
    independent resamples of prompts, and the run's has normal noise with the variance of its calls.
    For a run over the same prompts an interval of these differences covers more than 95 %.
    """
    rng = np.random.default_rng(seed)
    again_RP = picks.weights_RP[rng.permutation(len(picks.weights_RP))]
    noise_R = np.sqrt(again_RP @ np.array(variance_P)) * rng.standard_normal(len(again_RP))
    calls_R = again_RP @ sums.denominator_P + noise_R
    ran_R = (again_RP @ sums.numerator_P) / np.maximum(calls_R, 1e-9)
    away_R: Floats = ran_R - pooled_ratios(sums, picks)
    return away_R
