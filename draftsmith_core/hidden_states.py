"""The hidden states of a causal model and the way from the last of them to its logits, in one shape
for every architecture.

Architectures differ: some keep several residual streams, some hand out another last state than the
one that their output projection reads, some have layers in between (BERT). How a model does it is
found by trying it on a few tokens, once.

Legend: B rows, T tokens, N tokens, H hidden size, V vocabulary, S residual streams.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from draftsmith_core.errors import InputError


@dataclass(frozen=True)
class StateLayout:
    """What a model's `hidden_states` look like.

    count: number of entries, embedding included. width: H. streams_first: states with residual
    streams are `[S, B, T, H]`, else `[B, T, S, H]` or `[B, T, S * H]`. last_is_final: the last
    entry is the state that `body` returns as the last.
    """

    count: int
    width: int
    streams_first: bool
    last_is_final: bool


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
        return StateLayout(
            count=config.num_hidden_layers + 1,
            width=config.hidden_size,
            streams_first=False,
            last_is_final=True,
        )
    known = _layouts.get(model)
    if known is None:
        with evaluating(model):
            ids_BT = some_tokens(model, rows=2, tokens=3)
            out = body(model)(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        known = _layouts[model] = _layout(model, out.hidden_states, out.last_hidden_state)
    return known


def _layout(model: PreTrainedModel, states: Sequence[Tensor] | None, last: Tensor) -> StateLayout:
    if not states:
        raise InputError(f"{type(model).__name__} gives no hidden states, which heads read")
    shape = last.shape[:2]
    return StateLayout(
        count=len(states),
        width=last.shape[-1],
        streams_first=any(state.dim() == 4 and state.shape[:2] != shape for state in states),
        last_is_final=states[-1].shape == last.shape and torch.equal(states[-1], last),
    )


def some_tokens(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    """Ids `[rows, tokens]` from inside the vocabulary: at its ends are padding, and markers of
    images and sound that need an input.
    """
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    places = torch.arange(rows * tokens, device=model.device).view(rows, tokens)
    return size // 7 + places * max(size // 2 // (rows * tokens), 1) % max(size // 2, 1)


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


def states_of(model: PreTrainedModel, layers: Sequence[int], output: Any) -> list[Tensor]:
    """The states `[B, T, H]` of `layers` in an output of `body(model)`; -1 is the final state.

    Only for layers other than -1 the output must have `hidden_states`.
    """
    states = []
    for layer in layers:
        if layer == -1:
            states.append(output.last_hidden_state)
        else:
            states.append(merged(output.hidden_states[layer], layout_of(model)))
    return states


def forward_with_states(
    model: nn.Module, layers: Sequence[int], **inputs: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    """Forward the whole model. Return its output and the states `[B, T, H]` of `layers`, of which
    -1 is the final one.
    """
    if not layers:
        return model(**inputs), ()
    if not isinstance(model, PreTrainedModel):
        # A head that a decoder runs as a model.
        output = model(**inputs)
        return output, tuple(output.hidden_states[layer] for layer in layers)
    layout = layout_of(model)
    if layout.last_is_final:
        output = model(**inputs, output_hidden_states=True)
        return output, tuple(merged(output.hidden_states[layer], layout) for layer in layers)
    outputs: list[Any] = []
    handle = body(model).register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        output = model(**inputs, output_hidden_states=True)
    finally:
        handle.remove()
    return output, tuple(states_of(model, layers, outputs[0]))


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
