"""What verification rules return, and the walk down a tree that most of them share.

Legend: B rows, D depth, K siblings, M nodes with the root, V vocabulary, U uniforms a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.tree_batch import TreeBatch
from draftsmith_core.sampling import draw

# Some rows of a batch, or all.
Rows = slice | Tensor
ALL = slice(None)


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


@dataclass(frozen=True, eq=False)
class Node:
    """What the rows of a batch face at the nodes they stand on, for a rule that decides one node at a time.

    `offer_BK` are the children's tokens in rank order, -1 where there is none (everywhere in a row that has ended).
    `law(k)` is the `[B, V]` law that child k was drawn from. `u_Bn` are uniforms for this node.
    """

    p_BV: Tensor
    offer_BK: Tensor
    u_Bn: Tensor
    law: Callable[[int], Tensor]


# The rank of the child that a rule accepts (-1 for none), and what is left to draw the token from if it is none.
NodeRule = Callable[[Node], tuple[Tensor, Tensor]]


def walk(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor, rule: NodeRule, per_node: int | None) -> Verdict:
    """Decide node by node from the root down: descend to the accepted child; where none is, draw from what the rule
    leaves, and at a leaf from the target's law there.

    Each depth takes `per_node` uniforms (None: one a sibling), and the last token one.
    """
    tree = proposal.tree
    u_BU = u_BU.to(p_BMV.device)
    rows_B = torch.arange(p_BMV.shape[0], device=p_BMV.device)
    children_BMK = tree.children_RMK.expand(len(rows_B), -1, -1)
    slots_BM = tree.slots_RM.expand(len(rows_B), -1)
    at_B = torch.zeros_like(rows_B)
    walking_B = torch.ones_like(rows_B, dtype=torch.bool)
    open_B = torch.zeros_like(walking_B)
    accepted_B = torch.zeros_like(at_B)
    law_BV = p_BV = p_BMV[:, 0]
    nodes: list[Tensor] = []
    used = 0
    for depth, width in enumerate(tree.widths):
        kids_BK = children_BMK[rows_B, at_B, :width]
        offer_BK = proposal.tokens_BM.gather(1, kids_BK).masked_fill(~walking_B.unsqueeze(1), -1)
        offered_B = (offer_BK >= 0).any(1)
        taking = width if per_node is None else per_node
        if not nowhere(offered_B):

            def law(k: int, at_B: Tensor = at_B) -> Tensor:
                assert proposal.q_BEV is not None
                slot_B = slots_BM[rows_B, at_B] * proposal.drafts + k % proposal.drafts
                return proposal.q_BEV[rows_B, slot_B]

            rank_B, left_BV = rule(Node(p_BV, offer_BK, u_BU[:, used : used + taking], law))
            next_B = kids_BK.gather(1, rank_B.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(rank_B < 0, 0)
            law_BV = left_BV if depth == 0 else torch.where(walking_B.unsqueeze(1), left_BV, law_BV)
            open_B = open_B | (offered_B & (next_B == 0))
            walking_B = next_B > 0
            accepted_B = accepted_B + walking_B
            at_B = torch.where(walking_B, next_B, at_B)
            if not nowhere(walking_B):
                p_BV = p_BMV[rows_B, at_B]
                law_BV = torch.where(walking_B.unsqueeze(1), p_BV, law_BV)
        else:
            # No row has anything left on offer. (Only ever known on a CPU.)
            next_B = torch.zeros_like(at_B)
            walking_B = torch.zeros_like(walking_B)
        used += taking
        nodes.append(next_B)
    return finish(proposal, nodes, accepted_B, open_B, draw(law_BV, u_BU[:, -1]))


def landing(node: Node) -> tuple[Tensor, Tensor]:
    """Accept the child on which a draw from p lands; `law` is not asked. Takes one uniform.

    This is what trying deterministic children one after another comes to, each with q = 1 and p renormalised after a
    refusal; what is left is p without them.
    """
    return land(node.p_BV, node.offer_BK, node.u_Bn[:, 0])


def land(p_BV: Tensor, offer_BK: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """The rank of the sibling on which a draw from p lands (-1: on none), and p without the siblings, unnormalised.

    p need not sum to one. Siblings differ; those of -1 are passed over.
    """
    x_BK = offer_BK.clamp(min=0)
    mass_BK = p_BV.gather(1, x_BK).masked_fill(offer_BK < 0, 0.0)
    left_BV = p_BV.scatter_add(1, x_BK, -mass_BK)
    upto_BK = mass_BK.cumsum(1, dtype=torch.double)
    # Summed from its parts, and kept below: where the siblings hold all the mass, the draw lands on one of them.
    total_B = upto_BK[:, -1] + left_BV.sum(1, dtype=torch.double)
    point_B = torch.minimum(u_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return first(upto_BK > point_B.unsqueeze(1)), left_BV


def first(hit_BK: Tensor) -> Tensor:
    """Rank of the first that is true, -1 where none is; int64 `[B]`."""
    best = hit_BK.int().max(1)
    return best.indices.masked_fill(best.values == 0, -1)


def nowhere(mask: Tensor) -> bool:
    """True when it is known at no cost that `mask` is nowhere true: on a CPU. A device is not asked, for that would
    stall it.
    """
    return mask.device.type == "cpu" and not bool(mask.any())


def among(mask_B: Tensor) -> Rows:
    """The rows to work on: on a CPU those of the mask, on a device all, for which it need not be asked."""
    return mask_B.nonzero()[:, 0] if mask_B.device.type == "cpu" and not bool(mask_B.all()) else ALL


def chain_nodes(tree: TreeBatch, rows: int) -> Tensor:
    """`[B, D]` M indices of a chain's nodes by depth, 0 beyond its end."""
    device = tree.children_RMK.device
    if tree.rows == 1:
        return torch.arange(1, tree.depth + 1, device=device).expand(rows, -1)
    at_B = torch.zeros(rows, dtype=torch.long, device=device)
    below_BM = tree.children_RMK[:, :, 0].expand(rows, -1)
    nodes = []
    for depth in range(tree.depth):
        below_B = below_BM.gather(1, at_B.unsqueeze(1)).squeeze(1)
        # The root is nobody's child, so that 0 is where a chain has ended.
        at_B = below_B if depth == 0 else below_B.masked_fill(at_B == 0, 0)
        nodes.append(at_B)
    return torch.stack(nodes, dim=1)


def finish(proposal: Proposal, nodes: list[Tensor], accepted_B: Tensor, open_B: Tensor, final_B: Tensor) -> Verdict:
    """Assemble a verdict from the nodes accepted at each depth (0 once the walk has ended)."""
    rows = final_B.shape[0]
    nodes_BD = torch.stack(nodes, dim=1) if nodes else final_B.new_zeros(rows, 0)
    tokens_BD1 = torch.cat([proposal.tokens_BM.gather(1, nodes_BD), final_B.unsqueeze(1)], dim=1)
    if nodes:
        tokens_BD1 = tokens_BD1.scatter(1, accepted_B.unsqueeze(1), final_B.unsqueeze(1))
    return Verdict(tokens_BD1, nodes_BD, accepted_B, open_B)


def finish_at(proposal: Proposal, node_B: Tensor, final_B: Tensor) -> Verdict:
    """Assemble a verdict from the last accepted node of each row (0: none but the root)."""
    tree, rows = proposal.tree, len(node_B)
    depths_BM = torch.nn.functional.pad(tree.depths_RN, (1, 0)).expand(rows, -1)
    above_BM = torch.nn.functional.pad(tree.parents_RN + 1, (1, 0)).expand(rows, -1)
    accepted_B = depths_BM.gather(1, node_B.unsqueeze(1)).squeeze(1)
    kids_BK = tree.children_RMK.expand(rows, -1, -1)[torch.arange(rows, device=node_B.device), node_B]
    open_B = (proposal.tokens_BM.gather(1, kids_BK) >= 0).any(1)
    nodes: list[Tensor] = []
    at_B = node_B
    for depth in range(tree.depth, 0, -1):
        here_B = accepted_B >= depth
        nodes.insert(0, torch.where(here_B, at_B, 0))
        at_B = torch.where(here_B, above_BM.gather(1, at_B.unsqueeze(1)).squeeze(1), at_B)
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
