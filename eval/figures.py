"""The figures of an evaluation: each is a declared ratio of counts with its definition.

`estimate` adds up the table of counts (`eval.counts`) over the prompts of every set, and over those
of every resample of them, and divides last. A figure of one's own is one entry of `FIGURES`.

Legend: R resamples.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from draftsmith.core.sampling import row_seed
from draftsmith.eval.bootstrap import PromptSums, Resamples, Sampled
from draftsmith.eval.counts import TARGET
from draftsmith.eval.predict import away_of_run
from draftsmith.eval.schema import Row
from draftsmith.eval.sums import Draw, Key, NumberedCounts, Sums

if TYPE_CHECKING:
    from pandas import DataFrame

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """Sum of one count over the sum of another."""

    above: str
    below: str
    meaning: str = ""

    def keys(self, sums: Sums) -> list[Key]:
        return sums.keys(self.below, self.above)

    def of(self, sums: Sums, key: Key) -> Sampled:
        return sums.ratio(key, self.above, self.below)


@dataclass(frozen=True)
class _Paired:
    """A ratio beside another one of the same prompts."""

    ratio: Ratio
    meaning: str

    @property
    def below(self) -> str:
        return self.ratio.below

    def keys(self, sums: Sums) -> list[Key]:
        keys = dict.fromkeys(self.ratio.keys(sums))
        found = []
        for key in keys:
            beside = self.beside(sums, key)
            if beside != key and beside in keys and sums.paired(key, beside, self.below):
                found.append(key)
        return found

    @abstractmethod
    def beside(self, sums: Sums, key: Key) -> Key:
        """What the other ratio is of."""


@dataclass(frozen=True)
class Over(_Paired):
    """A ratio over that of the target alone."""

    def beside(self, sums: Sums, key: Key) -> Key:
        return key._replace(draft=TARGET, tree=None, rule=None)

    def of(self, sums: Sums, key: Key) -> Sampled:
        own = self.ratio.of(sums, key)
        alone = self.ratio.of(sums, self.beside(sums, key))
        of_seeds = [each / alone.values[0] for each in own.of_seeds if alone.values[0]]
        return own.over(alone)._replace(of_seeds=of_seeds)


@dataclass(frozen=True)
class Minus(_Paired):
    """A ratio minus that of the base draft."""

    def beside(self, sums: Sums, key: Key) -> Key:
        return key._replace(draft=sums.draw.base)

    def of(self, sums: Sums, key: Key) -> Sampled:
        new = self.ratio.of(sums, key)
        base = self.ratio.of(sums, self.beside(sums, key))
        # Every seed over every seed of the base.
        seeds = [one - other for one, other in product(new.of_seeds, base.of_seeds)]
        return new.minus(base)._replace(of_seeds=seeds, seeds=len(new.of_seeds))


@dataclass(frozen=True)
class Quotient:
    """A difference on sets out of distribution over the same in distribution. It has no value where
    the latter may be zero, and is not given of what has a count named `unless`.
    """

    minus: Minus
    unless: str
    meaning: str

    @property
    def below(self) -> str:
        return self.minus.below

    def keys(self, sums: Sums) -> list[Key]:
        if sums.home is None or sums.kind == "id":
            return []
        keys = [key for key in self.minus.keys(sums) if key.part is None]
        return [key for key in keys if not sums.has(key, self.unless)]

    def of(self, sums: Sums, key: Key) -> Sampled:
        home = sums.home
        if home is None or key not in self.minus.keys(home) or home.has(key, self.unless):
            return Sampled(np.full(1, np.nan))
        here = self.minus.of(sums, key)
        there = self.minus.of(home, key)
        low = there.estimate(home.picks[self.below])["low"]
        if low is None or low <= 0:
            return Sampled(np.full(1, np.nan))
        return here.over(there)._replace(least=-math.inf)


@dataclass(frozen=True)
class MeanOfPrompts:
    """Mean of the ratios of the prompts that have one."""

    above: str
    below: str
    meaning: str

    def keys(self, sums: Sums) -> list[Key]:
        return [key for key in sums.keys(self.below, self.above) if key.part is None]

    def of(self, sums: Sums, key: Key) -> Sampled:
        pair = PromptSums(sums.prompts(key, self.above), sums.prompts(key, self.below))
        mean = pair.mean_per_prompt
        return Sampled(np.array([math.nan if mean is None else mean]))


@dataclass(frozen=True)
class OneRun:
    """A ratio, between the bounds that it has in a run over as many other prompts."""

    above: str
    below: str
    variance: str
    meaning: str

    def keys(self, sums: Sums) -> list[Key]:
        return sums.keys(self.variance)

    def of(self, sums: Sums, key: Key) -> Sampled:
        pair = PromptSums(sums.prompts(key, self.above), sums.prompts(key, self.below))
        where = f"{sums.set or sums.kind}/{key.temperature}"
        seed = row_seed(sums.draw.seed, f"run/{key.draft}/{key.tree} {key.rule}/{where}")
        variance_P = sums.prompts(key, self.variance)
        away_R = away_of_run(pair, variance_P, sums.picks[self.below], seed)
        most = sums.draw.most_tokens.get(key.tree or "", math.inf)
        value = pair.pooled or math.nan
        return Sampled(np.array([value, *(value + away_R)]), 1.0, most)


Figure = Ratio | Over | Minus | Quotient | MeanOfPrompts | OneRun

_ALPHA = Ratio(
    "alpha",
    "positions",
    "Expected acceptance of one draft token: the mean over the positions of the target's own "
    "answers, end token included, of sum_x min(p(x), q(x)), p and q being what target and draft "
    "sample from at this temperature. Of a head it is the first token that it drafts.",
)
_TAU = Ratio(
    "emitted",
    "calls",
    "Block efficiency, measured: tokens emitted per call of the target, its own extra token "
    "included; 1 for the target alone. Tokens past the end or the length limit do not count.",
)
_SPEED = Ratio("timed_tokens", "decode_s", "Tokens per second at batch 1, without the prefill.")
FIGURES: dict[str, Figure] = {
    "alpha": _ALPHA,
    "alpha_per_prompt": MeanOfPrompts("alpha", "positions", "Mean of the alphas of the prompts."),
    "alpha_greedy_draft": Ratio(
        "greedy",
        "positions",
        "alpha where the draft takes its most probable token and the target samples: p(argmax q).",
    ),
    "alpha_match": Ratio(
        "match",
        "positions",
        "alpha where a drafted token is kept if the target samples the same: sum_x p(x) q(x).",
    ),
    "missing_mass": Ratio(
        "missing",
        "positions",
        "The target's probability on tokens that the draft cannot draft; alpha is at most 1 minus "
        "it.",
    ),
    "offered": Ratio(
        "copied",
        "positions",
        "Of prompt lookup and retrieval: the share of positions with a copy to propose.",
    ),
    "alpha_offered": Ratio("copied_alpha", "copied", "alpha of the copies."),
    "alpha_drafted": Ratio(
        "drafted_alpha", "drafted", "Of lookup beside a draft: the draft's alpha where it is asked."
    ),
    "gain": Minus(_ALPHA, "alpha minus the base draft's on the same prompts."),
    "transfer": Quotient(
        Minus(_ALPHA, ""),
        unless="copied",
        meaning="Gain out of distribution over the gain in distribution, all ID sets pooled. "
        "Undefined unless the interval of the latter lies above zero.",
    ),
    "tau": _TAU,
    "tau_per_prompt": MeanOfPrompts("emitted", "calls", "Mean of the taus of the prompts."),
    "tau_gain": Minus(_TAU, "tau minus the base draft's with the same tree and verifier."),
    "accept": Ratio(
        "accepted_here",
        "reached",
        "Measured, by depth d: how often a token at d was accepted, of the steps in which that at "
        "d-1 was and one at d was on offer. accept at depth 1 is not alpha: steps begin more often "
        "where the draft was just refused.",
    ),
    "alpha_mcsd": Ratio(
        "accepted",
        "offered_depth",
        "Accepted depth over offered depth, as the MCSD paper defines acceptance. Compare it only "
        "between equal trees.",
    ),
    "lookup_calls": Ratio(
        "copied_calls",
        "calls",
        "Of lookup beside a draft: the share of target calls in which the copy went further.",
    ),
    "lookup_accepted": Ratio("copied_accepted", "calls", "Tokens accepted in these, per call."),
    "draft_accepted": Ratio("drafted_accepted", "calls", "Tokens accepted in the other calls."),
    "identical": Ratio(
        "identical",
        "outputs",
        "At temperature 0: the share of outputs equal, token for token, to the target's own.",
    ),
    "tau_predicted": Ratio(
        "expected_tokens",
        "expected_calls",
        "tau without decoding: tokens of the target's own answers over the target calls that they "
        "would be expected to take, from the acceptance of every token at every depth.",
    ),
    "tau_run": OneRun(
        "expected_tokens",
        "expected_calls",
        "calls_variance",
        "tau_predicted, between the bounds in which tau of one run over as many prompts falls in "
        "at least 95 % of cases.",
    ),
    "accept_predicted": Ratio(
        "expected_accepted", "expected_reached", "accept as predicted with tau."
    ),
    "speedup": Over(
        _SPEED,
        "Tokens per second over those of the target alone: same engine and process, batch 1, the "
        "same prompts, runs interleaved after a warm-up, without the prefill.",
    ),
    "speedup_with_prompt": Over(
        Ratio("timed_tokens", "whole_s"), "speedup with the prefill on both sides."
    ),
    "tau_needed": Over(
        Ratio("decode_s", "timed_calls"),
        "Tokens per call from which a draft with a tree pays: seconds of its step over those of "
        "the target alone.",
    ),
    "tokens_per_s": _SPEED,
    "latency_s_per_token": Ratio(
        "decode_s", "timed_tokens", "Seconds per token at batch 1, without the prefill."
    ),
    "looping": Ratio(
        "looping",
        "tokens",
        "Share of the tokens of the target's answers that are in answers which repeat themselves: "
        "half of their runs of four tokens occurred before. These are not timed.",
    ),
    "prompt_nats": Ratio(
        "prompt_nats",
        "prompt_tokens",
        "Minus the log-probability of a prompt's token under the target, from the second on.",
    ),
    "confidence": Ratio(
        "sure", "drafted_mass", "By tenth of the draft's confidence: the mean confidence."
    ),
    "acceptance": Ratio(
        "taken",
        "drafted_mass",
        "By tenth of the draft's confidence: how often the target takes such a token. At "
        "temperature 0, of the draft's most probable token by its probability at temperature 1.",
    ),
}
"""Every figure by its name."""
TERMS = {
    "interval": "95 % bootstrap over groups of prompts, drawn with replacement; each figure is "
    "computed again from the sums of a resample. Percentiles are moved away from the median by "
    "what they are too narrow by for so few groups (Student's t). Differences and quotients use "
    "the same draw on both sides. None for a single group. It does not hold how much another "
    "training seed would change a draft.",
    "group": "Prompts that count as one, in intervals and in every n: they ask the same, or have "
    "the same tokens but for 4 at most, which are at most a quarter of what the user says.",
    "seeds": "Figures of a draft with several training seeds add up the counts of all; seed_low "
    "and seed_high are those of the lowest and highest seed, of a gain of every seed over every "
    "seed of the base.",
    "lossless": "The verifier leaves the target's output distribution unchanged. With lossless: "
    "false, tokens per call or per second are not comparable as they stand.",
}
"""Words that figures share."""
_NUMBERS = ("depth", "value", "low", "high", "seed_low", "seed_high", "seeds")


def definitions(figures: Mapping[str, Figure] = FIGURES) -> dict[str, str]:
    """Return the meaning of every figure and of the words that they share."""
    return {name: figure.meaning for name, figure in figures.items()} | TERMS


def estimate(
    counts: "DataFrame",
    figures: Mapping[str, Figure] = FIGURES,
    *,
    base: str,
    resamples: int = RESAMPLES,
    seed: int = 0,
    most_tokens: Mapping[str, float] = {},  # noqa: B006
) -> "DataFrame":
    """Return a row for every figure, of every set and of all sets of a kind pooled.

    base: the draft that others are compared with. most_tokens: by tree, the tokens of a call at
    most, where an interval ends. Columns: those of `eval.schema.Row`. A missing value is NaN.
    """
    import pandas

    draw = Draw(base, resamples, seed, most_tokens)
    table = NumberedCounts.of(counts)
    kinds = counts[["set", "kind"]].drop_duplicates()
    kind_of = dict(zip(kinds["set"], kinds["kind"], strict=True))
    # Pools come first: transfers need that of the sets in distribution.
    pools = [(None, kind) for kind in sorted(set(kinds["kind"]))]
    domains: list[tuple[str | None, str]] = [*pools, *kind_of.items()]
    rows: list[dict[str, Any]] = []
    home: Sums | None = None
    for set_name, kind in domains:
        pooled = [each for each, of in kind_of.items() if of == kind]
        sums = table.sums([set_name] if set_name else pooled, set_name, kind, draw, home)
        if (set_name, kind) == (None, "id"):
            home = sums
        for name, figure in figures.items():
            for key in figure.keys(sums):
                rows.append(_row(name, sums, key, figure.of(sums, key), sums.picks[figure.below]))
    frame = pandas.DataFrame(rows, columns=list(Row.__annotations__))
    return frame.astype(dict.fromkeys(_NUMBERS, float))


def rows_as_json(rows: "DataFrame") -> list[dict[str, Any]]:
    """Return the rows of `estimate` as JSON: whole numbers as such, None for what is missing."""
    whole = dict.fromkeys(("depth", "n", "seeds"), "Int64")
    objects = rows.astype(whole).astype(object)
    records: list[dict[str, Any]] = objects.where(objects.notna(), None).to_dict("records")
    return records


def _row(name: str, sums: Sums, key: Key, sampled: Sampled, picks: Resamples) -> dict[str, Any]:
    seeds = sampled.of_seeds if len(sampled.of_seeds) > 1 else ()
    where = {"figure": name, "set": sums.set, "kind": sums.kind, **key._asdict()}
    ends = {"seed_low": min(seeds, default=None), "seed_high": max(seeds, default=None)}
    count = (sampled.seeds or len(seeds)) if seeds else None
    return {**where, **sampled.estimate(picks), **ends, "seeds": count}
