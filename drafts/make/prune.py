"""A draft cut out of its target: some of its layers, thinner feed-forward blocks, fewer heads.

Neurons and heads are ranked by what they add to the residual stream on a few texts: the root mean square of the
activation times the norm of the column that it is multiplied with (as in Wanda, arXiv 2306.11695, section 3, summed
over a neuron; widths by activations as in Minitron, arXiv 2407.14679, section 3). Embedding and output stay. The result
is no good model yet, but training starts from the target's embedding.

Legend: B rows, T tokens, F neurons of a block, G groups of heads that share keys.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith_core.errors import InputError

Keep = Literal["first", "last", "even", "measured"]
# What the caller measures of a model, such as alpha: the lower the number, the worse the model.
Score = Callable[[PreTrainedModel], float]


@dataclass(frozen=True)
class Family:
    """Module paths of one family. `up` go into a feed-forward block's neurons, `down` comes out of them.

    `q`, `kv` and `o` of attention are empty if the size of a head follows from their number: none can be left out.
    """

    layers: str
    up: tuple[str, ...]
    down: str
    q: str = ""
    kv: tuple[str, ...] = ()
    o: str = ""
    depth_key: str = "num_hidden_layers"
    width_key: str = "intermediate_size"


_LLAMA = Family(
    layers="model.layers",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    q="self_attn.q_proj",
    kv=("self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "opt": Family(layers="model.decoder.layers", up=("fc1",), down="fc2", width_key="ffn_dim"),
    "gpt_neox": Family(layers="gpt_neox.layers", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h"),
    "gpt2": Family(
        layers="transformer.h", up=("mlp.c_fc",), down="mlp.c_proj", depth_key="n_layer", width_key="n_inner"
    ),
    "phi": Family(layers="model.layers", up=("mlp.fc1",), down="mlp.fc2"),
}


@torch.no_grad()
def prune(
    target: PreTrainedModel,
    *,
    num_layers: int | None = None,
    keep: Keep = "even",
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    texts: Sequence[Sequence[int]] = (),
    score: Score | None = None,
) -> tuple[PreTrainedModel, list[int]]:
    """A model of the target's family with fewer or thinner layers, and which of its layers were kept.

    texts: token ids, read for the importance of neurons and heads. score: for keep="measured", of the target with one
    layer left out; the layers without which it falls most are kept. None: as in the target.
    """
    kind = target.config.model_type
    if kind not in FAMILIES:
        raise InputError(
            f"{target.name_or_path or type(target).__name__}: models of type {kind} cannot be pruned (only "
            f"{', '.join(FAMILIES)}); use --method transplant or fresh"
        )
    family, config = FAMILIES[kind], copy.deepcopy(target.config)
    layers = target.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    depth = len(layers)
    width = int(_by_inputs(layers[0].get_submodule(family.up[0])).shape[1])
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    wanted_layers = _within("num_layers", num_layers, depth)
    wanted_width = _within("intermediate_size", intermediate_size, width)
    wanted_heads = _within("num_heads", num_heads, heads)
    if wanted_heads != heads and (not family.o or (groups > 1 and wanted_heads % (heads // groups))):
        raise InputError(
            f"num_heads: {wanted_heads} of {heads} heads cannot be kept: models of type {kind} "
            f"{'can' if family.o else 'cannot'} be cut by heads, and {heads // groups} heads share keys"
        )
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kept = _layers(target, layers, wanted_layers, keep, score)
    squares = _mean_squares(target, layers, kept, family, texts) if texts else {}
    setattr(config, family.depth_key, wanted_layers)
    setattr(config, family.width_key, wanted_width)
    if wanted_heads != heads:
        config.head_dim = size
        config.num_attention_heads = wanted_heads
        if groups > 1:
            config.num_key_value_heads = wanted_heads * groups // heads
    if len(getattr(config, "layer_types", None) or ()) == depth:
        config.layer_types = [config.layer_types[index] for index in kept]
    small = type(target)(config)
    nn.Module.to(small, dtype=target.dtype, device=target.device)
    inside = f"{family.layers}."
    weights = {name: value for name, value in target.state_dict().items() if not name.startswith(inside)}
    for place, index in enumerate(kept):
        layer = layers[index]
        cut = dict(layer.state_dict())
        if wanted_width != width:
            neurons_F = _strongest(squares[index, family.down], layer.get_submodule(family.down), wanted_width, 1)
            _take(cut, layer, family.up, neurons_F, outputs=True)
            _take(cut, layer, (family.down,), neurons_F, outputs=False)
        if wanted_heads != heads:
            # Heads that share keys stay together.
            shared = heads // groups if groups > 1 else 1
            out = layer.get_submodule(family.o)
            chosen_G = _strongest(squares[index, family.o], out, wanted_heads // shared, shared * size)
            _take(cut, layer, (family.q,), _rows(chosen_G, shared * size), outputs=True)
            _take(cut, layer, (family.o,), _rows(chosen_G, shared * size), outputs=False)
            if groups > 1:
                _take(cut, layer, family.kv, _rows(chosen_G, size), outputs=True)
        weights |= {f"{inside}{place}.{name}": value for name, value in cut.items()}
    small.load_state_dict(weights)
    small.tie_weights()
    small.generation_config = copy.deepcopy(target.generation_config)
    small.eval()
    return small, kept


def _within(key: str, wanted: int | None, present: int) -> int:
    if wanted is not None and not 0 < wanted <= present:
        raise InputError(f"{key}: {wanted} is not in 1 to {present}, what the target has")
    return present if wanted is None else wanted


def _layers(target: PreTrainedModel, layers: nn.ModuleList, wanted: int, keep: Keep, score: Score | None) -> list[int]:
    depth = len(layers)
    if wanted == depth or keep == "first":
        return list(range(wanted))
    if keep == "last":
        return list(range(depth - wanted, depth))
    if keep == "even":
        return [round(place * (depth - 1) / max(wanted - 1, 1)) for place in range(wanted)]
    assert score is not None
    without = []
    for layer in layers:
        handle = layer.register_forward_hook(_skip, with_kwargs=True)
        without.append(score(target))
        handle.remove()
    return sorted(sorted(range(depth), key=lambda index: without[index])[:wanted])


def _skip(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    # A forward hook that gives a layer's input in place of its output.
    states = args[0] if args else kwargs["hidden_states"]
    return states if isinstance(output, Tensor) else (states, *output[1:])


def _mean_squares(
    target: PreTrainedModel, layers: nn.ModuleList, kept: Sequence[int], family: Family, texts: Sequence[Sequence[int]]
) -> dict[tuple[int, str], Tensor]:
    """Mean square of each input of the kept layers' `down` and `o` over all tokens of the texts, `[inputs]`."""
    sums: dict[tuple[int, str], Tensor] = {}

    def add(key: tuple[int, str], _: nn.Module, args: tuple[Tensor, ...]) -> None:
        sums[key] = sums.get(key, 0) + args[0].detach().flatten(0, -2).double().square().sum(0)

    places = [(index, name) for index in set(kept) for name in (family.down, family.o) if name]
    hooks = [layers[i].get_submodule(name).register_forward_pre_hook(partial(add, (i, name))) for i, name in places]
    for text in texts:
        target(input_ids=torch.tensor([list(text)], device=target.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return sums


def _strongest(squares: Tensor, out: nn.Module, count: int, size: int) -> Tensor:
    """Sorted indices of the `count` groups of `size` inputs of `out` that add most to its output."""
    added = squares * _by_inputs(out).double().square().sum(1)
    chosen: Tensor = added.view(-1, size).sum(1).topk(count).indices.sort().values
    return chosen


def _rows(groups_G: Tensor, width: int) -> Tensor:
    return (groups_G[:, None] * width + torch.arange(width, device=groups_G.device)).flatten()


def _take(cut: dict[str, Tensor], layer: nn.Module, names: Sequence[str], chosen: Tensor, *, outputs: bool) -> None:
    for name in names:
        # GPT-2's Conv1D keeps its weight the other way round.
        first = outputs != isinstance(layer.get_submodule(name), Conv1D)
        cut[f"{name}.weight"] = cut[f"{name}.weight"].index_select(0 if first else 1, chosen)
        if outputs and f"{name}.bias" in cut:
            cut[f"{name}.bias"] = cut[f"{name}.bias"].index_select(0, chosen)


def _by_inputs(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(linear, Conv1D) else weight.T
