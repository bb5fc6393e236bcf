"""Steps of fixed shapes: functions of tensors that a GPU replays as CUDA graphs, or that
torch.compile compiles.

A forward of a few tokens launches hundreds of kernels, and on a GPU launching them takes longer
than running them. A function whose shapes, addresses and control flow never change is recorded once
as a CUDA graph and replayed with one launch. So sizes are rounded up to a few buckets, the cache
stays at one address between `generate` calls, and what changes from step to step (tokens, lengths,
the column to write, the tree) is passed in tensors with one row per row of the batch.

Legend: B rows, L layers, H key/value heads, C capacity in slots, P slots that attention reads, q
queries, T slots of a block, E head size. A slot is the place of one token in the cache.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from decode.cache import TreeCache
from decode.llama_forward import LeanForward, lean_forward
from draftsmith_core.errors import InputError, RunError, first_line

log = logging.getLogger(__name__)
# One unit of attention's length: fewer graphs, and masks whose rows begin at addresses that CUDA's
# kernels accept.
_SLOTS = 256
# torch.compile keeps one version per key of `StaticSteps.call`; its default limit is 8.
_VERSIONS = 512
# Runs before a graph is recorded: libraries choose kernels and allocate workspaces at their first
# call.
_WARM_UP = 2
Function = Callable[..., tuple[Tensor, ...]]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, else the most negative finite value. Eager attention adds its mask, so a
    bool would be wrong.
    """
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )


def bucket(size: int) -> int:
    """Round up to 1 to 8, then to four sizes per doubling (10, 12, 14, 16, 20, 24, ...)."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


def own_forward(
    model: Any,
    tokens_Bq: Tensor,
    positions_Bq: Tensor,
    masks: Mapping[str, Tensor | None],
    cache: Cache,
    keep_logits: int,
    hidden_layers: Sequence[int],
    **options: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits and hidden states of a model's own forward. masks: by kind of layer. options: more of
    its arguments.
    """
    output = model(
        input_ids=tokens_Bq,
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        position_ids=positions_Bq,
        past_key_values=cache,
        use_cache=True,
        **options | ({"output_hidden_states": True} if hidden_layers else {}),
    )
    return output.logits[:, -keep_logits:], tuple(
        output.hidden_states[layer] for layer in hidden_layers
    )


class StaticSteps:
    """The steps of one model: its buffers, and the recorded or compiled functions.

    `backend` True records CUDA graphs; the name of a torch.compile backend ("inductor") compiles a
    step as one graph first. Values may change, and tensors may be replaced between `generate`
    calls. One call at a time. `seconds` is the time of recording and compiling, `count` the number
    of steps.
    """

    def __init__(self, model: PreTrainedModel, backend: bool | str, lean: bool = True) -> None:
        if backend is True and model.device.type != "cuda":
            raise InputError(
                "compile: CUDA graphs need a CUDA device; name a torch.compile backend such as "
                "'inductor'"
            )
        self.model, self.backend, self._lean = model, backend, lean
        self.seconds, self.count = 0.0, 0
        self.lean: LeanForward | None = None
        self._stamp: tuple[int, ...] = ()
        self._steps: dict[object, Function] = {}
        self._pool: Any = None
        self.cache: TreeCache
        self._rows = 0  # of the cache, once there is one

    def begin(self, rows: int, layers: int, capacity: int, limit: int | None) -> TreeCache:
        """Return a cache of at least this size for one `generate` call, at the same address while
        it fits.
        """
        stamp = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if stamp != self._stamp:
            self._forget()
            self._stamp = stamp
            self.lean = lean_forward(self.model, None) if self._lean else None
        if self._rows < rows or self.cache.capacity < capacity:
            if self._steps:
                log.info(
                    "compile: the buffers grow, so that %d steps are recorded again",
                    len(self._steps),
                )
            self._forget()
            known = self.cache.capacity if self._rows else 0
            self._rows = max(bucket(rows), self._rows)
            self.cache = TreeCache(layers, max(_slots(capacity), known), buffer_rows=self._rows)
            # Only a forward knows the shape of the cache.
            if isinstance(self.model, PreTrainedModel):
                one_11 = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
                self.model(
                    input_ids=one_11,
                    position_ids=one_11,
                    past_key_values=self.cache,
                    use_cache=True,
                )
            else:
                self.model.allocate(self.cache)
            if self.lean is not None:
                # Make the table of rotary embeddings outside of steps.
                self.lean.rotary_table(
                    self.cache.capacity if limit is None else min(self.cache.capacity, limit - 1)
                )
        self.cache.reuse(rows)
        return self.cache

    def _forget(self) -> None:
        self._steps.clear()
        # All graphs share one pool: outputs are copied before the next replay.
        self._pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def take_seconds(self) -> float:
        """Return the seconds of recording and compiling since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def call(
        self, name: object, function: Function, rows: int, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `function(*inputs)` as a recorded step. Inputs and outputs have `rows` rows.

        `name` must differ if `function` differs in anything but the shapes of its inputs. Rows are
        padded with zeros to the bucket, and outputs are cut. No replay overwrites the outputs.
        """
        padded_rows = min(bucket(rows), self._rows)
        missing = padded_rows - rows
        padded = tuple(
            F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing)) if missing else tensor
            for tensor in inputs
        )
        key = (name, tuple((tensor.shape, tensor.dtype) for tensor in padded))
        began = time.perf_counter() if key not in self._steps else None
        if began is not None:
            self._steps[key] = self._make(function, padded)
            self.count += 1
        outputs = self._steps[key](*padded)
        if began is not None:
            if outputs and outputs[0].device.type == "cuda":
                torch.cuda.synchronize(outputs[0].device)
            self.seconds += time.perf_counter() - began
        return outputs if padded_rows == rows else tuple(tensor[:rows] for tensor in outputs)

    def _make(self, function: Function, inputs: tuple[Tensor, ...]) -> Function:
        if isinstance(self.backend, str):
            # First calls import and allocate, which cannot be traced. Repeating a step writes the
            # same states again.
            function(*inputs)
            compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend)

            def step(*tensors: Tensor) -> tuple[Tensor, ...]:
                with torch._dynamo.config.patch(
                    recompile_limit=_VERSIONS, accumulated_recompile_limit=4 * _VERSIONS
                ):
                    return compiled(*tensors)

            function = step
        if inputs[0].device.type != "cuda":
            return function
        return _record(function, inputs, self._pool)

    def slots(self, column: int, total: int) -> int:
        """Return P of a forward whose block of `total` slots begins at this column."""
        return min(_slots(column + total), self.cache.capacity)


def steps_for(
    models: Sequence[Any], backend: bool | str, lean: bool, known: Sequence[StaticSteps]
) -> list[StaticSteps]:
    """Return static steps of a proposer's models: the known ones if they fit; none without a
    backend.
    """
    if not backend:
        return []
    if [(steps.model, steps.backend) for steps in known] == [(model, backend) for model in models]:
        return list(known)
    return [StaticSteps(model, backend, lean) for model in models]


@dataclass(frozen=True)
class StaticForward:
    """A model's forward as a function of tensors alone, for use in a function of
    `StaticSteps.call`.

    `slots` (P): slots that attention reads, including the block.
    """

    steps: StaticSteps
    slots: int
    windows: Mapping[str, int | None]
    limit: int | None
    keep_logits: int
    hidden_layers: tuple[int, ...]

    @property
    def name(self) -> tuple[object, ...]:
        """Identity of the function beside the model and its inputs."""
        return self.slots, self.keep_logits, self.hidden_layers

    def __call__(
        self,
        tokens_Bq: Tensor,
        offsets_BT: Tensor,
        sees_BqT: Tensor,
        state_B3: Tensor,
        features_BqH: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like `Runner.forward`. `state_B3` holds each row's length, its padding slots and the
        common column.
        """
        rows, queries = tokens_Bq.shape
        total = offsets_BT.shape[1]
        length_B1, lead_B1, column = state_B3[:, :1], state_B3[:, 1:2], state_B3[0, 2]
        base_B1 = length_B1 - lead_B1
        positions_Bq = (offsets_BT[:, total - queries :] + base_B1).clamp(min=0)
        if self.limit is not None:
            # Predictions beyond the limit are cut, but no table may be read past its end.
            positions_Bq = positions_Bq.clamp(max=self.limit - 1)
        masks = self._masks(offsets_BT, sees_BqT, length_B1, lead_B1, column)
        at_q = column + torch.arange(total - queries, total, device=column.device)
        keys, values = self.steps.cache.buffers(rows, self.slots)
        pairs = zip(keys.unbind(0), values.unbind(0), strict=True)
        cache = Cache(layers=[_StepLayer(*pair, at_q) for pair in pairs])
        if self.steps.lean is not None:
            return self.steps.lean.run(
                tokens_Bq, positions_Bq, 0, masks, cache, self.keep_logits, self.hidden_layers
            )
        if features_BqH is not None:
            self.steps.model.features_BTH = features_BqH
        return own_forward(
            self.steps.model,
            tokens_Bq,
            positions_Bq,
            masks,
            cache,
            self.keep_logits,
            self.hidden_layers,
        )

    def _masks(
        self,
        offsets_BT: Tensor,
        sees_BqT: Tensor,
        length_B1: Tensor,
        lead_B1: Tensor,
        column: Tensor,
    ) -> dict[str, Tensor]:
        """Additive masks `[B, 1, q, P]` by kind of layer: a row's prefix, then the block as its
        tree says.
        """
        queries, total = sees_BqT.shape[1:]
        slot_P = torch.arange(self.slots, device=column.device)
        place_P = slot_P - column
        inside_P = (place_P >= 0) & (place_P < total)
        place_P = place_P.clamp(0, total - 1)
        # A padding slot is seen by itself only: a query with nothing to see would give NaN.
        query_q = torch.arange(total - queries, total, device=column.device)
        itself_qP = query_q.unsqueeze(1) == place_P
        unpadded_B1P = (place_P >= lead_B1).unsqueeze(1)
        block_BqP = sees_BqT.index_select(2, place_P) & inside_P & (unpadded_B1P | itself_qP)
        allowed_BqP = block_BqP | (slot_P < length_B1).unsqueeze(1)
        masks = {}
        for kind, window in self.windows.items():
            seen_BqP = allowed_BqP
            if window is not None:
                position_BT = offsets_BT + length_B1 - lead_B1
                position_BP = torch.where(inside_P, position_BT.index_select(1, place_P), slot_P)
                distance_BqP = position_BT[:, total - queries :].unsqueeze(
                    2
                ) - position_BP.unsqueeze(1)
                seen_BqP = seen_BqP & (distance_BqP < window)
            masks[kind] = additive(seen_BqP.unsqueeze(1), self.steps.model.dtype)
        return masks


def _slots(count: int) -> int:
    return bucket(-(-count // _SLOTS)) * _SLOTS


class _StepLayer(DynamicLayer):
    """One layer's buffers in one forward, which writes the slots `at_q` and attends to the first
    P.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, at_q: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.at_q = keys, values, at_q
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        # A block drafter writes the features before its block.
        at_n, self.at_q = self.at_q[: key_states.shape[2]], self.at_q[key_states.shape[2] :]
        self.keys.index_copy_(2, at_n, key_states)
        self.values.index_copy_(2, at_n, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


def _record(function: Function, inputs: tuple[Tensor, ...], pool: Any) -> Function:
    """Return `function` as a CUDA graph that reads copies of its inputs; RunError if it cannot be
    recorded.
    """
    held = tuple(tensor.clone() for tensor in inputs)
    stream = torch.cuda.Stream(held[0].device)
    stream.wait_stream(torch.cuda.current_stream(held[0].device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            function(*held)
    torch.cuda.current_stream(held[0].device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            outputs = function(*held)
    except RuntimeError as error:
        reason = first_line(error)
        raise RunError(
            f"compile: a step cannot be recorded as a CUDA graph ({reason}); run without compile"
        ) from None

    def replay(*tensors: Tensor) -> tuple[Tensor, ...]:
        for buffer, tensor in zip(held, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        # The next replay writes its outputs to the same place.
        return tuple(tensor.clone() for tensor in outputs)

    return replay
