"""What one forward of a trainee adds up: sums over valid tokens, divided by nobody but the loop.

Legend: D depths, the first token after what is known being depth 1.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over the valid tokens of one forward.

    loss: scalar, differentiable: the sum of the weighted losses. tokens: scalar int64, how many valid tokens they are.
    alpha: scalar, the sum over tokens of sum_x min(p, q) at temperature 1 and depth 1. depth_alpha_D and
    depth_tokens_D: the same for every depth, and over how many tokens; a count of 0 means that it was not measured
    (no target), and then the ratio is None. missing: scalar, the sum over tokens of the target's probability of what
    the draft has no word for, or of what stored rows do not tell; None where the teacher's law is whole. All but
    `loss` carry no gradient.
    """

    loss: Tensor
    tokens: Tensor
    alpha: Tensor
    depth_alpha_D: Tensor
    depth_tokens_D: Tensor
    missing: Tensor | None = None
