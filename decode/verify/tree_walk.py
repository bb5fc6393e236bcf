"""What verification rules return, and the walk down a tree that most of them share.

Legend: B rows, D depth, K siblings, M nodes with the root, V vocabulary, U uniforms per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from draftsmith_core.sampling import draw

# Which rows of a batch to work on: an index, or a slice for all of them.
Rows = slice | Tensor
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one step, by row.

    nodes_BD: the accepted path (M indices). tokens_BD1: the path's tokens, then the target's token
    at index `accepted_B`, then padding. open_B: whether the walk ended at a node with children on
    offer (a rejection).
    """

    tokens_BD1: Tensor
    nodes_BD: Tensor
    accepted_B: Tensor
    open_B: Tensor


@dataclass(frozen=True)
class Walk:
    """The outcome of one row on the host.

    path: accepted nodes. emitted: their tokens and the target's own. is_open: as in `Verdict`.
    drafted: number of drafted nodes. offered: depth of the deepest drafted node.
    """

    path: list[int]
    emitted: list[int]
    is_open: bool
    drafted: int
    offered: int


@dataclass(frozen=True, eq=False)
class Node:
    """The node that each row has reached, for a rule that decides one node at a time.

    p_BV: the target's distribution there. offer_BK: the children's tokens by rank, -1 for none. q:
    by rank, the distribution `[B, V]` that the child was drawn from. u_Bn: uniforms for this node.
    """

    p_BV: Tensor
    offer_BK: Tensor
    u_Bn: Tensor
    q: Callable[[int], Tensor]


# Returns the rank of the accepted child `[B]`, -1 for none, and the distribution `[B, V]`, not
# necessarily normalised, to draw the token from if no child is accepted.
NodeRule = Callable[[Node], tuple[Tensor, Tensor]]


def walk(
    proposal: Proposal, p_BMV: Tensor, u_BU: Tensor, rule: NodeRule, per_node: int | None
) -> Verdict:
    """Walk from the root to each accepted child. On a rejection, draw the last token from what the
    rule leaves of p; at a leaf, from p. Each depth takes `per_node` uniforms (None: one per
    sibling), and the last token takes one.
    """
    tree = proposal.tree
    u_BU = u_BU.to(p_BMV.device)
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    children_BMK = tree.children_RMK.expand(len(rows_B), -1, -1)
    groups_BM = tree.groups_RM.expand(len(rows_B), -1)
    at_B = torch.zeros_like(rows_B)
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    open_B = torch.zeros_like(walking_B)
    accepted_B = torch.zeros_like(at_B)
    last_BV = p_BV = p_BMV[:, 0]
    nodes: list[Tensor] = []
    used = 0
    for depth, width in enumerate(tree.widths):
        kids_BK = children_BMK[rows_B, at_B, :width]
        offer_BK = proposal.tokens_BM.gather(1, kids_BK).masked_fill(~walking_B.unsqueeze(1), -1)
        offered_B = (offer_BK >= 0).any(1)
        taking = width if per_node is None else per_node
        if not known_empty(offered_B):

            def q(k: int, at_B: Tensor = at_B) -> Tensor:
                assert proposal.q_BEV is not None
                return proposal.q_BEV[
                    rows_B, groups_BM[rows_B, at_B] * proposal.drafts + k % proposal.drafts
                ]

            rank_B, left_BV = rule(Node(p_BV, offer_BK, u_BU[:, used : used + taking], q))
            next_B = (
                kids_BK.gather(1, rank_B.clamp(min=0).unsqueeze(1))
                .squeeze(1)
                .masked_fill(rank_B < 0, 0)
            )
            last_BV = (
                left_BV if depth == 0 else torch.where(walking_B.unsqueeze(1), left_BV, last_BV)
            )
            open_B = open_B | (offered_B & (next_B == 0))
            walking_B = next_B > 0
            accepted_B = accepted_B + walking_B
            at_B = torch.where(walking_B, next_B, at_B)
            if not known_empty(walking_B):
                p_BV = p_BMV[rows_B, at_B]
                last_BV = torch.where(walking_B.unsqueeze(1), p_BV, last_BV)
        else:
            next_B = torch.zeros_like(at_B)
            walking_B = torch.zeros_like(walking_B)
        used += taking
        nodes.append(next_B)
    return finish(proposal, nodes, accepted_B, open_B, draw(last_BV, u_BU[:, -1]))


def hit_by_target(node: Node) -> tuple[Tensor, Tensor]:
    """Draw a token from p and accept the child that carries it. Takes one uniform; q is not used.

    Equals trying deterministic children in turn with q = 1, removing each rejected token from p and
    renormalising.
    """
    return draw_rank(node.p_BV, node.offer_BK, node.u_Bn[:, 0])


def draw_rank(p_BV: Tensor, offer_BK: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from p: the rank of the sibling that carries it (-1 for none), and p without the
    siblings' tokens.

    p need not sum to one, and the rest is not normalised. Siblings are distinct; -1 stands for no
    sibling.
    """
    x_BK = offer_BK.clamp(min=0)
    mass_BK = p_BV.gather(1, x_BK).masked_fill(offer_BK < 0, 0.0)
    left_BV = p_BV.scatter_add(1, x_BK, -mass_BK)
    upto_BK = mass_BK.cumsum(1, dtype=torch.double)
    # Sum the total from the same parts and keep the point below it. Otherwise, if siblings hold all
    # mass, rounding could miss them all, and nothing would be left to draw from.
    total_B = upto_BK[:, -1] + left_BV.sum(1, dtype=torch.double)
    point_B = torch.minimum(u_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return first(upto_BK > point_B.unsqueeze(1)), left_BV


def first(hit_BK: Tensor) -> Tensor:
    """Rank of the first true entry, -1 for none; int64 `[B]`."""
    best = hit_BK.int().max(1)
    return best.indices.masked_fill(best.values == 0, -1)


def known_empty(mask: Tensor) -> bool:
    """Whether `mask` is false everywhere; always False on an accelerator, where reading it would
    make the host wait.
    """
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(mask.any())


def recording() -> bool:
    """Whether this code is being compiled or recorded, so that no tensor may be read."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def rows_of(mask_B: Tensor) -> Rows:
    """Indices of the mask's true rows on a CPU; all rows on an accelerator."""
    if mask_B.device.type != "cpu" or torch.compiler.is_compiling() or bool(mask_B.all()):
        return ALL
    return mask_B.nonzero()[:, 0]


def finish(
    proposal: Proposal, nodes: list[Tensor], accepted_B: Tensor, open_B: Tensor, last_B: Tensor
) -> Verdict:
    """Build the verdict from the nodes accepted at each depth (0 once the walk has ended) and the
    target's token.
    """
    rows = last_B.shape[0]
    nodes_BD = torch.stack(nodes, dim=1) if nodes else last_B.new_zeros(rows, 0)
    tokens_BD1 = torch.cat([proposal.tokens_BM.gather(1, nodes_BD), last_B.unsqueeze(1)], dim=1)
    if nodes:
        tokens_BD1 = tokens_BD1.scatter(1, accepted_B.unsqueeze(1), last_B.unsqueeze(1))
    return Verdict(tokens_BD1, nodes_BD, accepted_B, open_B)


def finish_at(proposal: Proposal, node_B: Tensor, last_B: Tensor) -> Verdict:
    """Build the verdict from the last accepted node of each row (0: the root) and the token that
    the target adds.
    """
    tree, rows = proposal.tree, len(node_B)
    depths_BM = torch.nn.functional.pad(tree.depths_RN, (1, 0)).expand(rows, -1)
    above_BM = torch.nn.functional.pad(tree.parents_RN + 1, (1, 0)).expand(rows, -1)
    accepted_B = depths_BM.gather(1, node_B.unsqueeze(1)).squeeze(1)
    kids_BK = tree.children_RMK.expand(rows, -1, -1)[
        torch.arange(rows, device=node_B.device), node_B
    ]
    open_B = (proposal.tokens_BM.gather(1, kids_BK) >= 0).any(1)
    nodes: list[Tensor] = []
    at_B = node_B
    for depth in range(tree.depth, 0, -1):
        here_B = accepted_B >= depth
        nodes.insert(0, torch.where(here_B, at_B, 0))
        at_B = torch.where(here_B, above_BM.gather(1, at_B.unsqueeze(1)).squeeze(1), at_B)
    return finish(proposal, nodes, accepted_B, open_B, last_B)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm((p - q)+), the distribution left to draw from after a token of q was refused; rows of
    `[B, V]`.

    If p and q differ by rounding only, nothing is left, and p is returned.
    """
    left_BV = (p_BV - q_BV).clamp_(min=0)
    mass_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, p_BV)
