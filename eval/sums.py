"""Sums of counts: over the prompts of a set or of all sets of a kind, over every resample of them,
and over every seed.

Legend: P prompts, K counts, R resamples, S seeds, N names of counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftsmith.eval.bootstrap import Floats, PromptSums, Resamples, resamples_of_sets

if TYPE_CHECKING:
    from pandas import DataFrame

# Tokens per call are at least 1, and at most what the tree brings.
PER_CALL = {"calls": "emitted", "expected_calls": "expected_tokens"}


class Draw(NamedTuple):
    """How figures are made: the base draft, the resamples, and the tokens of a call at most, by
    tree.
    """

    base: str
    resamples: int
    seed: int
    most_tokens: Mapping[str, float]


class Key(NamedTuple):
    """What a figure is of, within one set or pool of sets."""

    draft: str
    temperature: float
    tree: str | None
    rule: str | None
    depth: int | None
    part: str | None


class Sampled(NamedTuple):
    """A figure with its value in every resample (None: it has no interval) and for every seed."""

    value: float | None
    values_R: Floats | None = None
    least: float = -math.inf
    most: float = math.inf
    of_seeds: Sequence[float] = ()
    shares: bool = False


@dataclass(frozen=True, eq=False)
class Sums:
    """The counts of a set, or of all sets of a kind (`set` None), by prompt, resample and seed.

    columns: the number of each count. picks: the resamples, by the name of the count.
    """

    set: str | None
    kind: str
    draw: "Draw"
    columns: Mapping[tuple[Key, str], int]
    counts_PK: Floats
    resampled_RK: Floats
    of_seeds_SK: Floats
    picks: Mapping[str, Resamples]

    def keys(self, *names: str) -> list[Key]:
        """What has all of these counts here."""
        keys = [key for key, name in self.columns if name == names[0]]
        return [key for key in keys if all((key, name) in self.columns for name in names)]

    def has(self, key: Key, name: str) -> bool:
        """Whether there is such a count here."""
        return (key, name) in self.columns

    def prompts(self, key: Key, name: str) -> Floats:
        """A count of every prompt."""
        return self.counts_PK[:, self.columns[key, name]]

    def ratio(self, key: Key, above: str, below: str) -> Sampled:
        """The ratio of two counts."""
        one = self.columns[key, above]
        other = self.columns[key, below]
        above_P = self.counts_PK[:, one]
        below_P = self.counts_PK[:, other]
        shares = bool((above_P <= below_P).all())
        least, most = 0.0, 1.0 if shares else math.inf
        if PER_CALL.get(below) == above:
            least, most = 1.0, self.draw.most_tokens.get(key.tree or "", math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            values_R = self.resampled_RK[:, one] / self.resampled_RK[:, other]
        seeds = [sums_K[one] / sums_K[other] for sums_K in self.of_seeds_SK if sums_K[other]]
        return Sampled(
            value=PromptSums(above_P, below_P).pooled,
            values_R=values_R,
            least=least,
            most=most,
            of_seeds=list(map(float, seeds)),
            shares=shares,
        )


@dataclass(frozen=True, eq=False)
class _Set:
    """The counts of one set: by prompt, by seed, and which prompts have a count of each name."""

    kind: str
    counts_PK: Floats
    of_seeds_SK: Floats
    present_K: npt.NDArray[np.bool_]
    has_NP: npt.NDArray[np.bool_]
    groups_P: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CountsBySet:
    """The sets of a table of counts, and what each of the K counts is of."""

    keys: list[tuple[Key, str]]
    names: list[str]
    sets: dict[str, _Set]

    @classmethod
    def of(cls, counts: "DataFrame") -> "CountsBySet":
        import pandas

        code = np.zeros(len(counts), np.int64)
        for name in (*Key._fields, "key"):
            column = counts[name].cat
            code = code * (1 + len(column.categories)) + column.codes.to_numpy() + 1
        number, codes = pandas.factorize(code)
        keys = [_key_of(counts, int(each)) for each in codes]
        names = counts["key"].cat
        seeds = counts["seed"].cat
        of_set = counts["set"].cat
        sets = {}
        for index, name in enumerate(of_set.categories):
            inside = (of_set.codes == index).to_numpy()
            part = counts[inside]
            if part.empty:
                continue
            prompts = part["prompt"].to_numpy()
            values = part["value"].to_numpy()
            size = int(prompts.max()) + 1
            number_here = number[inside]
            cells = prompts * np.int64(len(keys)) + number_here
            counts_PK: Floats = np.bincount(cells, values, size * len(keys)).astype(np.float64)
            cells = seeds.codes.to_numpy(np.int64)[inside] * len(keys) + number_here
            of_seeds_SK: Floats = np.bincount(
                cells, values, len(seeds.categories) * len(keys)
            ).astype(np.float64)
            has_NP = np.zeros((len(names.categories), size), bool)
            has_NP[names.codes.to_numpy()[inside], prompts] = True
            groups_P = np.zeros(size, np.int32)
            groups_P[prompts] = part["group"]
            present_K = np.zeros(len(keys), bool)
            present_K[number_here] = True
            sets[name] = _Set(
                kind=part["kind"].iloc[0],
                counts_PK=counts_PK.reshape(-1, len(keys)),
                of_seeds_SK=of_seeds_SK.reshape(-1, len(keys)),
                present_K=present_K,
                has_NP=has_NP,
                groups_P=groups_P,
            )
        return cls(keys, list(names.categories), sets)

    def sums(self, name: str | None, kind: str, draw: "Draw") -> Sums:
        """The sums of a set, or of all sets of a kind."""
        chosen = [
            each for each, of in self.sets.items() if name == each or not name and of.kind == kind
        ]
        parts = [self.sets[each] for each in chosen]
        here_K = np.flatnonzero(np.any([part.present_K for part in parts], axis=0))
        keys = [self.keys[number] for number in here_K]
        counts_PK = np.concatenate([part.counts_PK[:, here_K] for part in parts])
        resampled_RK = np.zeros((draw.resamples, len(keys)))
        picks: dict[str, Resamples] = {}
        has_NP = np.concatenate([part.has_NP for part in parts], axis=1)
        for has_P in np.unique(has_NP, axis=0):
            # Counts of the same prompts, such as those that were timed, are resampled together.
            named = [self.names[number] for number in np.flatnonzero((has_NP == has_P).all(1))]
            ends = np.cumsum([len(part.groups_P) for part in parts])[:-1]
            inside = np.split(has_P, ends)
            groups = {}
            for each, part, has in zip(chosen, parts, inside, strict=True):
                if has.any():
                    groups[each] = part.groups_P[has].tolist()
            if not groups:
                continue
            drawn = resamples_of_sets(groups, draw.resamples, draw.seed)
            picks |= dict.fromkeys(named, drawn)
            columns = [index for index, (_, key) in enumerate(keys) if key in named]
            resampled_RK[:, columns] = drawn.weights_RP @ counts_PK[np.ix_(has_P, columns)]
        return Sums(
            set=name,
            kind=kind,
            draw=draw,
            columns={key: index for index, key in enumerate(keys)},
            counts_PK=counts_PK,
            resampled_RK=resampled_RK,
            of_seeds_SK=np.sum([part.of_seeds_SK[:, here_K] for part in parts], axis=0),
            picks=picks,
        )


def _key_of(counts: "DataFrame", code: int) -> tuple[Key, str]:
    values: list[Any] = []
    for name in reversed((*Key._fields, "key")):
        categories = counts[name].cat.categories
        code, index = divmod(code, 1 + len(categories))
        values.append(categories[index - 1] if index else None)
    name, *rest = values
    return Key(*reversed(rest)), name
