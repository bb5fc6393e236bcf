"""Steps that a GPU replays as CUDA graphs, or that torch.compile compiles.

The rest of `decode` meets them in three places: a decoder and each proposer hold `StaticSteps` if
they compile, `make_runner` returns a runner whose `call` records, and
`proposal.in_bucket` pads a proposal.
"""

from transformers import PreTrainedModel

from draftsmith.decode.own_cache_runner import OwnCacheRunner
from draftsmith.decode.packed_weights import Packs
from draftsmith.decode.recorded.runner import RecordedRunner
from draftsmith.decode.recorded.steps import StaticSteps
from draftsmith.decode.runner import Runner
from draftsmith.decode.supported_models import Ability


def make_runner(
    model: PreTrainedModel,
    able: Ability,
    limit: int | None,
    packs: Packs | None,
    steps: StaticSteps | None,
) -> Runner:
    """Return the runner that suits a model; it records its calls if there are `steps`."""
    if able.drafts == "chain":
        return OwnCacheRunner(model, limit, able.reading)
    if steps is None:
        return Runner(model, able.windows, limit, packs)
    return RecordedRunner(model, able.windows, limit, steps)
