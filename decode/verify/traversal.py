"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): a tree drawn without replacement is verified from its
leaves up, whole paths at a time.

Legend: B rows, D depth, K siblings, M nodes with the root, N drafted nodes, S = 2 N moments of a walk around the tree,
V vocabulary. At each depth p, q and w belong to the node of that depth which the walk is at or below.

The walk goes around the tree depth first: it enters each node, visits its children in the order they were drawn, and
leaves the node. On entering, w = min(1, w p(x)/q(x)) with w, p and q of the node above. On leaving, the node is
accepted with probability w, together with the path to it, and the token is drawn from its p. If it is refused the
node above changes: w becomes s / (s + 1 - w) with s the mass of (w p - q)+, p becomes norm((w p - q)+), and q loses
the token. The root has w = 1. On a chain this is block verification, from the same uniforms.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from decode.propose.protocol import Proposal
from decode.tree_batch import TreeBatch
from decode.verify.block import keep, weight
from decode.verify.exact import verify as exact
from decode.verify.mcsd import without
from decode.verify.rule import ALL, Rows, Verdict, among, finish_at, landing, nowhere, walk
from draftsmith_core.sampling import draw


def verify(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
    """The rule above. With deterministic children, q one-hot for each, it comes to `exact` and runs as that."""
    if u_BU is None:
        return exact(proposal, p_BMV, None)
    if proposal.q_BEV is None or proposal.tree.depth == 0:
        return walk(proposal, p_BMV, u_BU, landing, per_node=1)
    return around(proposal, p_BMV, u_BU.to(p_BMV.device))


# A place along the second axis of an array: one for all rows, or one a row.
Place = int | Tensor


def around(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor) -> Verdict:
    """Walk around the tree, all rows at once. Node n is decided by uniform n - 1, the token by uniform N."""
    tree, tokens_BM, q_BEV = proposal.tree, proposal.tokens_BM, proposal.q_BEV
    assert q_BEV is not None
    rows, vocab = len(tokens_BM), p_BMV.shape[2]
    rows_B = torch.arange(rows, device=p_BMV.device)

    def at(place: Place, who: Rows = ALL) -> tuple[Rows, Place]:
        return (rows_B[who], place[who]) if isinstance(place, Tensor) else (who, place)

    p_BDV, q_BDV = p_BMV.new_empty(rows, tree.depth, vocab), p_BMV.new_empty(rows, tree.depth, vocab)
    w_BD = p_BMV.new_ones(rows, tree.depth + 1)
    p_BDV[:, 0], q_BDV[:, 0] = p_BMV[:, 0], q_BEV[rows_B, tree.slots_RM[:, 0]]
    law_BV = torch.empty_like(p_BMV[:, 0])
    live_B = torch.ones(rows, dtype=torch.bool, device=p_BMV.device)
    node_B = torch.zeros_like(rows_B)
    for node, depth, slot, inner_B, entering_B, leaving_B in moments(tree, live_B):
        x_B = tokens_BM[at(node)]
        here_B = live_B & (x_B >= 0)
        if nowhere(here_B):
            continue
        x_B, above = x_B.clamp(min=0), depth - 1
        if entering_B is not None:
            now_B = here_B & entering_B
            w_B = weight(w_BD[at(above)], p_BDV[rows_B, above, x_B], q_BDV[rows_B, above, x_B])
            w_BD[at(depth)] = torch.where(now_B, w_B, w_BD[at(depth)])
            if inner_B is not None:
                # A leaf's laws are never changed, so that it needs no place of its own.
                now_B = now_B & inner_B
                who = among(now_B)
                place = at(lowest(depth, tree), who)
                p_BDV[place] = torch.where(now_B[who, None], p_BMV[at(node, who)], p_BDV[place])
                q_BDV[place] = torch.where(now_B[who, None], q_BEV[at(slot, who)], q_BDV[place])
        if leaving_B is not None:
            now_B = here_B & leaving_B
            taken_B = now_B & (u_BU[at(lowest_uniform(node))] < w_BD[at(depth)])
            if not nowhere(taken_B):
                who = among(taken_B)
                own_BV = p_BMV[at(node, who)]
                if inner_B is not None:
                    own_BV = torch.where(inner_B[who, None], p_BDV[at(lowest(depth, tree), who)], own_BV)
                law_BV[who] = torch.where(taken_B[who, None], own_BV, law_BV[who])
                node_B = torch.where(taken_B, node, node_B)
                live_B = live_B & ~taken_B
                if nowhere(live_B):
                    break
            refused_B = now_B & ~taken_B
            if nowhere(refused_B):
                continue
            who = among(refused_B)
            place, refused_B1 = at(above, who), refused_B[who, None]
            p_BV, q_BV, w_B = p_BDV[place], q_BDV[place], w_BD[place]
            left_BV = (w_B[:, None] * p_BV).sub_(q_BV).clamp_(min=0)
            mass_B1 = left_BV.sum(1, keepdim=True)
            left_BV.div_(mass_B1.clamp(min=torch.finfo(mass_B1.dtype).tiny))
            # As in `residual`: what rounding leaves without mass is p.
            p_BDV[place] = torch.where(refused_B1 & (mass_B1 > 0), left_BV, p_BV)
            q_BDV[place] = torch.where(refused_B1, without(q_BV, x_B[who, None]), q_BV)
            w_BD[place] = torch.where(refused_B1[:, 0], keep(w_B, mass_B1[:, 0]), w_B)
    law_BV = torch.where(live_B[:, None], p_BDV[:, 0], law_BV)
    return finish_at(proposal, node_B, draw(law_BV, u_BU[:, -1]))


def lowest(depth: Place, tree: TreeBatch) -> Place:
    """The place of a depth's laws. The last depth has none, and no row's own tree looks there for any."""
    return depth.clamp(max=tree.depth - 1) if isinstance(depth, Tensor) else depth


def lowest_uniform(node: Place) -> Place:
    """The uniform of a node; that of no node is any."""
    return (node - 1).clamp(min=0) if isinstance(node, Tensor) else node - 1


def moments(
    tree: TreeBatch, yes_B: Tensor
) -> Iterator[tuple[Place, Place, Place, Tensor | None, Tensor | None, Tensor | None]]:
    """Node, its depth, slot, and masks `[B]` of whether it has children, is entered, and is left, in the order of the
    walk; None for a mask that is nowhere true. Node 0 stands for no node. `yes_B` is a mask that is true everywhere.
    """
    if tree.rows == 1:
        for node, depth, slot, *facts in _shared(tree):
            inner_B, entering_B, leaving_B = (yes_B if fact else None for fact in facts)
            yield node, depth, slot, inner_B, entering_B, leaving_B
        return
    events_RS, depths_RM, inner_RM = _events(tree)
    for event_R in events_RS.unbind(1):
        node_R = event_R.abs()
        index_R1 = node_R.unsqueeze(1)
        yield (
            node_R,
            depths_RM.gather(1, index_R1).squeeze(1).clamp(min=1),
            tree.slots_RM.gather(1, index_R1).squeeze(1),
            inner_RM.gather(1, index_R1).squeeze(1),
            event_R > 0,
            event_R < 0,
        )


@lru_cache(maxsize=8)
def _shared(tree: TreeBatch) -> tuple[tuple[int, int, int, bool, bool, bool], ...]:
    """`moments` of a tree that all rows share. Reading it off a device waits for the device, once a tree."""
    events_RS, depths_RM, inner_RM = _events(tree)
    (events,), (depths,), (inner,), (slots,) = (
        each.tolist() for each in (events_RS, depths_RM, inner_RM, tree.slots_RM)
    )
    return tuple((n, depths[n], slots[n], inner[n], e > 0, e < 0) for e in events if (n := abs(e)))


def _events(tree: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
    """`[R, S]` the walk around the tree: n where node n is entered, -n where it is left, 0 once it is over; the depths
    of all nodes and whether they have children, `[R, M]`.
    """
    children_RMK, sees_RMM = tree.children_RMK, tree.sees_RMM
    count, total, most = children_RMK.shape
    inner_RM = (children_RMK > 0).any(2)
    depths_RM = torch.nn.functional.pad(tree.depths_RN, (1, 0))
    sizes_RM = sees_RMM.sum(1)
    kids_Rc = children_RMK.reshape(count, -1)
    sizes_RMK = sizes_RM.gather(1, kids_Rc).masked_fill(kids_Rc == 0, 0).view(count, total, most)
    # Nodes in the subtrees of earlier siblings; index 0 collects the children that there are not.
    earlier_Rc = (sizes_RMK.cumsum(2) - sizes_RMK).view(count, -1)
    before_RM = torch.zeros_like(sizes_RM).scatter_(1, kids_Rc, earlier_Rc)
    exists_RM = torch.zeros_like(inner_RM).scatter_(1, kids_Rc, True)
    before_RM[:, 0], exists_RM[:, 0] = 0, False
    # Nodes entered before a node: on its path, and below earlier siblings of its path. Those that are not on the path
    # have been left as well.
    aside_RM = (sees_RMM * before_RM.unsqueeze(1)).sum(2)
    enter_RM = 2 * aside_RM + depths_RM - 1
    leave_RM = enter_RM + 2 * sizes_RM - 1
    spare = 2 * total
    numbers_RM = torch.arange(total, device=kids_Rc.device).expand(count, -1)
    events_RS = torch.zeros(count, spare + 1, dtype=torch.long, device=kids_Rc.device)
    events_RS.scatter_(1, torch.where(exists_RM, enter_RM, spare), numbers_RM)
    events_RS.scatter_(1, torch.where(exists_RM, leave_RM, spare), -numbers_RM)
    return events_RS[:, : 2 * (total - 1)], depths_RM, inner_RM
