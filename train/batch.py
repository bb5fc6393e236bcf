"""Batches as training steps see them; apart from `train.data`, which reads files, because a step needs only torch.

Legend: B rows of a batch, T tokens of the longest of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.teacher import StoredTeacher

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; `labels_BT[b, t]` is the token that position t must predict, or IGNORE.

    There is no attention mask: under causal attention no valid token attends to padding on its right, and without a
    mask attention takes its fast kernel. Packed rows have `positions_BT`, which restart with each document, and
    `documents_BT`, its number in the row (-1 for padding). `stored` is set when data has the teacher's columns: those
    at the valid tokens in the order of the labels.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    stored: StoredTeacher | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        moved: dict[str, Any] = {key: None if each is None else each.to(device) for key, each in vars(self).items()}
        return Batch(**moved)
