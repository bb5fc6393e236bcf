"""What goes into a forward of a trainee, how documents share a row of it, and what comes out.

Apart from `train.batches`, because a step needs only torch.

Legend: B rows of a batch, T tokens of the longest of them, R documents, D depths (depth 1 is the
first drafted token).
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.hidden_states import body
from draftsmith.train.teacher import StoredTeacher

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; `labels_BT[b, t]` is the token that position t must predict, or
    IGNORE.

    There is no attention mask: under causal attention no valid token attends to padding on its
    right. Packed rows have `positions_BT`, which restart with each document, and `documents_BT`,
    its number in the row (-1 for padding). `stored`: the teacher's columns of the data at the valid
    tokens, in the order of the labels. `seeds_B`: of what is drawn at random for a row of training
    data, in every pass anew.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    stored: StoredTeacher | None = None
    seeds_B: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        moved: dict[str, Any] = {
            key: None if part is None else part.to(device) for key, part in vars(self).items()
        }
        return Batch(**moved)


class LossSums(NamedTuple):
    """Sums over the valid tokens of one forward; only the loop divides them, once for all
    processes.

    A tuple, because the wrappers of DDP, ZeRO and FSDP look for tensors in those. loss: scalar, the
    sum of the weighted losses; all else has no gradient. tokens: number of valid tokens.
    depth_alpha_D, depth_tokens_D: by depth the sum of sum_x min(p, q) at temperature 1, and its
    number of tokens; 0 tokens if not measured.
    missing: sum of the target's probability of tokens that the draft cannot give, or that stored
    teacher rows do not list; None if the teacher's whole distribution is known.
    """

    loss: Tensor
    tokens: Tensor
    depth_alpha_D: Tensor
    depth_tokens_D: Tensor
    missing: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """Sum of sum_x min(p, q) at temperature 1 and depth 1."""
        return self.depth_alpha_D[0]

    def to_vector(self) -> Tensor:
        """Pack the sums into one fp64 vector, which adds up over batches and processes.

        fp64, because the sums run over a whole held-out set.
        """
        zero = torch.zeros_like(self.tokens)
        missing = [zero, zero] if self.missing is None else [self.missing, self.tokens]
        parts = [self.loss, self.tokens, *missing, self.depth_alpha_D, self.depth_tokens_D]
        return torch.cat([part.detach().double().reshape(-1) for part in parts])

    @classmethod
    def from_vector(cls, vector: Tensor) -> "LossSums":
        """Unpack a sum of vectors of `to_vector`, to the CPU."""
        vector = vector.cpu()
        loss, tokens, missing, missing_tokens = vector[:4]
        alpha_D, tokens_D = vector[4:].chunk(2)
        return cls(loss, tokens, alpha_D, tokens_D, missing if missing_tokens else None)

    @property
    def alphas(self) -> list[float]:
        """Mean alpha of each depth that was measured."""
        mean_D = self.depth_alpha_D / self.depth_tokens_D
        measured: list[float] = mean_D[self.depth_tokens_D > 0].tolist()
        return measured


# How many documents are looked at together; more fills rows better and mixes lengths less.
_WINDOW = 512

# `positions`: position ids that restart are enough for the model. `mask`: it needs a mask as well.
PackingMethod = Literal["positions", "mask"]


def pack(lengths_R: npt.NDArray[np.int64], width: int, seed: int) -> list[list[int]]:
    """Rows of at most `width` tokens: lists of document indices that together hold every document
    once.

    Documents are shuffled; within a window the longest go first, each into the fullest row that
    still has room.
    """
    packed: list[list[int]] = []
    shuffled = np.random.default_rng([seed, len(lengths_R)]).permutation(len(lengths_R))
    for start in range(0, len(shuffled), _WINDOW):
        window = shuffled[start : start + _WINDOW]
        rows: list[list[int]] = []
        room: list[int] = []
        for document in window[np.argsort(-lengths_R[window], kind="stable")]:
            length = int(lengths_R[document])
            fits = [(space, row) for row, space in enumerate(room) if space >= length]
            if fits:
                row = min(fits)[1]
            else:
                row = len(rows)
                rows.append([])
                room.append(width)
            rows[row].append(int(document))
            room[row] -= length
        packed += rows
    return packed


def forward_options(
    batch: Batch, method: PackingMethod | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of a model's forward beside the ids. method: of this model, if batches are
    packed.
    """
    if batch.positions_BT is None or batch.documents_BT is None:
        return {}
    assert method is not None, "this trainee was not built for packed batches"
    if method == "positions":
        return {"position_ids": batch.positions_BT}
    same_BTT = batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]
    # Additive: 0 where a token may attend (back, in its own document), else the least value.
    mask_BTT = torch.zeros_like(same_BTT, dtype=dtype)
    mask_BTT.masked_fill_(~same_BTT.tril(), torch.finfo(dtype).min)
    return {"position_ids": batch.positions_BT, "attention_mask": mask_BTT[:, None]}


@torch.no_grad()
def packing_method(model: PreTrainedModel, name: str) -> PackingMethod:
    """How the model keeps documents apart: by positions that restart alone, or with a mask too;
    found by trying.

    What a document sees must not change with the document before it, and its hidden states must be
    those it has alone. Raise InputError for a model that cannot keep them apart (recurrent ones).
    """
    config = model.config.get_text_config(decoder=True)
    size = 5
    steps_T = torch.arange(size, device=model.device)
    alone_BT = (steps_T[None] * 7 + 3) % config.vocab_size
    positions_BT = steps_T.repeat(2)[None]
    documents_BT = torch.arange(2, device=model.device).repeat_interleave(size)[None]
    packed = Batch(positions_BT, positions_BT, positions_BT, documents_BT)
    was_training = model.training
    model.eval()
    wanted = _states(model, alone_BT, {})
    working: PackingMethod | None = None
    methods: tuple[PackingMethod, ...] = ("positions", "mask")
    # A mask of ours would replace the model's own, and with it a sliding window.
    for method in methods[: 1 if getattr(config, "sliding_window", None) else 2]:
        options = forward_options(packed, method, model.dtype)
        after = []
        try:
            for before_BT in (alone_BT.flip(1), (alone_BT + 1) % config.vocab_size):
                both_BT = torch.cat([before_BT, alone_BT], 1)
                after.append(_states(model, both_BT, options)[:, size:])
        except (RuntimeError, ValueError, TypeError, IndexError):
            # a model that takes no such mask fails on its shape, each family with another error
            continue
        scale = wanted.abs().max()
        apart = (after[0] - after[1]).abs().max()
        changed = (after[0] - wanted).abs().max()
        if apart <= 1e-5 * scale and changed <= 0.05 * scale:
            working = method
            break
    model.train(was_training)
    if working is None:
        raise InputError(
            f"packing: {name} ({type(model).__name__}) cannot keep packed documents apart; set "
            "packing to false"
        )
    return working


def _states(model: PreTrainedModel, ids_BT: Tensor, options: dict[str, Any]) -> Tensor:
    states: Tensor = body(model)(input_ids=ids_BT, use_cache=False, **options).last_hidden_state
    return states.float()
