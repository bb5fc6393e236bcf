"""Clocks for the benchmarks: what a `generate` call spends in the forwards of each model, and what
the rest costs.

Legend: q tokens of one forward, T cells of a block.

The library has no timers of its own; `Clock` wraps the two places that every forward goes through,
ours (`decode.runner.Runner.prefill` and `.forward`) and transformers' (`model.forward`), while it
is open. Both include the making of masks and positions. On CUDA it records events, which do not
make the host wait, and reads them afterwards.
"""

import functools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from draftsmith.core.models import context_length, text_config
from draftsmith.decode.native.large_pages import empty_bytes
from draftsmith.decode.packed_weights import kernel_products, packs_of
from draftsmith.decode.runner import Block, Runner
from draftsmith.decode.supported_models import ability
from draftsmith.drafts.heads.medusa import ParallelHeads

Name = TypeVar("Name")
Mark = Any  # seconds on a CPU, a recorded event on CUDA


def mark(device: torch.device) -> Mark:
    """Now, on the clock of the device."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def between_s(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another; on CUDA after a synchronisation."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


def synchronise(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Forward:
    """One forward of the model called `name`."""

    name: str
    start: Mark
    end: Mark


class Clock:
    """While open (`with Clock(target=[...], draft=[...]) as clock`), notes the forwards of these
    models by name.
    """

    def __init__(self, **models: Sequence[nn.Module]) -> None:
        self.forwards: list[Forward] = []
        self._models: list[nn.Module] = []
        self._names: dict[int, str] = {}
        for name, group in models.items():
            self._models += group
            self._names |= dict.fromkeys(map(id, group), name)
        self._inside = False

    def __enter__(self) -> "Clock":
        self._wrapped = ExitStack()
        self._wrap(Runner, "prefill", _model_of_runner)
        self._wrap(Runner, "forward", _model_of_runner)
        self._wrap(ParallelHeads, "logits_of", lambda head: head)
        # On the class: a forward of an instance's own would keep the engine from its lean path.
        for kind in dict.fromkeys(map(type, self._models)):
            self._wrap(kind, "forward", lambda model: model)
        return self

    def __exit__(self, *_: object) -> None:
        self._wrapped.close()

    def _wrap(self, kind: type, method: str, model_of: Callable[..., nn.Module]) -> None:
        """Note the calls of a method. model_of: the model that runs, by the method's object."""
        call = getattr(kind, method)

        # `wraps` also passes on the signature, which generate and Runner look at.
        @functools.wraps(call)
        def timed(owner: object, *values: object, **options: object) -> object:
            model = model_of(owner)
            name = self._names.get(id(model))
            run = functools.partial(call, owner, *values, **options)
            if name is None or self._inside:
                return run()
            self._inside = True
            device = next(model.parameters()).device
            start = mark(device)
            try:
                return run()
            finally:
                self.forwards.append(Forward(name, start, mark(device)))
                self._inside = False

        self._wrapped.enter_context(mock.patch.object(kind, method, timed))


def _model_of_runner(runner: Runner) -> nn.Module:
    """The runner's model; of a head that is wrapped for its runner, the head."""
    model: nn.Module = getattr(runner.model, "head", runner.model)
    return model


@dataclass(frozen=True)
class Run:
    """One timed call of a method. `calls` and `forward_s` are by model name."""

    outputs: list[list[int]]
    wall_s: float
    after_prefill_s: float
    calls: dict[str, int]
    forward_s: dict[str, float]


def timed_run(clock: Clock, device: torch.device, call: Callable[[], list[list[int]]]) -> Run:
    """Time one call. `after_prefill_s` begins where the target's first forward ends."""
    clock.forwards.clear()
    synchronise(device)
    started = time.perf_counter()
    outputs = call()
    end = mark(device)
    synchronise(device)
    wall_s = time.perf_counter() - started
    target_ends = [forward.end for forward in clock.forwards if forward.name == "target"]
    calls: dict[str, int] = Counter()
    forward_s: dict[str, float] = defaultdict(float)
    for forward in clock.forwards:
        calls[forward.name] += 1
        forward_s[forward.name] += between_s(forward.start, forward.end)
    return Run(outputs, wall_s, between_s(target_ends[0], end), calls, forward_s)


@torch.inference_mode()
def hugging_face_forwards(
    model: PreTrainedModel, context: Sequence[int], row_counts: Sequence[int]
) -> dict[int, Callable[[], None]]:
    """Plain forwards of so many tokens behind `context`, through transformers and its own cache
    (one for all).
    """
    cache = DynamicCache(config=model.config)
    ids_1T = torch.tensor([list(context)], device=model.device)
    model(input_ids=ids_1T, past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def once(tokens_1q: Tensor) -> None:
        model(input_ids=tokens_1q, past_key_values=cache, use_cache=True)
        cache.crop(-tokens_1q.shape[1])

    token_11 = ids_1T[:, :1]
    return {rows: functools.partial(once, token_11.repeat(1, rows)) for rows in row_counts}


@torch.inference_mode()
def runner_forwards(
    model: PreTrainedModel, context: Sequence[int], row_counts: Sequence[int], fast: bool = True
) -> dict[int, Callable[[], None]]:
    """Forwards of chains of so many tokens behind `context`, through our own runner and its
    cache.
    """
    packs = packs_of(model) if fast else None
    products = kernel_products if fast else nullcontext
    runner = Runner(model, ability(model).windows, context_length(model), packs)
    with products():
        runner.prefill([list(context)], max(row_counts) + 1)

    @torch.inference_mode()
    def once(tokens_1q: Tensor, block: Block) -> None:
        with products():
            runner.open()
            runner.forward(tokens_1q, block)
            runner.keep([[]])

    calls: dict[int, Callable[[], None]] = {}
    for rows in row_counts:
        offsets_1T = torch.arange(rows, device=runner.device)[None]
        sees_1qT = torch.ones(1, rows, rows, dtype=torch.bool, device=runner.device)
        sees_1qT.tril_()
        tokens_1q = torch.full((1, rows), context[0], device=runner.device)
        calls[rows] = functools.partial(once, tokens_1q, Block(offsets_1T, sees_1qT, static=True))
    return calls


def by_name_and_rows(
    made: Mapping[str, Mapping[int, Callable[[], None]]],
) -> dict[tuple[str, int], Callable[[], None]]:
    """The forwards of several models, for `medians_s`."""
    calls = {}
    for name, by_rows in made.items():
        for rows, call in by_rows.items():
            calls[name, rows] = call
    return calls


def medians_s(
    calls: Mapping[Name, Callable[[], object]], device: torch.device, repeats: int
) -> dict[Name, float]:
    """Median seconds of every call, interleaved in rotating order after two warm-ups."""
    names = list(calls)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(-2, repeats):
        for name in rotated(names, turn):
            synchronise(device)
            started = time.perf_counter()
            calls[name]()
            synchronise(device)
            if turn >= 0:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


_READ_BYTES = 1 << 28


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory that no cache holds, with all threads and, on a CPU, in
    the pages that weights are kept in; a median of ten. What other guests of the same computer
    leave over changes within minutes, so it is read again in every round, and set beside that
    round's speeds.
    """
    count = _READ_BYTES // 4
    values = (
        empty_bytes(_READ_BYTES).view(torch.float32)
        if device.type == "cpu"
        else torch.empty(count, device=device)
    )
    values.fill_(1)
    return _READ_BYTES / medians_s({"read": values.sum}, device, 10)["read"]


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of weights that a forward of one token reads from a model that was taken over and
    packed; less an embedding that is only looked up in.
    """
    lookup = model.get_input_embeddings()
    projection = model.get_output_embeddings()
    read: dict[int, int] = {}
    for module in model.modules():
        place = getattr(module, "place", None)
        if place is not None:
            read[id(place.matrix)] = place.matrix.values.nbytes
        for name, parameter in module._parameters.items():
            packed = place is not None and name == "weight"
            if (
                parameter is not None
                and not packed
                and (module is not lookup or parameter is projection.weight)
            ):
                read[id(parameter)] = parameter.nbytes
    return sum(read.values())


def cache_bytes(model: PreTrainedModel, slots: int) -> int:
    """Bytes of the keys and values of so many tokens, which every forward behind them reads."""
    config = text_config(model)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = int(config.num_hidden_layers) * int(config.num_key_value_heads)
    return 2 * heads * int(size) * slots * model.dtype.itemsize


def rotated(names: Sequence[Name], turn: int) -> list[Name]:
    """The names from another one on at every turn, so that none always runs behind the same
    other.
    """
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]
