"""Cuts a small draft out of a LLaMA, as the weights that its training starts from.

    python benchmarks/carve.py --model draftsmith/demo/pair/target --out DIR \
        --num_hidden_layers 2 --intermediate_size 96

The embedding, the final norm and evenly spaced layers (the first and the last among them) are kept as they are; of
each kept feed-forward block the neurons with the heaviest weights. What comes out is no good model, but it already
speaks the target's embedding, which is where most of the time of a small draft's training goes.
"""

import copy
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from draftsmith_core.models import load_model
from draftsmith_core.options import parse
from draftsmith_core.tokenization import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Cut `num_hidden_layers` layers with `intermediate_size` neurons each out of `model`."""

    model: str
    """A LLaMA: a local directory or hub name."""
    out: str
    """Where the result goes, with the model's tokenizer."""
    num_hidden_layers: int
    intermediate_size: int


@torch.no_grad()
def carve(model: LlamaForCausalLM, num_hidden_layers: int, intermediate_size: int) -> LlamaForCausalLM:
    """A LLaMA of fewer and thinner layers, all of its weights taken from `model`.

    Raises ValueError when the model is not larger than what is asked for.
    """
    depth, width = model.config.num_hidden_layers, model.config.intermediate_size
    if not 0 < num_hidden_layers <= depth:
        raise ValueError(f"num_hidden_layers: {num_hidden_layers} is not in 1..{depth}")
    if not 0 < intermediate_size <= width:
        raise ValueError(f"intermediate_size: {intermediate_size} is not in 1..{width}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.intermediate_size = num_hidden_layers, intermediate_size
    small = LlamaForCausalLM(config)
    nn.Module.to(small, dtype=model.dtype).eval()
    weights = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
    spacing = (depth - 1) / max(num_hidden_layers - 1, 1)
    for index in range(num_hidden_layers):
        layer = model.model.layers[round(index * spacing)]
        chosen_F = _heaviest(layer.mlp, intermediate_size)
        for name, value in layer.state_dict().items():
            if name.startswith("mlp."):
                value = value[:, chosen_F] if name.endswith("down_proj.weight") else value[chosen_F]
            weights[f"model.layers.{index}.{name}"] = value
    small.load_state_dict(weights)
    return small


def _heaviest(mlp: nn.Module, count: int) -> Tensor:
    """Indices of the neurons whose gate, up and down weights have the largest product of norms, in order."""
    weights = {name: value.float() for name, value in mlp.named_parameters()}
    size_F = weights["gate_proj.weight"].norm(dim=1) * weights["up_proj.weight"].norm(dim=1)
    size_F = size_F * weights["down_proj.weight"].norm(dim=0)
    chosen_F: Tensor = size_F.topk(count).indices.sort().values
    return chosen_F


def main() -> None:
    """Carve and save."""
    options, _ = parse(Options, "carve", sys.argv[1:])
    model = load_model(options.model, device="cpu", dtype="float32")
    small = carve(model, options.num_hidden_layers, options.intermediate_size)  # type: ignore[arg-type]
    small.save_pretrained(options.out)
    load_tokenizer(options.model).save_pretrained(options.out)


if __name__ == "__main__":
    main()
