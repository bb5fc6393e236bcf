"""Student's t with whole degrees of freedom: what an interval of few prompts is wider by. Imports nothing heavy."""

import math
from functools import cache
from statistics import NormalDist

# Beyond so many degrees of freedom it is the normal distribution to 1e-3, and its series are long.
MANY = 2000


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t), by the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    if freedom > MANY:
        return NormalDist().cdf(t)
    angle = math.atan(t / math.sqrt(freedom))
    odd, square = freedom % 2, math.cos(angle) ** 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1, freedom // 2 + 1):
        total += term
        term *= square * (2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    inside = math.sin(angle) * total
    return 0.5 + (angle + inside) / math.pi if odd else 0.5 + inside / 2


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """The t that `student_cdf` takes to this probability, at least a half."""
    if freedom > MANY:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return high
