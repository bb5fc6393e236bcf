"""Siblings drawn independently, with replacement: SpecInfer's multi-step speculative sampling (Miao et al. 2023,
arXiv 2305.09781), where siblings may come from several drafts, and the same rule for one draft (Yang et al. 2024,
arXiv 2401.06706).
"""

from torch import Tensor

from decode.propose.protocol import Proposal
from decode.verify.mcsd import try_in_turn
from decode.verify.tree_walk import Verdict, walk


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Try the children of each node in drawing order: child x drawn from q is accepted with probability
    min(1, p(x)/q(x)), and at a refusal p becomes norm((p - q)+). q stays as it is, and a repeated token is refused
    again.
    """
    return walk(proposal, p_BMV, u_BU, lambda node: try_in_turn(node, replacement=True), per_node=None)
