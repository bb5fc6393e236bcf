"""What the training loop knows of a kind of draft."""

from torch import Tensor, nn

from draftsmith.drafts.load import Draft
from draftsmith.train.batch import Batch, LossSums
from draftsmith.train.chunked import TokenLoss
from draftsmith.train.frozen_target import FrozenTarget
from draftsmith.train.objective import Objective


class Trainee(nn.Module):
    """A draft with what trains it; the target stays outside its parameters.

    `trainee(batch)` gives the sums over the valid tokens of a batch. target: its live teacher; None
    if there is none. chunk: tokens whose logits are held at once; None for what suits the device.
    """

    draft: Draft
    target: FrozenTarget | None

    def __init__(self, draft: Draft, objective: Objective, chunk: int | None) -> None:
        super().__init__()
        self.draft = draft
        self.objective = objective
        self.loss = TokenLoss(objective, chunk)

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` will be a sum over, a scalar, without the forward."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> LossSums:
        raise NotImplementedError
