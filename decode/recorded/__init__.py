"""Steps that a GPU replays as CUDA graphs, or that torch.compile compiles.

The rest of `decode` meets them in three places: a decoder and each proposer hold `StaticSteps` if
they compile, `make_runner` returns a runner whose `call` records, and
`proposal.in_bucket` pads a proposal.
"""

from transformers import PreTrainedModel

from decode.packed_weights import Packs
from decode.recorded.runner import RecordedRunner
from decode.recorded.steps import StaticSteps
from decode.runner import Runner


def make_runner(
    model: PreTrainedModel,
    windows: dict[str, int | None],
    limit: int | None,
    packs: Packs | None,
    steps: StaticSteps | None,
) -> Runner:
    """Return a runner that records its calls if there are `steps`."""
    if steps is None:
        return Runner(model, windows, limit, packs)
    return RecordedRunner(model, windows, limit, steps)
