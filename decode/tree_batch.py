"""The token trees of one step as device arrays, which the engine and the verifiers read.

Legend: N drafted nodes, M = N + 1 nodes with the root, D depth, K most children of one node, B
rows, R = 1 when all rows share the tree, else B. Arrays with an M axis give the root index 0 and
drafted node n index n + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decode.tree import Tree, chain


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The trees of one step as arrays; each row may have its own (R = B).

    parents_RN, depths_RN: as in `Tree`. children_RMK: M indices in rank order, 0 for no child.
    groups_RM: the children of node m were drawn from `Proposal.q_BEV[:, groups_RM[m]]` (0 for a
    leaf). sees_RMM: the ancestor mask with the root. widths: bounds of the children of a node, by
    depth.
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

    @cached_property
    def on_host(self) -> tuple[list[list[list[int]]], list[list[int]]]:
        return self.children_RMK.tolist(), self.depths_RN.tolist()

    def padded(self, rows: int, nodes: int, most: int) -> "TreeBatch":
        """The same trees, one per row, with room for `nodes` drafted nodes and `most` children of a
        node. The new nodes are missing.
        """
        new = nodes - self.parents_RN.shape[1]
        more = most - self.children_RMK.shape[2]
        itself_MM = torch.eye(nodes + 1, dtype=torch.bool, device=self.sees_RMM.device)
        sees_RMM = pad(self.sees_RMM, (0, new, 0, new)) | itself_MM
        return TreeBatch(
            parents_RN=pad(self.parents_RN, (0, new), value=-1).expand(rows, -1),
            depths_RN=pad(self.depths_RN, (0, new), value=1).expand(rows, -1),
            children_RMK=pad(self.children_RMK, (0, more, 0, new)).expand(rows, -1, -1),
            groups_RM=pad(self.groups_RM, (0, new)).expand(rows, -1),
            sees_RMM=sees_RMM.expand(rows, -1, -1),
            widths=self.widths,
        )

    @staticmethod
    def build(tree: Tree, device: torch.device) -> "TreeBatch":
        """Arrays of one static tree, shared by all rows (R = 1)."""
        return batch_of([tree.parents], tree.widths, device)


@lru_cache(maxsize=64)
def chain_batch(length: int, widths: tuple[int, ...], device: torch.device) -> TreeBatch:
    """Arrays of a chain that all rows share, drafted in the place of a tree of these widths."""
    return batch_of([chain(length).parents], widths, device)


def batch_of(
    rows: Sequence[Sequence[int]], widths: tuple[int, ...], device: torch.device
) -> TreeBatch:
    """Arrays of one tree per row, from lists of parents; its widths are the first of `widths`.

    Built on the host: for small trees that takes less time than the thirty kernels of `grow_batch`.
    """
    size = max(map(len, rows))
    parents = np.full((len(rows), size), -1)
    children = np.zeros((len(rows), size + 1, max(widths, default=1)), dtype=np.int64)
    sees = np.zeros((len(rows), size + 1, size + 1), dtype=bool)
    sees[:] = np.eye(size + 1, dtype=bool)
    for row, listed in enumerate(rows):
        parents[row, : len(listed)] = listed
        below = children[row]
        masks = sees[row]
        rank = 0
        before = -2
        for node, parent in enumerate(listed, 1):
            rank = rank + 1 if parent == before else 0
            before = parent
            below[parent + 1, rank] = node
            masks[node] |= masks[parent + 1]
    # As in `grow_batch`: a node that does not exist counts as a leaf right below the root.
    sees[:, :, 0] = True
    drafted = sees[:, 1:, 1:]
    depths = drafted.sum(2)
    deepest = int(depths.max(initial=0))
    inner = children[:, :, 0] > 0
    groups = (inner.cumsum(1) - 1) * inner

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return TreeBatch(
        parents_RN=tensor(parents),
        depths_RN=tensor(depths),
        children_RMK=tensor(children),
        groups_RM=tensor(groups),
        sees_RMM=tensor(sees),
        widths=widths[:deepest],
    )


def grow_batch(parents_BN: Tensor, exists_BN: Tensor, depth: int, most: int) -> TreeBatch:
    """Arrays of one tree per row, built on the device of `parents_BN` without the host waiting for
    it.

    A node where `exists_BN` is false has no parent. depth, most: bounds of the depth and of the
    children of one node.
    """
    rows, size = parents_BN.shape
    device = parents_BN.device
    above_BN = torch.where(exists_BN, parents_BN + 1, 0)
    same_BNN = (above_BN.unsqueeze(2) == above_BN.unsqueeze(1)) & exists_BN.unsqueeze(1)
    ranks_BN = same_BNN.tril(-1).sum(2)
    children_BMK = torch.zeros(rows, size + 1, most + 1, dtype=torch.long, device=device)
    # Nodes that do not exist all write to the spare last column, which is then cut.
    rank_BN = torch.where(exists_BN, ranks_BN, most)
    column_BN = above_BN * (most + 1) + rank_BN
    numbers_BN = torch.arange(1, size + 1, device=device).expand(rows, -1)
    children_BMK.view(rows, -1).scatter_(1, column_BN, numbers_BN)
    children_BMK = children_BMK[:, :, :most].contiguous()
    sees_BMM = torch.eye(size + 1, dtype=torch.bool, device=device).repeat(rows, 1, 1)
    above_BM1 = pad(above_BN, (1, 0)).unsqueeze(2)
    for _ in range(depth):
        sees_BMM = sees_BMM | sees_BMM.take_along_dim(above_BM1, dim=1)
    inner_BM = (children_BMK > 0).any(2)
    before_BM = inner_BM.cumsum(1) - 1
    groups_BM = before_BM.clamp_(min=0) * inner_BM
    return TreeBatch(
        parents_RN=above_BN - 1,
        depths_RN=sees_BMM[:, 1:, 1:].sum(2),
        children_RMK=children_BMK,
        groups_RM=groups_BM,
        sees_RMM=sees_BMM,
        widths=(most,) * depth,
    )
