"""Proposals of fixed shapes."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from decode.propose.protocol import Proposal
from decode.recorded.steps import bucket
from decode.tree_batch import TreeBatch


def in_bucket(proposal: Proposal, rows: int) -> Proposal:
    """Return a proposal with one tree per row, padded to a bucket of nodes; the new ones are
    missing.
    """
    tree = proposal.tree
    q_BEV = proposal.q_BEV
    finite = proposal.finite
    size = tree.parents_RN.shape[1]
    nodes = bucket(size)
    new = nodes - size
    itself_MM = torch.eye(nodes + 1, dtype=torch.bool, device=tree.sees_RMM.device)
    sees_RMM = pad(tree.sees_RMM, (0, new, 0, new)) | itself_MM
    if q_BEV is not None:
        # A tree that confidence has cut short keeps the group numbers, and so the distributions, of
        # the whole tree.
        slots = (nodes + 1) * proposal.drafts
        missing = max(0, slots - q_BEV.shape[1])
        q_BEV = pad(q_BEV, (0, 0, 0, missing))
    padded = TreeBatch(
        parents_RN=pad(tree.parents_RN, (0, new), value=-1).expand(rows, -1),
        depths_RN=pad(tree.depths_RN, (0, new), value=1).expand(rows, -1),
        children_RMK=pad(tree.children_RMK, (0, 0, 0, new)).expand(rows, -1, -1),
        groups_RM=pad(tree.groups_RM, (0, new)).expand(rows, -1),
        sees_RMM=sees_RMM.expand(rows, -1, -1),
        widths=tree.widths,
    )
    return replace(
        proposal,
        tree=padded,
        tokens_BM=pad(proposal.tokens_BM, (0, new), value=-1),
        q_BEV=q_BEV,
        finite=None if finite is None else finite.expand(rows),
    )
