"""Counts of a decoding run: integers that add; ratios are taken last (law 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul
from typing import Any


@dataclass(frozen=True)
class DecodeStats:
    """Counts of one row, or of many rows added. Tokens cut by EOS or `max_new_tokens` are not
    counted.

    target_calls: forwards of the target after prefill. emitted: tokens in the output. proposed:
    tree nodes drafted. accepted: drafted tokens in the output. depth_sum: sum over steps of the
    tree depth offered. accepted_by_depth[d-1]: steps in which depth d was accepted.
    reached_by_depth[d-1]: steps in which depth d-1 was accepted (the root always is) and depth d
    offered a token that could still be emitted. copied_calls, copied_accepted: target_calls and
    accepted of the steps that went on along a copy beside a draft. chosen: steps by what
    `--tree auto` drafted.
    """

    target_calls: int = 0
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    depth_sum: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    reached_by_depth: tuple[int, ...] = ()
    copied_calls: int = 0
    copied_accepted: int = 0
    chosen: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        theirs = vars(other)
        return DecodeStats(**{key: _add(ours, theirs[key]) for key, ours in vars(self).items()})

    @property
    def tau(self) -> float | None:
        """Block efficiency: emitted tokens per target call; None before the first call."""
        return _ratio(self.emitted, self.target_calls)

    @property
    def accept_at(self) -> tuple[float | None, ...]:
        """P(depth d accepted | depth d-1 accepted), by depth; None if nothing was offered."""
        return tuple(map(_ratio, self.accepted_by_depth, self.reached_by_depth))

    @property
    def alpha_mcsd(self) -> float | None:
        """accepted / (steps x depth), as MCSD's `evaluation.py` defines alpha; None if nothing was
        offered.
        """
        return _ratio(self.accepted, self.depth_sum)


def independent_tau(alphas: Sequence[float]) -> float:
    """Return 1 + a_1 + a_1 a_2 + ...: tokens per target call of a chain whose depth d is accepted
    with chance a_d, independently (Leviathan et al. 2023, equation 1). In truth hard positions come
    in runs; `eval` compares.
    """
    return 1.0 + float(sum(accumulate(alphas, mul)))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, int):
        return a + b
    if isinstance(a, dict):
        return {key: a.get(key, 0) + b.get(key, 0) for key in a | b}
    return tuple(map(sum, zip_longest(a, b, fillvalue=0)))


def _ratio(count: int, total: int) -> float | None:
    return count / total if total else None
