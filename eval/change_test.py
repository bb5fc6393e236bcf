"""Has acceptance left the band of the baseline? A sequential test whose false alarms are bounded for ever.

The band is a confidence interval of the mean acceptance of an answer. Against each of its ends one bets on every answer
x in [0, 1]: a capital of 1 becomes 1 + c (low - x) times itself, with a stake c so small that it stays positive. While
the mean of the answers, given those before, is not below `low`, the capital is a supermartingale and ever reaches 1/r
with probability at most r (Ville's inequality; betting: Waudby-Smith and Ramdas 2024, arXiv 2010.09686). A change may
come at any time, so a part w(s) of the capital waits for answer s before it bets (a mixture over starting times, as in
Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532), with w(s) proportional to 1/(s log(s)^2), and it is divided over
several stakes. No distribution is assumed. What is assumed: an answer's mean, given the answers before it, stays in the
band.

False alarms, over streams of any length: half of the rate is for a band that does not hold the true mean, a quarter
for each of its ends. A change is noticed the later the smaller it is, counted from the band's end and not from its
middle: few prompts in the baseline make a wide band.

Legend: S streams tested side by side, C stakes.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith_core.errors import InputError
from eval.student import student_quantile

Floats = NDArray[np.float64]
# Shares of the largest stake at which no answer can take all the capital.
STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.8])
# The sum of 1 / (n log(n)^2) over n from 2 is 2.1097...; a little more keeps the weights' sum below 1.
WEIGHTS_SUM = 2.11
FEWEST = 8


@dataclass(frozen=True)
class Band:
    """Where an answer's mean acceptance lay in the baseline, with the confidence that a false-alarm rate leaves it."""

    low: float
    high: float
    mean: float

    @staticmethod
    def of(means_P: Floats, rate: float) -> "Band":
        """From the mean acceptance of every prompt: Student's t interval of confidence 1 - rate/2, cut to [0, 1].
        InputError for fewer than 8 prompts.
        """
        count = len(means_P)
        if count < FEWEST:
            raise InputError(f"--baseline: {count} prompts are too few for a band; evaluate at least {FEWEST}")
        half = student_quantile(1 - rate / 4, count - 1) * float(means_P.std(ddof=1)) / math.sqrt(count)
        mean = float(means_P.mean())
        return Band(max(0.0, mean - half), min(1.0, mean + half), mean)


class ChangeTest:
    """S streams against one band each. `alarm_S` is -1 where a stream fell below its band, 1 where it rose above, else
    0; `since_S` is the answer, from 1, at which that change is likeliest to have begun.
    """

    def __init__(self, low_S: Floats, high_S: Floats, rate: float) -> None:
        """At most `rate` of streams that stay as in the baseline are ever called changed."""
        self.count, self.need = 0, 4 / rate
        self._ends = (low_S, high_S)
        most = (1 / np.maximum(1 - low_S, 1e-9), 1 / np.maximum(high_S, 1e-9))
        self._stakes = tuple(STAKES[:, None] * np.minimum(each, 1e6) for each in most)
        self._betting = [np.zeros((len(STAKES), len(low_S))) for _ in most]
        self._waiting = 1.0
        self._sums = [np.zeros(len(low_S)) for _ in most]
        self._starts = [np.ones(len(low_S), dtype=np.int64) for _ in most]
        self.alarm_S = np.zeros(len(low_S), dtype=np.int64)
        self.since_S = np.zeros(len(low_S), dtype=np.int64)

    def update(self, x_S: Floats) -> None:
        """One more answer of every stream: its mean acceptance, in [0, 1]."""
        self.count += 1
        n = self.count + 1
        weight = 1 / (n * math.log(n) ** 2 * WEIGHTS_SUM)
        self._waiting -= weight
        for side, sign in ((0, -1), (1, 1)):
            beyond_S = sign * (x_S - self._ends[side])
            self._betting[side] = (self._betting[side] + weight) * (1 + self._stakes[side] * beyond_S)
            self._sums[side] = np.maximum(0.0, self._sums[side] + beyond_S)
            self._starts[side] = np.where(self._sums[side] == 0, self.count + 1, self._starts[side])
            capital_S = self._betting[side].mean(0) + self._waiting
            new_S = (self.alarm_S == 0) & (capital_S >= self.need)
            self.alarm_S = np.where(new_S, sign, self.alarm_S)
            self.since_S = np.where(new_S, self._starts[side], self.since_S)
