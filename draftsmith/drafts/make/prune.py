"""A draft cut out of its target: some of its layers, thinner feed-forward blocks.

Neurons are ranked by what they add to the residual stream on a few texts: the root mean square of
the activation times the norm of the column that it is multiplied with (as in Wanda, arXiv
2306.11695, section 3, summed over a neuron; and Minitron, arXiv 2407.14679, section 3). Embedding
and output stay. The result is no good model yet, but training starts from the target's embedding.

Legend: F neurons of a block.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core.errors import InputError
from draftsmith.core.transformers_api import Conv1D
from draftsmith.drafts.tables import read_table

Keep = Literal["first", "last", "even"]


@dataclass(frozen=True)
class Family:
    """Module paths of one family. `up` go into a feed-forward block's neurons, `down` comes out of
    them.
    """

    layers: str
    up: list[str]
    down: str
    depth_key: str = "num_hidden_layers"
    width_key: str = "intermediate_size"


FAMILIES = {name: Family(**paths) for name, paths in read_table("families.yaml").items()}


@torch.no_grad()
def prune(
    target: PreTrainedModel,
    *,
    num_layers: int | None = None,
    keep: Keep = "even",
    intermediate_size: int | None = None,
    texts: Sequence[Sequence[int]] = (),
) -> tuple[PreTrainedModel, list[int]]:
    """A model of the target's family with fewer or thinner layers, and which of its layers were
    kept.

    texts: token ids, read for the importance of neurons. None: as in the target.
    """
    kind = target.config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"{target.name_or_path}: a {kind} model cannot be pruned; use --method transplant or "
            "fresh"
        )
    family = FAMILIES[kind]
    layers: Any = target.get_submodule(family.layers)
    down = layers[0].get_submodule(family.down)
    width = len(_by_inputs(down))
    wanted_width = _within("intermediate_size", intermediate_size, width)
    wanted_layers = _within("num_layers", num_layers, len(layers))
    kept = _kept(keep, wanted_layers, len(layers))
    config = copy.deepcopy(target.config)
    setattr(config, family.depth_key, wanted_layers)
    setattr(config, family.width_key, wanted_width)
    if len(getattr(config, "layer_types", None) or ()) == len(layers):
        config.layer_types = [config.layer_types[index] for index in kept]
    small = type(target)(config)
    nn.Module.to(small, dtype=target.dtype, device=target.device)
    inside = f"{family.layers}."
    weights = target.state_dict()
    for name in [name for name in weights if name.startswith(inside)]:
        del weights[name]
    thinner = wanted_width != width
    squares = _sums_of_squares(target, layers, kept, family, texts) if thinner else {}
    for position, index in enumerate(kept):
        cut = layers[index].state_dict()
        if thinner:
            down_FH = _by_inputs(layers[index].get_submodule(family.down)).double()
            added_F = squares[index] * down_FH.square().sum(1)
            neurons_F = added_F.topk(wanted_width).indices.sort().values
            cut |= _thinner(layers[index], cut, neurons_F, family)
        for name, value in cut.items():
            weights[f"{inside}{position}.{name}"] = value
    small.load_state_dict(weights)
    small.tie_weights()
    small.generation_config = copy.deepcopy(target.generation_config)
    small.eval()
    return small, kept


def _kept(keep: Keep, wanted: int, depth: int) -> list[int]:
    if keep == "even":
        return [round(number * (depth - 1) / max(wanted - 1, 1)) for number in range(wanted)]
    return list(range(wanted) if keep == "first" else range(depth - wanted, depth))


def _thinner(
    layer: nn.Module, weights: dict[str, Tensor], neurons_F: Tensor, family: Family
) -> dict[str, Tensor]:
    """The weights of a layer's feed-forward part with these neurons only."""
    cut = {}
    for name in (*family.up, family.down):
        into_neurons = name != family.down
        # GPT-2's Conv1D keeps its weight the other way round.
        rows = into_neurons != isinstance(layer.get_submodule(name), Conv1D)
        weight = weights[f"{name}.weight"]
        cut[f"{name}.weight"] = weight.index_select(0 if rows else 1, neurons_F)
        bias = weights.get(f"{name}.bias")
        if into_neurons and bias is not None:
            cut[f"{name}.bias"] = bias.index_select(0, neurons_F)
    return cut


def _within(key: str, wanted: int | None, present: int) -> int:
    if wanted is not None and not 0 < wanted <= present:
        raise InputError(f"{key}: {wanted} is not in 1 to {present}, what the target has")
    return present if wanted is None else wanted


def _sums_of_squares(
    target: PreTrainedModel,
    layers: nn.ModuleList,
    kept: Sequence[int],
    family: Family,
    texts: Sequence[Sequence[int]],
) -> dict[int, Tensor]:
    """Sum of squares of each input of the kept layers' `down` over all tokens of the texts,
    `[F]`.
    """
    sums: dict[int, Tensor] = {}

    def add(index: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs_TF = args[0].detach().flatten(0, -2).double()
        sums[index] = sums.get(index, 0) + inputs_TF.square().sum(0)

    downs = {index: layers[index].get_submodule(family.down) for index in kept}
    hooks = [down.register_forward_pre_hook(partial(add, index)) for index, down in downs.items()]
    for text in texts:
        target(input_ids=torch.tensor([list(text)], device=target.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return sums


def _by_inputs(linear: Any) -> Tensor:
    return linear.weight if isinstance(linear, Conv1D) else linear.weight.T
