"""Proposals of fixed shapes."""

from dataclasses import replace

from torch.nn.functional import pad

from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.recorded.steps import bucket


def in_bucket(proposal: Proposal, rows: int) -> Proposal:
    """Return a proposal with one tree per row, padded to a bucket of nodes; the new ones are
    missing.
    """
    tree = proposal.tree
    q_BEV = proposal.q_BEV
    finite = proposal.finite
    size = tree.parents_RN.shape[1]
    nodes = bucket(size)
    if q_BEV is not None:
        # A tree that confidence has cut short keeps the group numbers, and so the distributions, of
        # the whole tree.
        slots = (nodes + 1) * proposal.drafts
        missing = max(0, slots - q_BEV.shape[1])
        q_BEV = pad(q_BEV, (0, 0, 0, missing))
    return replace(
        proposal,
        tree=tree.padded(rows, nodes, most=tree.children_RMK.shape[2]),
        tokens_BM=pad(proposal.tokens_BM, (0, nodes - size), value=-1),
        q_BEV=q_BEV,
        finite=None if finite is None else finite.expand(rows),
    )
