"""The best static tree for a measured acceptance: Sequoia's dynamic programme (arXiv 2402.12374,
section 3.1).

Its one assumption: the chance that a drafted token is accepted, given that its parent was, depends
on its rank among its siblings only. `acceptance[k]` is that chance for rank k; siblings exclude one
another, so the chances of all ranks add up to at most 1; ranks beyond the vector have 0. It belongs
to one pair, temperature, verifier and domain.

Legend: N drafted nodes at most (an axis of N + 1 counts from none), D levels at most (an axis of D
+ 1 likewise), K ranks (an axis of K + 1 ends in "no more children").
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from draftsmith.decode.tree import Tree

Floats = NDArray[np.float64]

LARGEST = 256
DEEPEST = 32


def optimal_tree(acceptance: Sequence[float], nodes: int, depth: int) -> Tree:
    """The tree of at most `nodes` nodes and `depth` levels with the most expected tokens per step:
    1 plus, for every node, the product of the acceptances on its path. A node that adds nothing is
    left out, so a tree may be smaller.
    """
    if not all(0 <= rate <= 1 for rate in acceptance) or sum(acceptance) > 1 + 1e-6:
        raise ValueError(
            "acceptance: expected the ranks' probabilities, at most 1 together, such as [0.6, "
            "0.15, 0.05]"
        )
    if not 1 <= nodes <= LARGEST:
        raise ValueError(f"nodes={nodes} is not in 1..{LARGEST}")
    if not 1 <= depth <= DEEPEST:
        raise ValueError(f"depth={depth} is not in 1..{DEEPEST}")
    rates_K = np.trim_zeros(np.array(acceptance, dtype=np.float64)[:nodes], "b")
    below_DKN = _best(rates_K, nodes, depth)
    parents: list[int] = []
    # The nodes whose children are still to be placed: (node, levels left under it, nodes that it
    # may have under it).
    waiting = [(-1, len(below_DKN) - 1, nodes)]
    for node, levels, budget in waiting:
        for rank, rate in enumerate(rates_K):
            if levels == 0 or budget == 0:
                break
            mine_N = rate * (1 + below_DKN[levels - 1, 0, :budget])
            gain_N = mine_N + below_DKN[levels, rank + 1, budget - 1 :: -1]
            chosen = int(gain_N.argmax())
            if gain_N[chosen] <= 0:
                break
            waiting.append((len(parents), levels - 1, chosen))
            parents.append(node)
            budget -= chosen + 1
    return Tree(tuple(parents))


def _best(rates_K: Floats, nodes: int, depth: int) -> Floats:
    """`below_DKN[d, k, n]`: the most expected tokens from the children of rank k and later of one
    node, which share n nodes and reach d levels down. Ends at the level from which more levels
    change nothing. Entries with n > N - k are 0: no tree needs them, because k nodes are already
    used.
    """
    below_DKN = np.zeros((depth + 1, len(rates_K) + 1, nodes + 1))
    for level in range(1, depth + 1):
        child_N = 1 + below_DKN[level - 1, 0, :nodes]
        for rank in range(len(rates_K) - 1, -1, -1):
            # A (max, +) convolution: what this child keeps for itself, against what it leaves to
            # later siblings.
            most = nodes - rank
            mine_N = rates_K[rank] * child_N[:most]
            impossible_N = np.full(most - 1, -np.inf)
            theirs_N = np.concatenate((impossible_N, below_DKN[level, rank + 1, :most]))
            split_NN = sliding_window_view(theirs_N, most) + mine_N[::-1]
            below_DKN[level, rank, 1 : most + 1] = split_NN.max(1)
        if np.array_equal(below_DKN[level, 0], below_DKN[level - 1, 0]):
            return below_DKN[:level]
    return below_DKN
