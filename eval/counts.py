"""The table of counts: what measuring appends, results.json keeps and figures are made of.

A row is one count of one prompt: a number that adds over prompts, seeds and sets (law 3). Counts of
a part of the answers, such as the tokens of a span, have the same keys as those of the whole.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from draftsmith.decode.method import Method

if TYPE_CHECKING:
    from pandas import DataFrame

Floats = npt.NDArray[np.float64]
TARGET = "target"
"""The target alone, in the column `draft`."""


class Where(NamedTuple):
    """What counts are of. None: tree and rule without decoding, depth and part of the whole."""

    draft: str
    seed: int
    set: str
    kind: str
    temperature: float
    tree: str | None = None
    rule: str | None = None
    depth: int | None = None
    part: str | None = None


KEYS = (*Where._fields, "key")
COLUMNS = (*Where._fields, "prompt", "group", "key", "value")


class Count(NamedTuple):
    """One count of every prompt of a set, as a cell of an evaluation keeps it."""

    key: str
    values_P: Sequence[float]
    tree: str | None = None
    rule: str | None = None
    depth: int | None = None
    part: str | None = None


def decoded(
    method: Method | None, key: str, values_P: Sequence[float], depth: int | None = None
) -> Count:
    """Return a count of decoding by a method; None: of the target alone."""
    if method is None:
        return Count(key, values_P)
    return Count(key, values_P, method.tree, method.verifier, depth)


def of_method(counts: Iterable[Count], method: Method | None = None) -> dict[str, Sequence[float]]:
    """Return the counts of whole answers by a method, or (None) without decoding, by their key."""
    how = (method.tree, method.verifier) if method else (None, None)
    found = {}
    for count in counts:
        if (count.tree, count.rule) == how and count.depth is None and count.part is None:
            found[count.key] = count.values_P
    return found


class CellCounts(TypedDict):
    """A cell of an evaluation, as a file keeps it."""

    counts: list[Count]


def at_depths(method: Method, key: str, rows_PD: Sequence[Sequence[float]]) -> list[Count]:
    """Return a count for each depth, of what prompts have by depth; 0 where they have no such
    depth.
    """
    counts = []
    for depth in range(max(map(len, rows_PD), default=0)):
        values_P = [row_D[depth] if depth < len(row_D) else 0 for row_D in rows_PD]
        counts.append(decoded(method, key, values_P, depth + 1))
    return counts


class _Column(NamedTuple):
    where: Where
    key: str
    prompts_P: npt.NDArray[np.int32]
    groups_P: npt.NDArray[np.int32]
    values_P: Floats


@dataclass(frozen=True)
class Tally:
    """Counts as they are measured. `table()` has a row for each."""

    counts: list[_Column] = field(default_factory=list)

    def append(
        self,
        where: Where,
        key: str,
        groups_P: Sequence[int],
        values_P: npt.ArrayLike,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Add one count of some prompts of a set, by default the first. groups: of every prompt."""
        values = np.asarray(values_P, np.float64)
        numbers = np.asarray(prompts or range(len(values)), np.int32)
        groups = np.asarray(groups_P, np.int32)[numbers]
        self.counts.append(_Column(where, key, numbers, groups, values))

    def extend(
        self,
        where: Where,
        groups_P: Sequence[int],
        counts: Iterable[Sequence[Any]],
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Add the counts of a cell, as it was read. where: what is common to them."""
        for count in map(Count._make, counts):
            here = where._replace(
                tree=count.tree, rule=count.rule, depth=count.depth, part=count.part
            )
            self.append(here, count.key, groups_P, count.values_P, prompts)

    def table(self) -> "DataFrame":
        """Return the counts as a DataFrame with `COLUMNS`; those that name things are
        categorical.
        """
        import pandas

        named = [(*count.where, count.key) for count in self.counts]
        counts = pandas.DataFrame(named, columns=list(KEYS)).astype("category")
        lengths = [len(count.values_P) for count in self.counts]
        table = counts.loc[counts.index.repeat(lengths)].reset_index(drop=True)
        table["prompt"] = np.concatenate([count.prompts_P for count in self.counts])
        table["group"] = np.concatenate([count.groups_P for count in self.counts])
        table["value"] = np.concatenate([count.values_P for count in self.counts])
        return table[list(COLUMNS)]


def packed(table: "DataFrame") -> str:
    """Return a table of counts as text: a Parquet file in base 64."""
    return b64encode(table.to_parquet(index=False, compression="zstd")).decode()


def unpacked(text: str) -> "DataFrame":
    """Return the table of counts that `packed` wrote."""
    import pandas

    table = pandas.read_parquet(BytesIO(b64decode(text)))
    # Parquet keeps no categories that are numbers.
    return table.astype(dict.fromkeys(KEYS, "category"))
