"""The token trees of one step as device arrays, which the engine and the verifiers read.

Legend: N drafted nodes, M = N + 1 nodes with the root, D depth, K most children of one node, B rows, R = 1 when all
rows share the tree, else B. Arrays with an M axis give the root index 0 and drafted node n index n + 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decode.tree import Tree


def ancestor_mask(tree: Tree) -> Tensor:
    """`[N, N]` bool on the CPU: entry (i, j) is true when node j is node i or lies on its path to the root."""
    mask_NN = torch.eye(tree.size, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            mask_NN[node] |= mask_NN[parent]
    return mask_NN


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The trees of one step as arrays. Each row may have its own (R = B).

    `parents_RN` and `depths_RN` are as in `Tree`. `children_RMK` holds M indices in rank order, 0 where there is none.
    `groups_RM` numbers the groups of siblings: the children of node m were drawn from `Proposal.q_BEV[:, groups_RM[m]]`
    (0 for a leaf). `sees_RMM` is the ancestor mask with the root. `widths[d]` bounds the children of a node at depth d,
    so that `len(widths)` is the depth D.
    """

    parents_RN: Tensor
    depths_RN: Tensor
    children_RMK: Tensor
    groups_RM: Tensor
    sees_RMM: Tensor
    widths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Length of the longest path that any row may have."""
        return len(self.widths)

    @property
    def rows(self) -> int:
        """R: 1 when every row has this tree."""
        return self.parents_RN.shape[0]

    @staticmethod
    def build(tree: Tree, device: torch.device) -> "TreeBatch":
        """Arrays of one static tree, shared by all rows (R = 1)."""
        size = tree.size
        most = max((len(nodes) for nodes in tree.children), default=0)
        children_MK = torch.zeros(size + 1, max(most, 1), dtype=torch.long)
        groups_M = torch.zeros(size + 1, dtype=torch.long)
        group = 0
        for node, below in enumerate(tree.children):
            if below:
                children_MK[node, : len(below)] = torch.tensor(below)
                groups_M[node] = group
                group += 1
        sees_MM = torch.zeros(size + 1, size + 1, dtype=torch.bool)
        sees_MM[:, 0] = True
        sees_MM[1:, 1:] = ancestor_mask(tree)
        return TreeBatch(
            parents_RN=torch.tensor([tree.parents], dtype=torch.long, device=device),
            depths_RN=torch.tensor([tree.depths], dtype=torch.long, device=device),
            children_RMK=children_MK.unsqueeze(0).to(device),
            groups_RM=groups_M.unsqueeze(0).to(device),
            sees_RMM=sees_MM.unsqueeze(0).to(device),
            widths=tree.widths,
        )


def grow_batch(parents_BN: Tensor, exists_BN: Tensor, depth: int, most: int) -> TreeBatch:
    """Arrays of one tree per row, built on the device of `parents_BN` without the host waiting for it.

    `parents_BN` is as in `Tree.parents`, nodes in breadth-first order; a node where `exists_BN` is false belongs to
    no parent. `depth` and `most` bound the depth and the children of one node.
    """
    rows, size = parents_BN.shape
    device = parents_BN.device
    above_BN = torch.where(exists_BN, parents_BN + 1, 0)
    same_BNN = (above_BN.unsqueeze(2) == above_BN.unsqueeze(1)) & exists_BN.unsqueeze(1)
    ranks_BN = same_BNN.tril(-1).sum(2)
    children_BMK = torch.zeros(rows, size + 1, most + 1, dtype=torch.long, device=device)
    # Nodes that do not exist all write to the spare last column, which is then cut.
    column_BN = above_BN * (most + 1) + torch.where(exists_BN, ranks_BN, most)
    numbers_BN = torch.arange(1, size + 1, device=device).expand(rows, -1)
    children_BMK.view(rows, -1).scatter_(1, column_BN, numbers_BN)
    children_BMK = children_BMK[:, :, :most].contiguous()
    sees_BMM = torch.eye(size + 1, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    above_BM = torch.nn.functional.pad(above_BN, (1, 0))
    index_BMM = above_BM.unsqueeze(2).expand(-1, -1, size + 1)
    for _ in range(depth):
        sees_BMM = sees_BMM | sees_BMM.gather(1, index_BMM)
    inner_BM = (children_BMK > 0).any(2)
    groups_BM = (inner_BM.cumsum(1) - 1).clamp_(min=0) * inner_BM
    return TreeBatch(
        parents_RN=above_BN - 1,
        depths_RN=sees_BMM[:, 1:, 1:].sum(2),
        children_RMK=children_BMK,
        groups_RM=groups_BM,
        sees_RMM=sees_BMM,
        widths=(most,) * depth,
    )
