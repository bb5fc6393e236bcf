"""The options of sampling, without torch, so that a command can check its options before it loads anything heavy."""

import math
from dataclasses import dataclass

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution to draw tokens from: temperature, then top-k, top-p and min-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature} is not a finite number >= 0")
        if 0 < self.temperature < MIN_TEMPERATURE:
            # Logits divided by less can leave the range of fp32 and give NaN.
            raise ValueError(f"temperature: {self.temperature} is below {MIN_TEMPERATURE}; use 0 for greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative; use 0 to keep the whole vocabulary")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]; use 1 to keep everything")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: {self.min_p} is not in [0, 1]; use 0 to keep everything")

    @property
    def greedy(self) -> bool:
        """True when the distribution is a point mass on the most probable token."""
        return self.temperature == 0
