"""Sums of counts: over the prompts of a set or of all sets of a kind, over every resample of them,
and over every seed.

Legend: P prompts, K counts, R resamples, S seeds, N names of counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from draftsmith.eval.bootstrap import Floats, Resamples, Sampled, over, resamples_of_sets

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


@dataclass(frozen=True, eq=False)
class Sums:
    """The counts of a set, or of all sets of a kind (`set` None), by prompt, in all and after that
    by resample, and by seed.

    columns: the number of each count. picks: the resamples, by the name of the count. home: the
    sums of all sets in distribution.
    """

    set: str | None
    kind: str
    draw: "Draw"
    columns: Mapping[tuple[Key, str], int]
    counts_PK: Floats
    has_PK: npt.NDArray[np.bool_]
    sums_1RK: Floats
    of_seeds_SK: Floats
    picks: Mapping[str, Resamples]
    home: "Sums | None"

    def keys(self, *names: str) -> list[Key]:
        """What has all of these counts here."""
        first, *others = names
        keys = [key for key, name in self.columns if name == first]
        for name in others:
            keys = [key for key in keys if self.has(key, name)]
        return keys

    def has(self, key: Key, name: str) -> bool:
        """Whether there is such a count here."""
        return (key, name) in self.columns

    def paired(self, one: Key, other: Key, name: str) -> bool:
        """Whether two have a count of the same prompts."""
        has_one_P = self.has_PK[:, self.columns[one, name]]
        has_other_P = self.has_PK[:, self.columns[other, name]]
        return bool((has_one_P == has_other_P).all())

    def prompts(self, key: Key, name: str) -> Floats:
        """A count of every prompt."""
        return self.counts_PK[:, self.columns[key, name]]

    def ratio(self, key: Key, above: str, below: str) -> Sampled:
        """The ratio of two counts."""
        one = self.columns[key, above]
        other = self.columns[key, below]
        above_P = self.counts_PK[:, one]
        below_P = self.counts_PK[:, other]
        counts = not (above.endswith("_s") or below.endswith("_s"))
        shares = counts and bool((above_P <= below_P).all())
        least = 0.0
        most = 1.0 if shares else math.inf
        if PER_CALL.get(below) == above:
            least = 1.0
            most = self.draw.most_tokens.get(key.tree or "", math.inf)
        values = over(self.sums_1RK[:, one], self.sums_1RK[:, other])
        of_seeds = over(self.of_seeds_SK[:, one], self.of_seeds_SK[:, other])
        return Sampled(values, least, most, of_seeds[np.isfinite(of_seeds)].tolist())


@dataclass(frozen=True, eq=False)
class NumberedCounts:
    """A table of counts, and what each of the K counts is of. number: of each row."""

    table: "DataFrame"
    number: npt.NDArray[np.int64]
    keys: list[tuple[Key, str]]

    @classmethod
    def of(cls, table: "DataFrame") -> "NumberedCounts":
        columns = [*Key._fields, "key"]
        number = table.groupby(columns, observed=True, dropna=False, sort=False).ngroup()
        firsts = ~number.duplicated()
        named = table.loc[firsts, columns].astype(object)
        named = named.where(named.notna(), None)
        keys = []
        for *row, key in named.itertuples(index=False):
            keys.append((Key._make(row), key))
        return cls(table, number.to_numpy(), keys)

    def sums(
        self, sets: Sequence[str], name: str | None, kind: str, draw: "Draw", home: Sums | None
    ) -> Sums:
        """The sums of some sets."""
        inside = self.table["set"].isin(sets).to_numpy()
        part = self.table[inside]
        here_K, local = np.unique(self.number[inside], return_inverse=True)
        keys = [self.keys[number] for number in here_K]
        # Prompts are numbered through the sets, in the order of these.
        longest = part["prompt"].max() + 1
        in_order = part["set"].cat.set_categories(sets)
        code = in_order.cat.codes.astype(np.int64) * longest + part["prompt"]
        code_P, first_P, prompts = np.unique(code, return_index=True, return_inverse=True)
        set_P = np.array(sets)[code_P // longest]
        groups_P = part["group"].to_numpy()[first_P]
        names = part["key"].cat
        has_NP = np.zeros((len(names.categories), len(set_P)), bool)
        has_NP[names.codes, prompts] = True
        counts_PK = _summed(part, prompts * len(keys) + local, (len(set_P), len(keys)))
        has_PK = np.zeros(counts_PK.shape, bool)
        has_PK[prompts, local] = True
        seeds = part["seed"].cat
        cells = seeds.codes.to_numpy(np.int64) * len(keys) + local
        sums_1RK = np.zeros((1 + draw.resamples, len(keys)))
        sums_1RK[0] = counts_PK.sum(0)
        picks: dict[str, Resamples] = {}
        for has_P in np.unique(has_NP[has_NP.any(1)], axis=0):
            # Counts of the same prompts, such as those that were timed, are resampled together.
            same_N = (has_NP == has_P).all(1)
            groups = {}
            for each in dict.fromkeys(set_P[has_P].tolist()):
                of_set_P = has_P & (set_P == each)
                groups[each] = groups_P[of_set_P].tolist()
            drawn = resamples_of_sets(groups, draw.resamples, draw.seed)
            picks |= dict.fromkeys(names.categories[same_N], drawn)
            columns = [index for index, (_, key) in enumerate(keys) if picks.get(key) is drawn]
            sums_1RK[1:, columns] = drawn.weights_RP @ counts_PK[np.ix_(has_P, columns)]
        return Sums(
            set=name,
            kind=kind,
            draw=draw,
            columns={key: index for index, key in enumerate(keys)},
            counts_PK=counts_PK,
            has_PK=has_PK,
            sums_1RK=sums_1RK,
            of_seeds_SK=_summed(part, cells, (len(seeds.categories), len(keys))),
            picks=picks,
            home=home,
        )


def _summed(part: "DataFrame", cells: npt.NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    """Add up the values of each cell of a matrix."""
    summed: Floats = np.bincount(cells, part["value"], math.prod(shape)).astype(np.float64)
    return summed.reshape(shape)
