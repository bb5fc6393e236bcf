"""What a verification rule is, where it is valid, and what it returns.

Legend: B rows, D depth, M nodes with the root, V vocabulary, U uniforms a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.propose.protocol import Drawing, Proposal
from decode.tree import Tree, TreeBatch
from draftsmith.sampling import draw


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one step, by row.

    `nodes_BD` is the accepted path in M indexing and `tokens_BD1` its tokens, followed at index
    `accepted_B` by the token that the target adds; what comes after is meaningless. `open_B` is
    true where the walk ended at a node that had children on offer (a rejection), false where it
    ended at a leaf.
    """

    tokens_BD1: Tensor
    nodes_BD: Tensor
    accepted_B: Tensor
    open_B: Tensor


@dataclass(frozen=True)
class Verifier:
    """A verification rule and its domain.

    `run(proposal, p_BMV, u_BU)` takes fp32 target laws at every node and float64 uniforms
    (`uniforms(tree)` a row); None says that p is one-hot (temperature 0).
    """

    name: str
    lossless: bool
    chains_only: bool
    drawings: frozenset[Drawing]
    uniforms: Callable[[TreeBatch], int]
    run: Callable[[Proposal, Tensor, Tensor | None], Verdict]

    def check(self, tree: Tree, drawing: Drawing) -> None:
        """Raise ValueError, in one line with the fix, when the rule is not valid for this tree or
        this drawing.
        """
        if self.chains_only and not tree.is_chain:
            raise ValueError(
                f"verifier '{self.name}' is valid on chains only, and this tree branches; "
                f"use verifier mcsd or exact, or a tree such as chain:{tree.depth}"
            )
        if drawing not in self.drawings:
            raise ValueError(
                f"verifier '{self.name}' is not valid for drafts drawn '{drawing}' "
                f"(only {', '.join(sorted(self.drawings))}); use verifier exact"
            )


def finish(proposal: Proposal, nodes: list[Tensor], accepted_B: Tensor, open_B: Tensor, final_B: Tensor) -> Verdict:
    """Assemble a verdict from the nodes accepted at each depth (0 once the walk has ended)."""
    rows = final_B.shape[0]
    nodes_BD = torch.stack(nodes, dim=1) if nodes else final_B.new_zeros(rows, 0)
    tokens_BD1 = torch.cat([proposal.tokens_BM.gather(1, nodes_BD), final_B.unsqueeze(1)], dim=1)
    if nodes:
        tokens_BD1 = tokens_BD1.scatter(1, accepted_B.unsqueeze(1), final_B.unsqueeze(1))
    return Verdict(tokens_BD1, nodes_BD, accepted_B, open_B)


def match(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """Draw y from the target's law at each node reached; descend while a child carries y; emit the
    first y that none does.

    The output is drawn from the target alone, so this is lossless whatever was drafted. It is also
    what every lossless rule comes to when p is one-hot, and `u_BU` is then None.
    """
    tree, tokens_BM = proposal.tree, proposal.tokens_BM
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    children_BMK = tree.children_RMK.expand(len(rows_B), -1, -1)
    # max is several times faster than argmax on a CPU, and a one-hot law has no ties.
    best_BM = p_BMV.max(-1).indices if u_BU is None else None
    at_B = torch.zeros_like(rows_B)
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    open_B = torch.zeros_like(walking_B)
    accepted_B = torch.zeros_like(at_B)
    final_B = at_B
    nodes = []
    for depth in range(tree.depth + 1):
        if best_BM is not None:
            y_B = best_BM[rows_B, at_B]
        else:
            assert u_BU is not None
            y_B = draw(p_BMV[rows_B, at_B], u_BU[:, depth])
        final_B = torch.where(walking_B, y_B, final_B)
        if depth == tree.depth:
            break
        kids_BK = children_BMK[rows_B, at_B]
        offer_BK = tokens_BM.gather(1, kids_BK)
        # At most one sibling carries y when siblings differ; with repeated tokens the first in rank
        # order stands.
        hit_BK = offer_BK == y_B.unsqueeze(1)
        next_B = kids_BK.gather(1, hit_BK.int().argmax(1, keepdim=True)).squeeze(1)
        next_B = torch.where(hit_BK.any(1) & walking_B, next_B, 0)
        open_B = open_B | (walking_B & (next_B == 0) & (offer_BK >= 0).any(1))
        walking_B = next_B > 0
        accepted_B = accepted_B + walking_B
        at_B = torch.where(walking_B, next_B, at_B)
        nodes.append(next_B)
    return finish(proposal, nodes, accepted_B, open_B, final_B)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm((p - q)+), the law left to draw from after a token of q was refused; rows of `[B, V]`.

    A refusal means q(x) > p(x) for some x, so the residual has mass in exact arithmetic. In
    floating point p and q may be equal but for the rounding of their sums, and then nothing is
    left: such a refusal has a probability of the order of the rounding error, and p itself is the
    answer. It has mass, and none on tokens that the target excludes.
    """
    left_BV = (p_BV - q_BV).clamp_(min=0)
    mass_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, p_BV)
