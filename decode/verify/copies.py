"""Copies beside a drafted tree: a chain of their own below the root, whatever tree and rule.

The rule decides about the tree. If all tokens that it emits are the first ones of the copy, the
step goes on along the copy: the next token is drawn from the target's distribution there, for as
long as it is the copied one. The target alone draws these tokens, so the step stays lossless, and
it accepts as many tokens as the better of the two would.

Legend: B rows, R = 1 when rows share a tree, else B, N drafted nodes, M = N + 1 with the root, C
copied tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify.tree_walk import Walk


def beside(tree: TreeBatch, length: int) -> TreeBatch:
    """Return depths and sight of a tree's nodes, and behind them of a chain of `length` nodes below
    the root. The other arrays leave it out.
    """
    if not length:
        return tree
    nodes = tree.sees_RMM.shape[1]
    wider = tree.padded(tree.rows, nodes + length - 1, tree.children_RMK.shape[2])
    chain_C = torch.arange(length, device=tree.parents_RN.device)
    depths_RN = wider.depths_RN.clone()
    depths_RN[:, nodes - 1 :] = chain_C + 1
    sees_RMM = wider.sees_RMM.clone()
    sees_RMM[:, nodes:, 0] = True
    sees_RMM[:, nodes:, nodes:] = chain_C.unsqueeze(1) >= chain_C
    return replace(wider, depths_RN=depths_RN, sees_RMM=sees_RMM)


def along_copies(
    proposal: Proposal, walks: Sequence[Walk], own_BC: Sequence[Sequence[int]]
) -> list[Walk]:
    """Return the outcome of a step whose rows go on along their copies where they can.

    walks: what the rule decided. own: the target's own tokens at the copied nodes, drawn or most
    probable.
    """
    if proposal.copies_BC is None:
        return list(walks)
    pairs = zip(proposal.copies_BC.tolist(), walks, own_BC, strict=True)
    return [_along(copy, walk, own_C, proposal.nodes) for copy, walk, own_C in pairs]


def _along(copy: list[int], walk: Walk, own_C: Sequence[int], first: int) -> Walk:
    copy = [token for token in copy if token >= 0]
    path = walk.path
    emitted = walk.emitted
    is_open = walk.is_open
    goes_on = emitted == copy[: len(emitted)]
    if goes_on:
        count = len(emitted)
        while count < len(copy) and copy[count] == own_C[count - 1]:
            count += 1
        path = list(range(first, first + count))
        emitted = copy[:count] + [own_C[count - 1]]
        is_open = False
    count = len(path)
    is_open = is_open or (count < len(copy) and emitted[:count] == copy[:count])
    offered = max(walk.offered, len(copy))
    return Walk(path, emitted, is_open, walk.drafted + len(copy), offered, goes_on)
