"""Tokens per target call that a server emitted, beside the prediction.

Legend: P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from draftsmith.core.io import JsonObject
from draftsmith.eval.bootstrap import PromptSums, Resamples, difference, estimate, resamples
from draftsmith.eval.schema import Estimate
from draftsmith.serving.running_server import ServedAnswer

# Ignore smaller differences in accepted tokens per call.
ACCEPTED_MARGIN = 0.05
RESAMPLES = 2000


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

    def by_length(self, lengths: Sequence[int]) -> list[JsonObject]:
        """Return a row for each doubling of the prompt's length, in tokens."""
        doubled = [1 << (length - 1).bit_length() for length in lengths]
        rows: list[JsonObject] = []
        for up_to in sorted(set(doubled)):
            part = self.of([index for index, length in enumerate(doubled) if length == up_to])
            row = {
                "up_to": up_to,
                "prompts": len(part.groups),
                "served": estimate(part.served, part.picks),
                "predicted": estimate(part.predicted, part.picks),
            }
            rows.append(row)
        return rows


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


def counted(answers: Sequence[ServedAnswer]) -> PromptSums:
    """Return the emitted tokens over the target calls; the first token comes without a call."""
    emitted = [len(answer.output_ids) - 1 for answer in answers]
    return PromptSums.of(emitted, [answer.calls for answer in answers])
