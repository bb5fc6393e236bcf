"""Find where a server accepts less: beyond a length, after a while, on a second reading.

Legend: P prompts, G groups of equal prompts, S splits of groups, R permutations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums, Resamples, difference, estimate, resamples
from draftsmith.eval.schema import Estimate
from draftsmith.serving.asking import AGAIN, SHARED, ServedPrompt
from draftsmith.serving.running_server import ServedAnswer

# Ignore smaller differences in accepted tokens per call.
ACCEPTED_MARGIN = 0.05
RESAMPLES = 2000
# A suspicion of one of several readings needs an interval that is wider than for one comparison.
_WIDER = 1.5
# Share of permutations that may split as sharply: alone, and if less is accepted over all.
_ALONE = 0.01
_BESIDE = 0.05
# Beyond a draft's own context, the server drafts on fewer calls than this share.
_CUT = 0.9


@dataclass(frozen=True)
class Compared:
    """Tokens over target calls of the same prompts, served and predicted. groups: of equal
    prompts.
    """

    served: PromptSums
    predicted: PromptSums
    groups: Sequence[int]

    @cached_property
    def picks(self) -> Resamples:
        return resamples(self.groups, RESAMPLES, seed=0)

    @property
    def margin(self) -> float:
        return ACCEPTED_MARGIN * ((self.predicted.pooled or 1.0) - 1)

    @cached_property
    def away(self) -> Estimate:
        return difference(self.served, self.predicted, self.picks)

    @property
    def is_less(self) -> bool:
        return (self.away["value"] or 0.0) < -self.margin

    @property
    def as_predicted(self) -> bool:
        return close(self.away, 0.0, self.margin)

    def of(self, chosen: Sequence[int]) -> "Compared":
        """Return the counts of some prompts."""
        groups = [self.groups[index] for index in chosen]
        return Compared(_part(self.served, chosen), _part(self.predicted, chosen), groups)

    def figures(self) -> JsonObject:
        return {
            "prompts": len(self.groups),
            "served": estimate(self.served, self.picks),
            "predicted": estimate(self.predicted, self.picks),
        }


@dataclass(frozen=True)
class Split:
    """Prompts as predicted, and those with less, in the order of a key. last: the greatest key of
    the former. first: the least of the latter.
    """

    before: list[int]
    after: list[int]
    last: int
    first: int


@dataclass(frozen=True)
class Pattern:
    """A suspect that the counts show. misfit: as of a replay (`acceptance`). split: prompts that a
    cause must explain apart.
    """

    suspect: str
    detail: str
    misfit: float
    split: Split | None = None

    def row(self, served: PromptSums, likelihood: Estimate) -> JsonObject:
        """Return it as a suspect that was tried (`acceptance`)."""
        likely = likelihood["value"] or 0.0
        return {
            "suspect": self.suspect,
            "detail": self.detail,
            "tokens_per_call": served.pooled,
            "likelihood": likely,
            "misfit": self.misfit + abs(1 - likely),
            "fits": True,
        }


def _part(sums: PromptSums, chosen: Sequence[int]) -> PromptSums:
    rows = list(chosen)
    return PromptSums(sums.numerator_P[rows], sums.denominator_P[rows])


def close(value: Estimate, to: float, margin: float) -> bool:
    """Return whether an estimate is within the margin, or its interval holds the value."""
    if abs((value["value"] or 0.0) - to) <= margin:
        return True
    low = value["low"]
    high = value["high"]
    return low is not None and low <= to and (high is None or to <= high)


def by_length(counts: Compared, asked: Sequence[ServedPrompt]) -> list[JsonObject]:
    """Return a row for each doubling of the prompt's length, in tokens."""
    return _by(counts, [1 << (length - 1).bit_length() for length in _lengths(asked)])


def by_cached(counts: Compared, asked: Sequence[ServedPrompt]) -> list[JsonObject]:
    """Return a row for each quarter of the prompt that the server had cached, over all readings;
    none if it does not say.
    """
    chosen = []
    shares = []
    answers = []
    for row, each in enumerate(asked):
        for answer in (each.answer, *each.later.values()):
            if answer.cached is not None:
                chosen.append(row)
                answers.append(answer)
                shares.append(math.ceil(4 * answer.cached / len(answer.prompt_ids)) / 4)
    first = counts.of(chosen)
    return _by(replace(first, served=counted(answers)), shares)


def _by(counts: Compared, keys: Sequence[float]) -> list[JsonObject]:
    rows = []
    for up_to in sorted(set(keys)):
        chosen = [index for index, key in enumerate(keys) if key == up_to]
        rows.append({"up_to": up_to, **counts.of(chosen).figures()})
    return rows


def _lengths(asked: Sequence[ServedPrompt]) -> list[int]:
    return [len(each.answer.prompt_ids) for each in asked]


def find_patterns(
    counts: Compared, asked: Sequence[ServedPrompt], less: bool, draft_tokens: int
) -> list[Pattern]:
    """Return what the counts show. less: whether less is accepted over all."""
    patterns = []
    level = _BESIDE if less else _ALONE
    if split := _split(counts, _lengths(asked), level):
        patterns.append(_beyond_a_length(counts, asked, split, draft_tokens))
    # The order was drawn, so that equal prompts are told apart.
    apart = replace(counts, groups=range(len(asked)))
    if split := _split(apart, [each.order for each in asked], level):
        detail = f"as predicted for {split.last + 1} prompts, less from then on"
        patterns.append(Pattern("time", detail, _misfit(counts, split), split))
    return patterns


def _beyond_a_length(
    counts: Compared, asked: Sequence[ServedPrompt], split: Split, draft_tokens: int
) -> Pattern:
    detail = f"as predicted up to {split.last} tokens of prompt, less from {split.first} on"
    drafted = []
    for chosen in (split.before, split.after):
        answers = [asked[index].answer for index in chosen]
        calls = sum(answer.calls for answer in answers)
        drafted.append(sum(answer.drafted for answer in answers) / (calls * draft_tokens))
    suspect = "length"
    if drafted[1] < _CUT * drafted[0]:
        suspect = "context of the draft"
        detail += f", where {drafted[1]:.0%} of the tokens are drafted instead of {drafted[0]:.0%}"
    return Pattern(suspect, detail, _misfit(counts, split), split)


def less_later(counts: Compared, asked: Sequence[ServedPrompt]) -> list[Pattern]:
    """Return suspicions of the prefix cache and of time, if later readings accept less."""
    found: dict[str, list[str]] = {}
    for name, reading in later_readings(counts, asked).items():
        value = reading.away["value"] or 0.0
        high = reading.away["high"]
        if value < -counts.margin and high is not None and value + _WIDER * (high - value) < 0:
            suspect = "prefix cache" if name in (AGAIN, SHARED) else "time"
            line = f"{name} ({reading.served.pooled:.2f}, not {reading.predicted.pooled:.2f})"
            found.setdefault(suspect, []).append(line)
    patterns = []
    for suspect, lines in found.items():
        detail = f"less on a second reading {' and '.join(lines)}"
        patterns.append(Pattern(suspect, detail, _misfit(counts, None)))
    return patterns


def later_readings(counts: Compared, asked: Sequence[ServedPrompt]) -> dict[str, Compared]:
    """Return later readings as served, and the first reading of the same prompts as predicted."""
    readings = {}
    for name in {name: 0 for each in asked for name in each.later}:
        chosen = [row for row, each in enumerate(asked) if name in each.later]
        again = counted([asked[row].later[name] for row in chosen])
        first = counts.of(chosen)
        readings[name] = Compared(again, first.served, first.groups)
    return readings


def counted(answers: Sequence[ServedAnswer]) -> PromptSums:
    """Return the emitted tokens over the target calls; the first token comes without a call."""
    emitted = [len(answer.output_ids) - 1 for answer in answers]
    return PromptSums.of(emitted, [answer.calls for answer in answers])


def _misfit(counts: Compared, split: Split | None) -> float:
    """Share of target calls that differ from the prediction, prompt by prompt; after the split,
    from the rate served there.
    """
    tokens_P = counts.served.numerator_P
    calls_P = counts.served.denominator_P
    expected_P = _expected_calls(counts)
    if split is not None:
        after = split.after
        expected_P[after] = tokens_P[after] * calls_P[after].sum() / tokens_P[after].sum()
    return float(np.abs(calls_P - expected_P).sum() / calls_P.sum())


def _expected_calls(counts: Compared) -> "np.typing.NDArray[np.float64]":
    """Target calls that were predicted for as many tokens as were served."""
    predicted = counts.predicted
    return predicted.denominator_P * counts.served.numerator_P / predicted.numerator_P


def _split(counts: Compared, keys: Sequence[int], level: float) -> Split | None:
    """Return the split by a key from which on less is accepted, by a permutation test over all
    splits. Before it, acceptance must be as predicted.
    """
    _, group_P = np.unique(counts.groups, return_inverse=True)
    key_G = np.bincount(group_P, keys) / np.bincount(group_P)
    by_key_G = key_G.argsort(kind="stable")
    extra_P = counts.served.denominator_P - _expected_calls(counts)
    extra_G = np.bincount(group_P, extra_P)[by_key_G]
    tokens_G = np.bincount(group_P, counts.served.numerator_P)[by_key_G]
    sizes_S = 1 + np.flatnonzero(np.diff(key_G[by_key_G]) > 0)
    if not sizes_S.size:
        return None
    size = len(key_G)
    random = np.random.default_rng(0)
    orders_RG = random.permuted(np.tile(np.arange(size), (RESAMPLES, 1)), axis=1)
    orders_RG[0] = np.arange(size)
    extra_RG = extra_G[orders_RG].cumsum(1)
    tokens_RG = tokens_G[orders_RG].cumsum(1)
    head_RS = extra_RG[:, sizes_S - 1] / tokens_RG[:, sizes_S - 1]
    tail_tokens_RS = tokens_RG[:, -1:] - tokens_RG[:, sizes_S - 1]
    tail_RS = (extra_RG[:, -1:] - extra_RG[:, sizes_S - 1]) / tail_tokens_RS
    rise_RS = (tail_RS - head_RS) * np.sqrt(sizes_S * (size - sizes_S))
    sharpest_R = rise_RS.max(1)
    if (sharpest_R >= sharpest_R[0] - 1e-9).mean() > level:
        return None
    limit = key_G[by_key_G][sizes_S[rise_RS[0].argmax()] - 1]
    before = [index for index in range(len(keys)) if key_G[group_P[index]] <= limit]
    after = [index for index in range(len(keys)) if key_G[group_P[index]] > limit]
    found = Split(before, after, max(keys[i] for i in before), min(keys[i] for i in after))
    tail = counts.of(after)
    is_less = tail.is_less and not close(tail.away, 0.0, 0.0)
    return found if is_less and counts.of(before).as_predicted else None
