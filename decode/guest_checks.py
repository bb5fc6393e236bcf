"""Checks of the shapes that a part of one's own gives: a proposer its proposals, a verifier its
verdicts. Other shapes would crash, or pass for other tokens.

Legend: B rows, N drafted nodes, M = N + 1 with the root, V vocabulary.
"""

import torch

from draftsmith.core.errors import InputError
from draftsmith.decode.expected import expect
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.tree import TreeShape
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify.tree_walk import Verdict


def check_proposal(
    where: str,
    proposal: Proposal,
    asked: TreeShape,
    rows: int,
    vocabulary: int,
    device: torch.device,
) -> None:
    """Raise InputError, beginning with `where`, for tensors that do not fit each other, the batch,
    or the tree that was asked for.
    """
    if not isinstance(proposal, Proposal) or not isinstance(proposal.tree, TreeBatch):
        kind = type(getattr(proposal, "tree", proposal)).__name__
        raise InputError(f"{where}: expected a Proposal with a TreeBatch, got {kind}")
    tree = proposal.tree
    nodes = tree.parents_RN.shape[1]
    expect(f"{where}: tree", tree.parents_RN, (min(tree.rows, rows), nodes), torch.long, device)
    if nodes > asked.size or tree.depth > asked.depth:
        raise InputError(
            f"{where}: tree: expected at most {asked.size} nodes and depth {asked.depth}, "
            f"got {nodes} and {tree.depth}"
        )
    expect(f"{where}: tokens_BM", proposal.tokens_BM, (rows, nodes + 1), torch.long, device)
    q_BEV = proposal.q_BEV
    if q_BEV is not None:
        drawn = (rows, q_BEV.shape[1:2].numel(), vocabulary)
        expect(f"{where}: q_BEV", q_BEV, drawn, torch.float32, device)


def check_verdict(name: str, verdict: Verdict, proposal: Proposal) -> None:
    """Raise InputError for a verdict whose tensors are of other shapes or types."""
    if not isinstance(verdict, Verdict):
        raise InputError(f"verifier {name}: expected a Verdict, got {type(verdict).__name__}")
    rows = len(proposal.tokens_BM)
    depth = proposal.tree.depth
    shapes = {"tokens_BD1": (rows, depth + 1), "nodes_BD": (rows, depth), "accepted_B": (rows,)}
    device = proposal.tokens_BM.device
    for key, shape in shapes.items():
        expect(f"verifier {name}: {key}", getattr(verdict, key), shape, torch.long, device)
    expect(f"verifier {name}: open_B", verdict.open_B, (rows,), torch.bool, device)
