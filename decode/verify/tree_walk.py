"""What verification rules return, and the walk down a tree that most of them share.

Legend: B rows, D depth, K siblings, M nodes with the root, V vocabulary, U uniforms per row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.kernel_sampling import draw
from draftsmith.decode.propose.protocol import Proposal


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
    drafted: number of drafted nodes. offered: depth of the deepest drafted node. copied: whether
    the path is that of a copy, beyond what the rule accepted.
    """

    path: list[int]
    emitted: list[int]
    is_open: bool
    drafted: int
    offered: int
    copied: bool = False


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


class Descent:
    """The nodes that each row has accepted, one depth after another."""

    def __init__(self, proposal: Proposal, p_BMV: Tensor) -> None:
        self.proposal = proposal
        self.rows_B = row_numbers(p_BMV)
        rows = len(p_BMV)
        self.children_BMK = proposal.tree.children_RMK.expand(rows, -1, -1)
        self.groups_BM = proposal.tree.groups_RM.expand(rows, -1)
        self.at_B = torch.zeros_like(self.rows_B)
        self.accepted_B = self.at_B
        self.walking_B = torch.ones_like(self.rows_B, dtype=torch.bool)
        self.open_B = torch.zeros_like(self.walking_B)
        self.nodes: list[Tensor] = []

    def offer(self, width: int) -> Tensor:
        """Tokens of the children by rank, `[B, K]`; -1 for none, and in rows that have ended."""
        self.kids_BK = self.children_BMK[self.rows_B, self.at_B, :width]
        tokens_BK = self.proposal.tokens_BM.gather(1, self.kids_BK)
        tokens_BK = tokens_BK.masked_fill(~self.walking_B.unsqueeze(1), -1)
        self.offered_B = (tokens_BK >= 0).any(1)
        return tokens_BK

    def q(self, k: int) -> Tensor:
        """The distribution `[B, V]` that the child of rank k was drawn from."""
        assert self.proposal.q_BEV is not None
        drafts = self.proposal.drafts
        group_B = self.groups_BM[self.rows_B, self.at_B]
        return at_node(self.proposal.q_BEV, group_B * drafts + k % drafts)

    def accept(self, rank_B: Tensor) -> None:
        """Go on at the child of this rank; end at -1."""
        kid_B1 = self.kids_BK.gather(1, rank_B.clamp(min=0).unsqueeze(1))
        next_B = kid_B1.squeeze(1).masked_fill(rank_B < 0, 0)
        self.open_B = self.open_B | (self.offered_B & (next_B == 0))
        self.walking_B = next_B > 0
        self.accepted_B = self.accepted_B + self.walking_B
        self.at_B = torch.where(self.walking_B, next_B, self.at_B)
        self.nodes.append(next_B)

    def finish(self, last_B: Tensor) -> Verdict:
        """Build the verdict with the target's token."""
        missing = self.proposal.tree.depth - len(self.nodes)
        nodes = self.nodes + [torch.zeros_like(last_B)] * missing
        nodes_BD = torch.stack(nodes, dim=1) if nodes else last_B.new_zeros(len(last_B), 0)
        return finish(self.proposal, nodes_BD, self.accepted_B, self.open_B, last_B)


def walk(
    proposal: Proposal, p_BMV: Tensor, u_BU: Tensor, rule: NodeRule, per_node: int | None
) -> Verdict:
    """Walk from the root to each accepted child. On a rejection, draw the last token from what the
    rule leaves of p; at a leaf, from p. Each depth takes `per_node` uniforms (None: one per
    sibling), and the last token takes one.
    """
    u_BU = u_BU.to(p_BMV.device)
    path = Descent(proposal, p_BMV)
    last_BV = p_BV = p_BMV[:, 0]
    used = 0
    for depth, width in enumerate(proposal.tree.widths):
        offer_BK = path.offer(width)
        if known_empty(path.offered_B):
            break
        taking = width if per_node is None else per_node
        u_Bn = u_BU[:, used : used + taking]
        rank_B, left_BV = rule(Node(p_BV, offer_BK, u_Bn, path.q))
        last_BV = choose(path.walking_B, left_BV, last_BV) if depth else left_BV
        path.accept(rank_B)
        if known_empty(path.walking_B):
            break
        p_BV = at_node(p_BMV, path.at_B)
        last_BV = choose(path.walking_B, p_BV, last_BV)
        used += taking
    return path.finish(draw(last_BV, u_BU[:, -1]))


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


def at_node(values_BMV: Tensor, at_B: Tensor) -> Tensor:
    """Copy `[B, V]`, the values at one node (or group) of each row."""
    rows, nodes, _ = values_BMV.shape
    first_B = torch.arange(0, rows * nodes, nodes, device=at_B.device)
    # On a CPU a quarter of the time of `values_BMV[row_numbers, at_B]`.
    return values_BMV.flatten(0, 1).index_select(0, first_B + at_B)


def choose(mask_B: Tensor, yes_BV: Tensor, no_BV: Tensor) -> Tensor:
    """The rows of `yes_BV` where the mask is true, else those of `no_BV`."""
    if known_empty(~mask_B):
        return yes_BV
    return torch.where(mask_B.unsqueeze(1), yes_BV, no_BV)


def refuse(p_BV: Tensor, q_BV: Tensor, share_B1: Tensor) -> tuple[Tensor, Tensor]:
    """What is left to draw from after a token of q was refused: (p - share q)+ `[B, V]`, not
    normalised, and its mass `[B, 1]`.

    share: the mass of p over that of q; 0 where nothing was refused. Where they differ by rounding
    only, nothing is left, and p stays.
    """
    left_BV = torch.addcmul(p_BV, q_BV, share_B1, value=-1).clamp_(min=0)
    mass_B1 = left_BV.sum(1, keepdim=True)
    return choose(mass_B1[:, 0] > 0, left_BV, p_BV), mass_B1


def known_empty(mask: Tensor) -> bool:
    """Whether `mask` is false everywhere; always False on an accelerator, where reading it would
    make the host wait.
    """
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(mask.any())


def tiny(values: Tensor) -> float:
    """The least positive number to divide by, in the dtype of `values`."""
    return torch.finfo(values.dtype).tiny


def row_numbers(p_BMV: Tensor) -> Tensor:
    """0 to B - 1, an index of the rows."""
    return torch.arange(len(p_BMV), device=p_BMV.device)


def finish(
    proposal: Proposal, nodes_BD: Tensor, accepted_B: Tensor, open_B: Tensor, last_B: Tensor
) -> Verdict:
    """Build the verdict from the nodes accepted at each depth (0 once the walk has ended) and the
    target's token.
    """
    last_B1 = last_B.unsqueeze(1)
    tokens_BD1 = torch.cat([proposal.tokens_BM.gather(1, nodes_BD), last_B1], dim=1)
    tokens_BD1 = tokens_BD1.scatter(1, accepted_B.unsqueeze(1), last_B1)
    return Verdict(tokens_BD1, nodes_BD, accepted_B, open_B)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm((p - q)+), the distribution left to draw from after a token of q was refused; rows of
    `[B, V]`.

    If p and q differ by rounding only, nothing is left, and p is returned.
    """
    left_BV = (p_BV - q_BV).clamp_(min=0)
    mass_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, left_BV / mass_B1, p_BV)
