"""The hidden states of a causal model and the way from the last of them to its logits, in one shape
for every architecture.

A model of n layers has the states 0 (the embedding) to n: state l is the raw output of l layers,
the last one included, as engines give it. transformers' last entry is normed instead. The *final
state*, -1, is that after the final norm.

Architectures differ: some keep several residual streams, some hand out another last state than the
one that their output projection reads, some have layers in between (BERT). How a model does it is
found by trying it on a few tokens, once.

Legend: B rows, T tokens, N tokens, H hidden size, V vocabulary, S residual streams.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.transformers_api import BaseModelOutputWithPastAndCrossAttentions, layer_states


@dataclass(frozen=True)
class StateLayout:
    """What a model's `hidden_states` look like.

    count: number of entries, embedding included. width: H. streams_first: states with residual
    streams are `[S, B, T, H]`, else `[B, T, S, H]` or `[B, T, S * H]`. last_is_final: the last
    entry is the state that `body` returns as the last. last_layer: the module whose output is the
    raw last state; None if none was found. readers: by the number of a state before the last, the
    module that reads it; those that were found. has_layers: False for a model that was loaded
    without them, which cannot be run.
    """

    count: int
    width: int
    streams_first: bool = False
    last_is_final: bool = True
    last_layer: nn.Module | None = None
    readers: Mapping[int, nn.Module] = field(default_factory=dict)
    has_layers: bool = True


_layouts: WeakKeyDictionary[nn.Module, StateLayout] = WeakKeyDictionary()


def body(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its output projection. Raise InputError if it has none of its own."""
    base = model.base_model
    if base is model:
        # The prefix of some composite models names no part of their language model (Llama 4).
        inner = [part for part in model.children() if isinstance(part, PreTrainedModel)]
        if len(inner) != 1:
            raise InputError(f"{type(model).__name__} has no part that gives its hidden states")
        return inner[0]
    assert isinstance(base, PreTrainedModel)
    return base


@torch.no_grad()
def layout_of(model: PreTrainedModel) -> StateLayout:
    """Try the model and return its layout; tried once per model. One without values (meta) is taken
    as its configuration says.
    """
    if model.device.type == "meta":
        config = model.config.get_text_config(decoder=True)
        return StateLayout(config.num_hidden_layers + 1, config.hidden_size)
    known = _layouts.get(model)
    if known is None:
        with evaluating(model):
            ids_BT = some_tokens(model, rows=2, tokens=3)
            lists = [part for part in body(model).modules() if isinstance(part, nn.ModuleList)]
            # Among the modules of all lists are the model's layers.
            with _caught(layer for part in lists for layer in part) as calls:
                out = body(model)(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        states: Sequence[Tensor] | None = out.hidden_states
        last = out.last_hidden_state
        if not states:
            raise InputError(f"{type(model).__name__} gives no hidden states, which heads read")
        ends = [calls[part[-1]] for part in lists if len(part) and part[-1] in calls]
        # The last layer reads the state before the last. Some leave out the embedding (Mamba):
        # there it returns that state.
        found = [end.module for end in ends if _same(end.returned, states[-2])]
        found += [end.module for end in ends if _same(end.read, states[-2])]
        readers = {}
        once = [call for call in calls.values() if call.count == 1]
        for number, state in enumerate(states[:-1]):
            reading = [call.module for call in once if _same(call.read, state)]
            if reading:
                readers[number] = reading[0]
        shape = last.shape[:2]
        known = _layouts[model] = StateLayout(
            count=len(states),
            width=last.shape[-1],
            streams_first=any(state.dim() == 4 and state.shape[:2] != shape for state in states),
            last_is_final=_same(states[-1], last),
            last_layer=found[-1] if found else None,
            readers=readers,
        )
    return known


@torch.no_grad()
def without_layers(model: PreTrainedModel, count: int) -> None:
    """Give a model that was loaded without its `count` layers the layout and config of the whole
    one.
    """
    ids_BT = some_tokens(model, rows=1, tokens=1)
    final = body(model)(input_ids=ids_BT, use_cache=False).last_hidden_state
    _layouts[model] = StateLayout(count + 1, final.shape[-1], has_layers=False)
    model.config.get_text_config(decoder=True).num_hidden_layers = count


@torch.no_grad()
def final_norm(model: PreTrainedModel) -> nn.Module:
    """The module from the raw last state to the final one, of a model without layers."""
    inner = body(model)
    with evaluating(model), _caught(inner.modules()) as calls:
        out = inner(input_ids=some_tokens(model, rows=1, tokens=3), use_cache=False)
    ends = [call for call in calls.values() if _same(call.returned, out.last_hidden_state)]
    if not ends or not ends[-1].read.is_floating_point():
        raise InputError(f"{type(model).__name__} has no final norm, which --states needs")
    return ends[-1].module


@dataclass(frozen=True)
class _Call:
    """The last call of a module: its first argument, what it returned, and which call it was."""

    module: nn.Module
    read: Any
    returned: Any
    count: int


@contextmanager
def _caught(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, _Call]]:
    """The last call in the block of each of these modules that was called."""
    calls: dict[nn.Module, _Call] = {}

    def catch(module: nn.Module, given: Any, named: Any, returned: Any) -> None:
        read = given[0] if given else named.get("hidden_states")
        before = calls[module].count if module in calls else 0
        calls[module] = _Call(module, read, layer_states(returned), before + 1)

    handles = [module.register_forward_hook(catch, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.equal(a.to(b.device), b)


def some_tokens(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    """Ids `[rows, tokens]` from inside the vocabulary: at its ends are padding, and markers of
    images and sound that need an input.
    """
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    numbers = torch.arange(rows * tokens, device=model.device).view(rows, tokens)
    step = max(size // 2 // (rows * tokens), 1)
    return size // 7 + numbers * step % max(size // 2, 1)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode in the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def merged(state: Tensor, layout: StateLayout) -> Tensor:
    """A state as `[B, T, H]`: the mean of its residual streams, if it has several; a narrower one
    is padded with zeros (Reformer).
    """
    if state.dim() == 4:
        return state.mean(0 if layout.streams_first else 2)
    if state.shape[-1] < layout.width:
        return F.pad(state, (0, layout.width - state.shape[-1]))
    if state.shape[-1] > layout.width:
        return state.unflatten(-1, (-1, layout.width)).mean(-2)
    return state


def body_states(model: PreTrainedModel, layers: Sequence[int], **inputs: Any) -> tuple[Tensor, ...]:
    """Forward a model without its output projection. Return the states `[B, T, H]` of `layers`."""
    return _forward(body(model), model, layers, inputs)[1]


def forward_with_states(
    model: nn.Module, layers: Sequence[int], **inputs: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    """Forward the whole model. Return its output and the states `[B, T, H]` of `layers`."""
    if not layers:
        return model(**inputs), ()
    if not isinstance(model, PreTrainedModel):
        # A head that a decoder runs as a model.
        output = model(**inputs)
        return output, tuple(output.hidden_states[layer] for layer in layers)
    return _forward(model, model, layers, inputs)


def _forward(
    called: nn.Module, model: PreTrainedModel, layers: Sequence[int], inputs: dict[str, Any]
) -> tuple[Any, tuple[Tensor, ...]]:
    """called: the model or its body."""
    layout = layout_of(model)
    assert layout.has_layers, "a target without its layers cannot be run"
    last = layout.count - 1
    watched: list[nn.Module] = []
    inner = body(model)
    if called is model and not layout.last_is_final:
        watched.append(inner)
    raw = layout.last_layer
    if last in layers:
        if raw is None:
            raise InputError(
                f"{type(model).__name__} does not show the output of its last layer, which this "
                "head reads; choose other layers"
            )
        watched.append(raw)
    # Else the model would keep the states of all layers.
    readers = layout.readers if called is inner else {}
    watched += [readers[layer] for layer in layers if layer in readers]
    if called is model or set(layers) - readers.keys() - {last, -1}:
        inputs = {"output_hidden_states": True, **inputs}
    with _caught(watched) as calls:
        output = called(**inputs)
    states = []
    for layer in layers:
        if layer == last and raw is not None:
            state = calls[raw].returned
        elif layer in readers:
            state = calls[readers[layer]].read
        elif layer != -1:
            state = output.hidden_states[layer]
        elif called is inner:
            state = output.last_hidden_state
        elif layout.last_is_final:
            state = output.hidden_states[-1]
        else:
            state = calls[inner].returned.last_hidden_state
        # A layer may be on another device than the draft.
        states.append(merged(state, layout).to(model.device))
    return output, tuple(states)


class _Reached(Exception):
    """The output projection was about to run. Not an error; ends a forward there."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def before_projection(model: PreTrainedModel, states_NH: Tensor) -> Tensor:
    """What the output projection reads when the final states are `states_NH`: the model's own
    forward behind `body`, for layers that stand there (BERT) or a scale.
    """
    inner = body(model)
    projection: Any = model.get_output_embeddings()

    def reached(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Reached(inputs[0])

    def final(*_: object, **__: object) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states_NH[None])

    handle = projection.register_forward_pre_hook(reached)
    own = vars(inner).get("forward")
    inner.forward = final
    try:
        model(input_ids=some_tokens(model, rows=1, tokens=1), use_cache=False)
    except _Reached as stop:
        return stop.inputs[0]
    finally:
        handle.remove()
        del inner.forward
        if own is not None:
            inner.forward = own
    raise InputError(f"{type(model).__name__} does not run its output projection")
