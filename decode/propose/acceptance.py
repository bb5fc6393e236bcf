"""What was accepted so far in a text, and what that lets one expect of a tree.

A place that the target has decided tells about every tree: whether the draft's first token stayed,
or would one of the next few. Older places count less. What was not seen is taken from the depth
above, and the first depth from what is known of the draft.
"""

from collections.abc import Sequence
from math import prod

DEPTH = 16
# Places that a prior counts for, and the share that a place keeps when the next one is seen.
PRIOR = 4.0
KEPT = 0.98
# The chance that one of the first 2, 3, 4 children stays where the first does not, before any was
# seen.
SIBLINGS = (0.3, 0.4, 0.5)


class Rates:
    """Acceptance by depth, given that all above was accepted. prior: of the first depths."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = prior
        self.hits = [0.0] * DEPTH
        self.seen = [0.0] * DEPTH

    def read(self, depth: int, chance: float) -> None:
        """Count a place: the chance that the token was accepted, or whether it was."""
        if depth < DEPTH:
            self.hits[depth] = self.hits[depth] * KEPT + chance
            self.seen[depth] = self.seen[depth] * KEPT + 1.0

    def fade(self) -> None:
        """Believe half of what was seen."""
        self.hits = [hits / 2 for hits in self.hits]
        self.seen = [seen / 2 for seen in self.seen]

    def by_depth(self) -> list[float]:
        rates: list[float] = []
        for depth, (hits, seen) in enumerate(zip(self.hits, self.seen, strict=True)):
            expected = self.prior[depth] if depth < len(self.prior) else rates[-1]
            rates.append((hits + PRIOR * expected) / (seen + PRIOR))
        return rates


class Acceptance(Rates):
    """Of a draft, with its second to fourth child."""

    def __init__(self, prior: Sequence[float]) -> None:
        super().__init__(prior)
        self.saved = [PRIOR * chance for chance in SIBLINGS]
        self.refused = PRIOR

    def read_siblings(self, weight: float, chances: Sequence[float]) -> None:
        """Count a place where the first child was refused, as `weight` of one: the chances that
        one of the first 2, 3, 4 stays.
        """
        self.refused = self.refused * KEPT + weight
        pairs = zip(self.saved, chances, strict=True)
        self.saved = [saved * KEPT + weight * chance for saved, chance in pairs]

    def tokens(self, widths: Sequence[int], rates: Sequence[float]) -> float:
        """Expected tokens of a step on a tree with so many children on each level. rates:
        `by_depth()`.
        """
        return 1.0 + sum(
            prod(map(self._any, rates[:depth], widths[:depth]))
            for depth in range(1, len(widths) + 1)
        )

    def _any(self, rate: float, width: int) -> float:
        if width == 1:
            return rate
        return rate + (1 - rate) * self.saved[min(width, 4) - 2] / self.refused
