"""A runner whose calls are recorded.

Legend: B rows, L layers, H key/value heads, C capacity in slots, P slots that attention reads, q
queries, T slots of a block, E head size. A slot is the place of one token in the cache.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from draftsmith.decode.cache import TreeCache
from draftsmith.decode.kernel_forward import Forwarded
from draftsmith.decode.recorded.steps import StaticSteps
from draftsmith.decode.runner import Block, BlockForward, Runner, additive

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

    def open(self, lead: Sequence[int] | None = None) -> None:
        """Begin a step; see `Runner.open`."""
        self.column = max(self.lengths)
        leads = lead or [0] * len(self.lengths)
        pairs = zip(self.lengths, leads, strict=True)
        state = [[length, ahead, self.column] for length, ahead in pairs]
        self._state_B3 = torch.tensor(state, device=self.device)

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
            inputs=(offsets_BT, sees_BqT, self._state_B3),
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
        position_BT = offsets_BT + state_B3[:, :1] - state_B3[:, 1:2]
        positions_Bq = position_BT[:, total - queries :].clamp(min=0)
        if runner.limit is not None:
            # Predictions beyond the limit are cut, but no table may be read past its end.
            positions_Bq = positions_Bq.clamp(max=runner.limit - 1)
        masks = self._masks(position_BT, sees_BqT, state_B3)
        at_q = column + torch.arange(total - queries, total, device=column.device)
        keys, values = runner.steps.cache.buffers(rows, self.slots)
        pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
        cache = Cache(layers=[_StepLayer(key, value, at_q) for key, value in pairs])
        if runner.steps.lean is not None:
            return runner.steps.lean.run(
                tokens_Bq, positions_Bq, 0, masks, cache, self.keep_logits, self.hidden_layers
            )
        return runner._own(
            tokens_Bq,
            positions_Bq,
            masks,
            cache,
            self.keep_logits,
            self.hidden_layers,
            features_BqH,
        )

    def _masks(
        self, position_BT: Tensor, sees_BqT: Tensor, state_B3: Tensor
    ) -> dict[str, Tensor | None]:
        """Additive masks `[B, 1, q, P]` by kind of layer: a row's prefix, then the block as its
        tree says.
        """
        queries, total = sees_BqT.shape[1:]
        length_B1 = state_B3[:, :1]
        lead_B1 = state_B3[:, 1:2]
        slot_P = torch.arange(self.slots, device=state_B3.device)
        place_P = slot_P - state_B3[0, 2]
        inside_P = (place_P >= 0) & (place_P < total)
        place_P = place_P.clamp(0, total - 1)
        # A padding slot is seen by itself only: a query with nothing to see would give NaN.
        query_q = torch.arange(total - queries, total, device=state_B3.device)
        itself_qP = query_q.unsqueeze(1) == place_P
        unpadded_B1P = (place_P >= lead_B1).unsqueeze(1)
        block_BqP = sees_BqT.index_select(2, place_P) & inside_P & (unpadded_B1P | itself_qP)
        allowed_BqP = block_BqP | (slot_P < length_B1).unsqueeze(1)
        masks: dict[str, Tensor | None] = {}
        for kind, window in self.runner.windows.items():
            seen_BqP = allowed_BqP
            if window is not None:
                in_block_BP = position_BT.index_select(1, place_P)
                position_BP = torch.where(inside_P, in_block_BP, slot_P)
                query_Bq = position_BT[:, total - queries :]
                distance_BqP = query_Bq.unsqueeze(2) - position_BP.unsqueeze(1)
                seen_BqP = seen_BqP & (distance_BqP < window)
            masks[kind] = additive(seen_BqP.unsqueeze(1), self.runner.model.dtype)
        return masks


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
