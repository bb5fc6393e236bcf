"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree drawn without replacement is
verified from its leaves up, whole paths at a time. On a chain this is block verification (Sun et
al. 2024, arXiv 2403.10444), than which no rule for one path accepts more.

Legend: B rows, D depth, K siblings, M nodes with the root, N drafted nodes, S = 2 N visits of a
walk around the tree, V vocabulary. At each depth p, q and w belong to the node of that depth which
the walk is at or below.

The walk enters each node, visits its children in the order they were drawn, and leaves the node. On
entering, w = min(1, w p(x)/q(x)) with w, p and q of the node above. On leaving, the node is
accepted with probability w, together with the path to it, and the token is drawn from its p. If it
is refused the node above changes: w becomes s / (s + 1 - w) with s the mass of (w p - q)+, p
becomes norm((w p - q)+), and q loses the token. The root has w = 1.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decode.choosing import draw
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.tree_batch import TreeBatch
from draftsmith.decode.verify.siblings import without
from draftsmith.decode.verify.tree_walk import (
    Verdict,
    finish_at,
    hit_by_target,
    known_empty,
    recording,
    row_numbers,
    tiny,
    walk,
)


def traversal(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """The rule above. For deterministic children (q is one-hot) it equals `exact` and runs as
    that.
    """
    if proposal.q_BEV is None or proposal.tree.depth == 0:
        return walk(proposal, p_BMV, u_BU, hit_by_target, per_node=1)
    return walk_around(proposal, p_BMV, u_BU.to(p_BMV.device))


# Which rows of a batch to work on: an index, or a slice for all of them.
Rows = slice | Tensor
ALL = slice(None)
# An index along the second axis of an array: one for all rows, or one per row `[B]`.
Index = int | Tensor


class Visit(NamedTuple):
    """A visit of a node. Masks are bools of all rows, or of each row, `[B]`."""

    node: Index  # 0: none
    depth: Index
    group: Index  # of its children
    inner: bool | Tensor  # whether it has children
    entering: bool | Tensor
    leaving: bool | Tensor


class _State(NamedTuple):
    """p, q and w by depth, of the node that the walk is at or below."""

    p_BDV: Tensor
    q_BDV: Tensor
    w_BD: Tensor

    def refuse(self, where: tuple[Rows, Index], refused_B1: Tensor, x_B1: Tensor) -> None:
        """Change the node at `where` in the rows where its child with token x was refused."""
        p_BV = self.p_BDV[where]
        q_BV = self.q_BDV[where]
        w_B1 = self.w_BD[where].unsqueeze(1)
        left_BV = (w_B1 * p_BV).sub_(q_BV).clamp_(min=0)
        mass_B1 = left_BV.sum(1, keepdim=True)
        left_BV.div_(mass_B1.clamp(min=tiny(mass_B1)))
        # As in `residual`: where rounding leaves no mass, p stays.
        self.p_BDV[where] = torch.where(refused_B1 & (mass_B1 > 0), left_BV, p_BV)
        self.q_BDV[where] = torch.where(refused_B1, without(q_BV, x_B1), q_BV)
        new_B1 = torch.where(refused_B1, keep_probability(w_B1, mass_B1), w_B1)
        self.w_BD[where] = new_B1.squeeze(1)


def walk_around(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Walk around the tree, all rows at once. Node n is decided by uniform n - 1, the token by
    uniform N.
    """
    tree = proposal.tree
    q_BEV = proposal.q_BEV
    assert q_BEV is not None
    rows_B = row_numbers(p_BMV)

    def at(index: Index, which: Rows = ALL) -> tuple[Rows, Index]:
        return (rows_B[which], index[which]) if isinstance(index, Tensor) else (which, index)

    # Leaves of the last depth are not stored, but need a valid index.
    shape = (len(rows_B), tree.depth + 1, p_BMV.shape[2])
    p_BDV = p_BMV.new_empty(shape)
    q_BDV = p_BMV.new_empty(shape)
    w_BD = p_BMV.new_ones(shape[:2])
    p_BDV[:, 0] = p_BMV[:, 0]
    q_BDV[:, 0] = q_BEV[rows_B, tree.groups_RM[:, 0]]
    state = _State(p_BDV, q_BDV, w_BD)
    end_BV = torch.empty_like(p_BMV[:, 0])
    live_B = torch.ones_like(rows_B, dtype=torch.bool)
    node_B = torch.zeros_like(rows_B)
    for node, depth, group, inner, entering, leaving in visits(tree):
        x_B = proposal.tokens_BM[at(node)]
        here_B = live_B & (x_B >= 0)
        if known_empty(here_B):
            continue
        x_B = x_B.clamp(min=0)
        above = depth - 1
        if entering is not False:
            now_B = here_B & entering
            w_B = weight(w_BD[at(above)], p_BDV[rows_B, above, x_B], q_BDV[rows_B, above, x_B])
            w_BD[at(depth)] = torch.where(now_B, w_B, w_BD[at(depth)])
            if inner is not False:
                # A leaf's p and q are never changed, so only nodes with children are stored.
                now_B = now_B & inner
                which = rows_of(now_B)
                where = at(depth, which)
                now_B1 = now_B[which, None]
                p_BDV[where] = torch.where(now_B1, p_BMV[at(node, which)], p_BDV[where])
                q_BDV[where] = torch.where(now_B1, q_BEV[at(group, which)], q_BDV[where])
        if leaving is not False:
            now_B = here_B & leaving
            taken_B = now_B & (u_BU[at(node - 1)] < w_BD[at(depth)])
            if not known_empty(taken_B):
                which = rows_of(taken_B)
                leaf_BV = p_BMV[at(node, which)]
                if inner is not False:
                    changed_B = here_B & inner
                    leaf_BV = torch.where(changed_B[which, None], p_BDV[at(depth, which)], leaf_BV)
                end_BV[which] = torch.where(taken_B[which, None], leaf_BV, end_BV[which])
                node_B = torch.where(taken_B, node, node_B)
                live_B = live_B & ~taken_B
                if known_empty(live_B):
                    break
            refused_B = now_B & ~taken_B
            if known_empty(refused_B):
                continue
            which = rows_of(refused_B)
            state.refuse(at(above, which), refused_B[which, None], x_B[which, None])
    end_BV = torch.where(live_B[:, None], p_BDV[:, 0], end_BV)
    last_B = draw(end_BV, u_BU[:, -1])
    return finish_at(proposal, node_B, last_B)


def rows_of(mask_B: Tensor) -> Rows:
    """Indices of the mask's true rows on a CPU; all rows on an accelerator."""
    if mask_B.device.type != "cpu" or torch.compiler.is_compiling() or bool(mask_B.all()):
        return ALL
    return mask_B.nonzero()[:, 0]


def weight(w: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, w p(x)/q(x)): the weight of a path that ends in token x, from the weight w of the path
    without x.
    """
    ratio = w * p_x / q_x.clamp(min=tiny(q_x))
    return ratio.clamp_(max=1)


def keep_probability(w: Tensor, mass: Tensor) -> Tensor:
    """mass / (mass + 1 - w), where mass is that of (w p - q)+: the weight of a node once a child of
    it is refused.
    """
    lack = 1 - w
    return torch.where(lack > 0, mass / torch.where(lack > 0, mass + lack, 1.0), 1.0)


def visits(tree: TreeBatch) -> Iterable[Visit]:
    """Return the visits of the walk in order."""
    return _shared(tree) if tree.rows == 1 and not recording() else _by_row(tree)


def _by_row(tree: TreeBatch) -> Iterator[Visit]:
    walk = _events(tree)
    for event_R in walk.events_RS.unbind(1):
        node_R = event_R.abs()
        index_R1 = node_R.unsqueeze(1)
        yield Visit(
            node=node_R,
            depth=walk.depths_RM.gather(1, index_R1).squeeze(1).clamp(min=1),
            group=tree.groups_RM.gather(1, index_R1).squeeze(1),
            inner=walk.inner_RM.gather(1, index_R1).squeeze(1),
            entering=event_R > 0,
            leaving=event_R < 0,
        )


@lru_cache(maxsize=8)
def _shared(tree: TreeBatch) -> list[Visit]:
    # Cached, because reading a tree from a device waits for the device.
    walk = _events(tree)
    depths = walk.depths_RM[0].tolist()
    groups = tree.groups_RM[0].tolist()
    inner = walk.inner_RM[0].tolist()
    found = []
    for event in walk.events_RS[0].tolist():
        node = abs(event)
        if node:
            found.append(Visit(node, depths[node], groups[node], inner[node], event > 0, event < 0))
    return found


class _Events(NamedTuple):
    """The walk around the tree `[R, S]`: n where node n is entered, -n where it is left, 0 once it
    is over; and of all nodes, `[R, M]`, the depths and whether they have children.
    """

    events_RS: Tensor
    depths_RM: Tensor
    inner_RM: Tensor


def _events(tree: TreeBatch) -> _Events:
    children_RMK = tree.children_RMK
    sees_RMM = tree.sees_RMM
    count, total, most = children_RMK.shape
    inner_RM = (children_RMK > 0).any(2)
    depths_RM = pad(tree.depths_RN, (1, 0))
    sizes_RM = sees_RMM.sum(1)
    kids_Rc = children_RMK.reshape(count, -1)
    sizes_Rc = sizes_RM.gather(1, kids_Rc).masked_fill(kids_Rc == 0, 0)
    sizes_RMK = sizes_Rc.view(count, total, most)
    # Nodes in the subtrees of earlier siblings; index 0 collects entries without a child.
    earlier_Rc = (sizes_RMK.cumsum(2) - sizes_RMK).view(count, -1)
    before_RM = torch.zeros_like(sizes_RM).scatter_(1, kids_Rc, earlier_Rc)
    exists_RM = torch.zeros_like(inner_RM).scatter_(1, kids_Rc, True)
    before_RM[:, 0] = 0
    exists_RM[:, 0] = False
    # Nodes entered before a node: on its path, and below earlier siblings of its path. Those that
    # are not on the path have been left as well.
    aside_RM = (sees_RMM * before_RM.unsqueeze(1)).sum(2)
    enter_RM = 2 * aside_RM + depths_RM - 1
    leave_RM = enter_RM + 2 * sizes_RM - 1
    spare = 2 * total  # for nodes that do not exist
    numbers_RM = torch.arange(total, device=kids_Rc.device).expand(count, -1)
    events_RS = torch.zeros(count, spare + 1, dtype=torch.long, device=kids_Rc.device)
    events_RS.scatter_(1, torch.where(exists_RM, enter_RM, spare), numbers_RM)
    events_RS.scatter_(1, torch.where(exists_RM, leave_RM, spare), -numbers_RM)
    return _Events(events_RS[:, : 2 * (total - 1)], depths_RM, inner_RM)
