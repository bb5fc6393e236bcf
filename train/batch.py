"""Batches as training steps see them; apart from `train.data`, which reads files, because a step needs only torch.

Legend: B rows of a batch, T tokens of the longest of them, N valid tokens, K stored teacher tokens per position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class StoredRows:
    """The teacher's columns at the valid tokens of a batch, in the order of its labels; padded with -inf."""

    top_ids_NK: Tensor
    top_logprobs_NK: Tensor
    tail_N: Tensor


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; `labels_BT[b, t]` is the token that position t must predict, or IGNORE.

    There is no attention mask: under causal attention no valid token attends to padding on its right, and without a
    mask attention takes its fast kernel. Packed rows have `positions_BT`, which restart with each document, and
    `documents_BT`, its number in the row (-1 for padding). `stored` is set when the data has the teacher's columns;
    `domains_B` is the domain of each row, None where rows are packed.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    stored: StoredRows | None = None
    domains_B: Tensor | None = None

    def domain_tokens(self, domains: int) -> Tensor:
        """How many tokens of each of so many domains are predicted, `[K]`."""
        assert self.domains_B is not None
        valid_B = (self.labels_BT != IGNORE).sum(1)
        return torch.zeros(domains, dtype=valid_B.dtype, device=valid_B.device).index_add(0, self.domains_B, valid_B)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device)

        stored = None if self.stored is None else StoredRows(*(each.to(device) for each in vars(self.stored).values()))
        ids_BT, labels_BT = self.ids_BT.to(device), self.labels_BT.to(device)
        documents = move(self.positions_BT), move(self.documents_BT)
        return Batch(ids_BT, labels_BT, *documents, stored, move(self.domains_B))
