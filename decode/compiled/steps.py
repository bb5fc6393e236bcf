"""Steps of fixed shapes: functions of tensors that a GPU replays as CUDA graphs, or that
torch.compile compiles.

A forward of a few tokens launches hundreds of kernels, and on a GPU launching them takes longer
than running them. A function whose shapes, addresses and control flow never change is recorded once
as a CUDA graph and replayed with one launch. So sizes are rounded up to a few buckets, the cache
stays at one address between `generate` calls, and what changes from step to step (tokens, lengths,
the column to write, the tree) is passed in tensors with one row per row of the batch.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError, RunError, first_line
from draftsmith.core.large_target import is_spread
from draftsmith.core.transformers_api import cache_name
from draftsmith.decode.cache import TreeCache
from draftsmith.decode.llama_forward import LeanForward, lean_forward
from draftsmith.decode.packed_weights import Packs

log = logging.getLogger(__name__)
# One unit of attention's length: fewer graphs, and masks whose rows begin at addresses that CUDA's
# kernels accept.
_SLOTS = 256
# torch.compile keeps one version per key of `StaticSteps.call`; its default limit is 8.
_VERSIONS = 512
# Runs before a graph is recorded: libraries choose kernels and allocate workspaces at their first
# call.
_WARM_UP = 2
# Of inductor on a GPU: a product of one row becomes a reduction that is tuned, others choose among
# kernels by the clock. Its cache keeps what was chosen.
_TUNED: dict[str, Any] = {"coordinate_descent_tuning": True, "max_autotune": True}
Result = TypeVar("Result")
OfTensors = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def bucket(size: int) -> int:
    """Round up to 1 to 8, then to four sizes per doubling (10, 12, 14, 16, 20, 24, ...)."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


@dataclass(frozen=True)
class _Step:
    """A recorded function of tensors, and the form of its result."""

    run: OfTensors
    form: Hashable


def check_backend(backend: bool | str | None, device: torch.device) -> None:
    """Raise InputError if steps would be recorded without a GPU."""
    if backend is True and device.type != "cuda":
        raise InputError(
            "compile: CUDA graphs need a CUDA device; name a torch.compile backend such as "
            "'inductor'"
        )


class StaticSteps:
    """The steps of one model: its buffers, and the recorded or compiled functions.

    `backend` True records CUDA graphs; the name of a torch.compile backend ("inductor") compiles a
    step as one graph first. Values may change, and tensors may be replaced between `generate`
    calls. One call at a time. `seconds` is the time of recording and compiling, `count` the number
    of steps.
    """

    def __init__(self, model: PreTrainedModel, backend: bool | str, lean: bool = True) -> None:
        check_backend(backend, model.device)
        if is_spread(model):
            raise InputError("compile: a target that --target_device_map spreads is not recorded")
        self.model = model
        self.backend = backend
        self.seconds = 0.0
        self.count = 0
        self.lean: LeanForward | None = None
        self.cache: TreeCache
        self._wants_lean = lean
        self._stamp: list[int] = []
        self._steps: dict[Hashable, _Step] = {}
        self._pool: Any = None
        self._rows = 0  # of the cache, once there is one

    def begin(self, rows: int, layers: int, capacity: int, limit: int | None) -> TreeCache:
        """Return a cache of at least this size for one `generate` call, at the same address while
        it fits.
        """
        stamp = [parameter.data_ptr() for parameter in self.model.parameters()]
        if stamp != self._stamp:
            self._forget()
            self._stamp = stamp
            self.lean = lean_forward(self.model, Packs()) if self._wants_lean else None
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
            self._allocate()
            if self.lean is not None:
                # Make the table of rotary embeddings outside of steps.
                positions = self.cache.capacity
                self.lean.rotary.up_to(positions if limit is None else min(positions, limit - 1))
        self.cache.reuse(rows)
        return self.cache

    def _allocate(self) -> None:
        # Only a forward knows the shape of the cache.
        if isinstance(self.model, PreTrainedModel):
            one_11 = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
            cache: Any = {cache_name(self.model.forward): self.cache}
            self.model(input_ids=one_11, position_ids=one_11, use_cache=True, **cache)
        else:
            self.model.allocate(self.cache)

    def _forget(self) -> None:
        self._steps.clear()
        # All graphs share one pool: outputs are copied before the next replay.
        self._pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None

    def take_seconds(self) -> float:
        """Return the seconds of recording and compiling since the last call."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def slots(self, column: int, total: int) -> int:
        """Return how many slots attention reads if a block of `total` slots begins at `column`."""
        return min(_slots(column + total), self.cache.capacity)

    def call(self, name: Hashable, function: Callable[..., Result], *inputs: object) -> Result:
        """Return `function(*inputs)` as a recorded step.

        Inputs and result are tensors, or tuples and dataclasses of tensors and constants. All
        tensors have one row per row of the batch. `name` must differ if `function` differs in
        anything but the shapes and constants of its inputs. Rows are padded with zeros to the
        bucket, and results are cut. No replay overwrites the result.
        """
        tensors: list[Tensor] = []
        form = _take_apart(inputs, tensors)
        rows = len(tensors[0])
        padded_rows = min(bucket(rows), self._rows)
        if padded_rows > rows:
            new = padded_rows - rows
            tensors = [F.pad(old, (0, 0) * (old.ndim - 1) + (0, new)) for old in tensors]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = (name, form, shapes)
        began = time.perf_counter()
        is_new = key not in self._steps
        if is_new:
            self._steps[key] = self._make(function, form, tensors)
            self.count += 1
        step = self._steps[key]
        outputs = step.run(tensors)
        if is_new:
            if tensors[0].device.type == "cuda":
                torch.cuda.synchronize(tensors[0].device)
            self.seconds += time.perf_counter() - began
        cut = [output[:rows] for output in outputs]
        result: Result = _put_together(step.form, iter(cut))
        return result

    def _make(self, function: Callable[..., object], form: Hashable, inputs: list[Tensor]) -> _Step:
        def result_of(tensors: Sequence[Tensor], outputs: list[Tensor]) -> Hashable:
            values = _put_together(form, iter(tensors))
            return _take_apart(function(*values), outputs)

        def of_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            outputs: list[Tensor] = []
            result_of(tensors, outputs)
            return tuple(outputs)

        # The first call imports and allocates, which cannot be traced. Repeating a step writes the
        # same states again.
        result_form = result_of(inputs, [])
        run: OfTensors = of_tensors
        if isinstance(self.backend, str):
            run = _compiled(run, self.backend, inputs[0].device)
        if inputs[0].device.type == "cuda":
            run = _record(run, inputs, self._pool)
        return _Step(run, result_form)


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


def _slots(count: int) -> int:
    return bucket(-(-count // _SLOTS)) * _SLOTS


class _Form(NamedTuple):
    """A tuple or dataclass without its tensors, which `Tensor` stands for."""

    kind: Callable[..., object]
    parts: tuple[Hashable, ...]


def _take_apart(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors of a value to `tensors`, and return its form."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, tuple):
        parts: Sequence[object] = value
    elif hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return value
    return _Form(type(value), tuple([_take_apart(part, tensors) for part in parts]))


def _put_together(form: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the value of this form with these tensors."""
    if form is Tensor:
        return next(tensors)
    if not isinstance(form, _Form):
        return form
    parts = [_put_together(part, tensors) for part in form.parts]
    return tuple(parts) if form.kind is tuple else form.kind(*parts)


def _compiled(function: OfTensors, backend: str, device: torch.device) -> OfTensors:
    options = _TUNED if backend == "inductor" and device.type == "cuda" else None
    compiled = torch.compile(
        function, fullgraph=True, dynamic=False, backend=backend, options=options
    )

    def step(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch._dynamo.config.patch(
            recompile_limit=_VERSIONS, accumulated_recompile_limit=4 * _VERSIONS
        ):
            return compiled(tensors)

    return step


def _record(function: OfTensors, inputs: Sequence[Tensor], pool: Any) -> OfTensors:
    """Return `function` as a CUDA graph that reads copies of its inputs; RunError if it cannot be
    recorded.
    """
    held = [tensor.clone() for tensor in inputs]
    device = held[0].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            function(held)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            outputs = function(held)
    except RuntimeError as error:
        raise RunError(
            f"compile: a step cannot be recorded as a CUDA graph ({first_line(error)}); run "
            "without compile"
        ) from None

    def replay(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for buffer, tensor in zip(held, tensors, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        # The next replay writes its outputs to the same place.
        return tuple(tensor.clone() for tensor in outputs)

    return replay
