"""What was accepted so far in a text, and what that lets one expect of a tree.

A place that the target has decided tells about every tree: whether the draft's first token stayed,
or would one of the next few. Older places count less. What was not seen is taken from the depth
above, and the first depth from what is known of the draft.
"""

from collections.abc import Sequence

DEPTH = 16
# Places that a prior counts for, and the share that a place keeps when the next one is seen.
PRIOR = 4.0
KEPT = 0.98
# Below the first depth: places that the rate above counts for, and one that is hoped for. Without
# it a depth that was never drafted would never be.
ABOVE = 2.0
HOPE = 1.0
# The chance that one of the first 2, 3, 4 children stays where the first does not, before any was
# seen.
SIBLINGS = (0.25, 0.35, 0.42)


class Acceptance:
    """Acceptance by depth, given that all above was accepted, and of the second to fourth child of
    a node. prior: of the first depth.
    """

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.hits = [0.0] * DEPTH
        self.seen = [0.0] * DEPTH
        self.saved = [PRIOR * chance for chance in SIBLINGS]
        self.refused = PRIOR

    def read(self, depth: int, chance: float) -> None:
        """Count a place: the chance that the token was accepted, or whether it was."""
        if depth < DEPTH:
            self.hits[depth] = self.hits[depth] * KEPT + chance
            self.seen[depth] = self.seen[depth] * KEPT + 1.0

    def read_siblings(self, weight: float, chances: Sequence[float]) -> None:
        """Count a place where the first child was refused, as `weight` of one: the chances that
        one of the first 2, 3, 4 stays.
        """
        self.refused = self.refused * KEPT + weight
        pairs = zip(self.saved, chances, strict=True)
        self.saved = [saved * KEPT + weight * chance for saved, chance in pairs]

    def fade(self) -> None:
        """Believe half of what was seen."""
        self.hits = [hits / 2 for hits in self.hits]
        self.seen = [seen / 2 for seen in self.seen]

    def by_depth(self) -> list[float]:
        rates = [(self.hits[0] + PRIOR * self.prior) / (self.seen[0] + PRIOR)]
        for hits, seen in zip(self.hits[1:], self.seen[1:], strict=True):
            rates.append((hits + ABOVE * rates[-1] + HOPE) / (seen + ABOVE + HOPE))
        return rates

    def tokens(self, widths: Sequence[int], rates: Sequence[float]) -> float:
        """Expected tokens of a step on a tree with so many children on each level. rates:
        `by_depth()`.
        """
        tokens = reached = 1.0
        for width, rate in zip(widths, rates, strict=False):
            if width > 1:
                rate += (1 - rate) * self.saved[min(width, 4) - 2] / self.refused
            reached *= rate
            tokens += reached
        return tokens
