"""What one forward of a trainee returns: sums over valid tokens. Only the loop divides them, once for all processes.

Legend: D depths; depth 1 is the first drafted token.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossSums:
    """Sums over the valid tokens of one forward. All but `loss` carry no gradient.

    loss: scalar, differentiable: the sum of the weighted losses. tokens: scalar int64, how many valid tokens.
    alpha: scalar, the sum over tokens of sum_x min(p, q) at temperature 1 and depth 1. depth_alpha_D, depth_tokens_D:
    the same sum for every depth, and over how many tokens; a count of 0 means that it was not measured (no target).
    missing: scalar, the sum over tokens of the target's probability of tokens that the draft cannot give, or that
    stored teacher rows do not list; None where the teacher's whole distribution is known.
    """

    loss: Tensor
    tokens: Tensor
    alpha: Tensor
    depth_alpha_D: Tensor
    depth_tokens_D: Tensor
    missing: Tensor | None = None
