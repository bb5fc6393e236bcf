"""A runner whose calls are recorded, and proposals of fixed shapes.

Legend: B rows, L layers, H key/value heads, C capacity in slots, P slots that attention reads, q
queries, T slots of a block, E head size. A slot is the place of one token in the cache.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftsmith.core.transformers_api import Cache, DynamicLayer
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.compiled.steps import StaticSteps, bucket
from draftsmith.decode.kernel_forward import Forwarded
from draftsmith.decode.own_cache_runner import OwnCacheRunner
from draftsmith.decode.packed_weights import Packs
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.runner import (
    Block,
    BlockForward,
    Runner,
    additive,
    block_positions,
    seen_slots,
)
from draftsmith.decode.supported_models import Ability

Result = TypeVar("Result")


class RecordedRunner(Runner):
    """A `Runner` for functions of `bind` alone: it has no `forward` of its own.

    steps: the buffers and recorded functions of its model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        limit: int | None,
        steps: StaticSteps,
    ) -> None:
        super().__init__(model, windows, limit)
        self.steps = steps

    def _new_cache(self, layers: int, capacity: int) -> TreeCache:
        cache = self.steps.begin(len(self.lengths), layers, capacity, self.limit)
        self._lean = self.steps.lean
        return cache

    def bind(
        self, block: Block, keep_logits: int = 0, hidden_layers: Sequence[int] = ()
    ) -> BlockForward:
        """Return the forward of a block of this shape; block and state of the rows are inputs."""
        slots = self.steps.slots(self.column, block.slots)
        layers = tuple(hidden_layers)
        rows = len(self.lengths)
        offsets_BT = block.offsets_RT.expand(rows, -1)
        sees_BqT = block.sees_RqT.expand(rows, -1, -1)
        return BlockForward(
            run=_StaticForward(self, slots, keep_logits, layers),
            inputs=(offsets_BT, sees_BqT, self.state_B3),
            name=(slots, keep_logits, layers),
        )

    def call(self, name: Hashable, function: Callable[..., Result], *inputs: object) -> Result:
        """Return `function(*inputs)` as a recorded step; see `StaticSteps.call`."""
        return self.steps.call(name, function, *inputs)


@dataclass(frozen=True)
class _StaticForward:
    """`Runner.forward` as a function of tensors alone. `slots` (P): those that attention reads,
    including the block.
    """

    runner: RecordedRunner
    slots: int
    keep_logits: int
    hidden_layers: tuple[int, ...]

    def __call__(
        self,
        tokens_Bq: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        features_BqH: Tensor | None = None,
    ) -> Forwarded:
        """inputs: offsets and `sees` of the block, and of each row its length, its padding slots
        and the common column.
        """
        offsets_BT, sees_BqT, state_B3 = inputs
        runner = self.runner
        rows, queries = tokens_Bq.shape
        total = offsets_BT.shape[1]
        column = state_B3[0, 2]
        position_BT = block_positions(offsets_BT, state_B3)
        positions_Bq = position_BT[:, total - queries :].clamp(min=0)
        if runner.limit is not None:
            # Predictions beyond the limit are cut, but no table may be read past its end.
            positions_Bq = positions_Bq.clamp(max=runner.limit - 1)
        masks: dict[str, Tensor | None] = {}
        for kind, window in runner.windows.items():
            seen_BqP = seen_slots(position_BT, sees_BqT, state_B3, self.slots, window)
            masks[kind] = additive(seen_BqP.unsqueeze(1), runner.model.dtype)
        at_q = column + torch.arange(total - queries, total, device=column.device)
        keys, values = runner.steps.cache.buffers(rows, self.slots)
        pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
        cache = Cache(layers=[_StepLayer(key, value, at_q) for key, value in pairs])
        return runner._run(
            tokens_Bq,
            positions_Bq,
            0,
            masks,
            cache,
            self.keep_logits,
            self.hidden_layers,
            features_BqH,
        )


class _StepLayer(DynamicLayer):
    """One layer's buffers in one forward, which writes the slots `at_q` and attends to the first
    P.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, at_q: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = values
        self.at_q = at_q
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        # A block drafter writes the features before its block.
        count = key_states.shape[2]
        at_n = self.at_q[:count]
        self.at_q = self.at_q[count:]
        self.keys.index_copy_(2, at_n, key_states)
        self.values.index_copy_(2, at_n, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


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


def in_bucket(proposal: Proposal, rows: int) -> Proposal:
    """Return a proposal with one tree per row, padded to a bucket of nodes; the new ones are
    missing.
    """
    tree = proposal.tree
    q_BEV = proposal.q_BEV
    finite = proposal.finite
    size = tree.parents_RN.shape[1]
    nodes = bucket(size)
    if q_BEV is not None:
        # A tree that confidence has cut short keeps the group numbers, and so the distributions, of
        # the whole tree.
        slots = (nodes + 1) * proposal.drafts
        missing = max(0, slots - q_BEV.shape[1])
        q_BEV = pad(q_BEV, (0, 0, 0, missing))
    return replace(
        proposal,
        tree=tree.padded(rows, nodes, most=tree.children_RMK.shape[2]),
        tokens_BM=pad(proposal.tokens_BM, (0, nodes - size), value=-1),
        q_BEV=q_BEV,
        finite=None if finite is None else finite.expand(rows),
    )
