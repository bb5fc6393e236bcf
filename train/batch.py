"""What goes into a forward of a trainee, and what comes out; apart from `train.data`, because a step needs only torch.

Legend: B rows of a batch, T tokens of the longest of them, D depths (depth 1 is the first drafted token).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.teacher import StoredTeacher

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; `labels_BT[b, t]` is the token that position t must predict, or IGNORE.

    There is no attention mask: under causal attention no valid token attends to padding on its right. Packed rows have
    `positions_BT`, which restart with each document, and `documents_BT`, its number in the row (-1 for padding).
    `stored`: the teacher's columns of the data at the valid tokens, in the order of the labels. `seeds_B`: of what is
    drawn at random for a row of training data, in every pass anew.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    stored: StoredTeacher | None = None
    seeds_B: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device."""
        moved: dict[str, Any] = {key: None if part is None else part.to(device) for key, part in vars(self).items()}
        return Batch(**moved)


class LossSums(NamedTuple):
    """Sums over the valid tokens of one forward; only the loop divides them, once for all processes.

    A tuple, because the wrappers of DDP, ZeRO and FSDP look for tensors in those. loss: scalar, the sum of the weighted
    losses; all else has no gradient. tokens: number of valid tokens. alpha: sum of sum_x min(p, q) at temperature 1 and
    depth 1. depth_alpha_D, depth_tokens_D: the same sum and its number of tokens by depth; 0 tokens if not measured.
    missing: sum of the target's probability of tokens that the draft cannot give, or that stored teacher rows do not
    list; None if the teacher's whole distribution is known.
    """

    loss: Tensor
    tokens: Tensor
    alpha: Tensor
    depth_alpha_D: Tensor
    depth_tokens_D: Tensor
    missing: Tensor | None = None
