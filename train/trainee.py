"""What the training loop knows of a kind of draft."""

from torch import Tensor, nn

from drafts.load import Draft
from train.batch import Batch, LossSums
from train.features import FrozenTarget


class Trainee(nn.Module):
    """A draft with what trains it; the target stays outside its parameters.

    `trainee(batch)` gives the sums over the valid tokens of a batch. target: its live teacher; None
    if there is none.
    """

    draft: Draft
    target: FrozenTarget | None

    def count(self, batch: Batch) -> Tensor:
        """How many tokens `loss` will be a sum over, a scalar, without the forward."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> LossSums:
        raise NotImplementedError
