"""Give a small trained LLaMA the cost of a large one without changing what it computes.

Measuring speed needs a target as expensive as a real one and a draft that agrees with it. So the
width is padded with zeros, and layers that add nothing stand between the trained ones; a
multiplication by zero costs as much as any other. The config keeps the parameter count of the
original (`widened_from`), and evaluations report it.

Legend: h the old width, H the new one.

* Every residual state is [x, 0]. RMSNorm divides by sqrt(mean(x^2) + eps), and the mean of [x, 0]
  is h/H of the mean
  of x; so eps becomes eps * h/H and the norm's weight is multiplied by sqrt(h/H).
* Heads keep their size, hence RoPE and the scale of the scores. New heads, and new neurons of the
  feed-forward
  block, have zero weights. The ratio of query heads to key/value heads stays.
* An added layer is a copy of the trained layer before it with zero `o_proj` and `down_proj`.
"""

import copy
from bisect import bisect_right

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

# What can be larger, under the names of a Llama config.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")


@torch.no_grad()
def widen(model: LlamaForCausalLM, **sizes: int) -> LlamaForCausalLM:
    """A larger LLaMA with the logits of `model` (equal up to rounding), of its dtype and on its
    device.

    sizes: new values for some of `SIZES`.
    """
    old = model.config
    new = wide_config(old, **sizes)
    # Built whole: the buffers of RoPE depend on the head size alone and come out as the old
    # model's.
    wide = LlamaForCausalLM(new)
    new.widened_from = getattr(old, "widened_from", model.num_parameters())
    nn.Module.to(wide, device=model.device, dtype=model.dtype)
    norm_scale = (old.hidden_size / new.hidden_size) ** 0.5
    # Where the trained layers stand, evenly spread; after each stand the ones added to it.
    trained = [
        layer * new.num_hidden_layers // old.num_hidden_layers
        for layer in range(old.num_hidden_layers)
    ]
    weights = dict(model.named_parameters())
    for name, value in wide.named_parameters():
        source, is_added = name, False
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            source = f"model.layers.{bisect_right(trained, int(index)) - 1}.{rest}"
            is_added = int(index) not in trained
        value.zero_()
        if is_added and ("o_proj" in name or "down_proj" in name):
            continue
        part = weights[source] * norm_scale if "norm" in name else weights[source]
        value[tuple(slice(size) for size in part.shape)] = part
    wide.generation_config = copy.deepcopy(model.generation_config)
    wide.eval()
    return wide


def wide_config(old: LlamaConfig, **sizes: int) -> LlamaConfig:
    """The configuration of the widened model. Raises ValueError for a shape that heads of the same
    size do not fill.
    """
    new = copy.deepcopy(old)
    for key, value in sizes.items():
        setattr(new, key, value)
    head = old.head_dim
    group = old.num_attention_heads // (old.num_key_value_heads or old.num_attention_heads)
    # The query heads of the old model need not fill its width, and the ratio to the width is kept.
    heads, left = divmod(new.hidden_size * old.num_attention_heads, old.hidden_size)
    if left or heads % group:
        fits = old.hidden_size * group // old.num_attention_heads
        raise ValueError(
            f"hidden_size: {new.hidden_size} is not filled by heads of {head}; use a multiple of "
            f"{fits}"
        )
    new.num_attention_heads, new.num_key_value_heads, new.head_dim = heads, heads // group, head
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
    return new
