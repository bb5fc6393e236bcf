"""Models for the device check: trained small ones in the exact shape of large ones, made on the
device.

Speed needs the cost of a Llama-3.1-8B, and acceptance needs a pair that was trained. A small
trained LLaMA therefore takes a corner of a large one and computes there what it did alone;
everything else adds nothing.

Legend: h, d, n width, head size and layers of the small model; H, E, L those of the large one; G
query heads that share a key/value head in the large one.

* The residual state is [x, 0]. RMSNorm divides by sqrt(mean(x^2) + eps), and the mean of [x, 0] is
  h/H of that of x:
  eps is multiplied by h/H and the norm's weight by sqrt(h/H).
* Head i becomes query head i G with key/value head i. RoPE turns pair j of d by base^(-2j/d), so
  that the pair moves to
  place j E/d, where the large model turns by the same; scores are divided by sqrt(E) there, so that
  queries are multiplied by sqrt(E/d).
* Added layers have zero `o_proj` and `down_proj` and random weights elsewhere, like added neurons:
  multiplying by them
  costs what any multiplication costs, also in electric power.
* Added tokens are copies of the token that is least likely on average.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from benchmarks.gpu.device_measure import Check


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA, as in its config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    def config(self) -> LlamaConfig:
        """The configuration; no token ends a text."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256)  # Llama-3.1-8B
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 64, 128256)  # Llama-3.2-1B
TINY_TARGET = Shape(240, 640, 7, 12, 6, 64, 4160)
TINY_DRAFT = Shape(216, 128, 3, 12, 6, 32, 4160)


def shapes(check: Check) -> tuple[Shape, Shape]:
    """Target and draft."""
    return (TINY_TARGET, TINY_DRAFT) if check.tiny else (LLAMA_8B, LLAMA_1B)


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of random weights, made on the device in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(shape.config())
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval()
    return model


@torch.no_grad()
def enlarged(
    source: Path, shape: Shape, device: torch.device, dtype: torch.dtype
) -> LlamaForCausalLM:
    """The LLaMA of a directory in a larger shape, computing the same up to rounding."""
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = small.config
    assert old.head_dim is not None
    large = random_model(shape, device, dtype)
    width = old.hidden_size
    ratio = old.hidden_size / shape.hidden
    if (
        old.num_attention_heads != old.num_key_value_heads
        or old.num_attention_heads > shape.kv_heads
    ):
        raise ValueError(f"{source}: its heads do not fit {shape}")
    for module in large.modules():
        if isinstance(module, LlamaRMSNorm):
            module.variance_epsilon = old.rms_norm_eps * ratio
    large.config.rms_norm_eps = old.rms_norm_eps * ratio
    for index, layer in enumerate(large.model.layers):
        # New layers read nothing new and write nothing.
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        place, added = divmod(index * old.num_hidden_layers, shape.layers)
        if added < old.num_hidden_layers:
            _fill(layer, small.model.layers[place], old, shape)
    _put_norm(large.model.norm.weight, small.model.norm.weight, ratio)
    some_1T = torch.arange(0, old.vocab_size, 7)[None, :256]
    mean_V = small(some_1T).logits[0].mean(0)
    tokens = torch.arange(shape.vocabulary)
    tokens[old.vocab_size :] = mean_V.argmin()
    for theirs, ours in (
        (small.model.embed_tokens.weight, large.model.embed_tokens.weight),
        (small.lm_head.weight, large.lm_head.weight),
    ):
        ours.zero_()
        ours[:, :width] = theirs[tokens].to(ours)
    return large


def _fill(
    layer: LlamaDecoderLayer, trained: LlamaDecoderLayer, old: LlamaConfig, shape: Shape
) -> None:
    """Let a large layer compute what a trained one of that config does."""
    assert old.head_dim is not None
    width = old.hidden_size
    inner = slice(0, old.intermediate_size)
    attention = layer.self_attn
    theirs = trained.self_attn
    spacing = shape.head // old.head_dim
    # Where dimension i of a head goes: pairs are (j, j + d/2).
    half = old.head_dim // 2
    dims = torch.arange(old.head_dim)
    places = torch.where(dims < half, dims * spacing, (dims - half) * spacing + shape.head // 2)
    heads = shape.head * torch.arange(old.num_attention_heads).unsqueeze(1)
    group = shape.heads // shape.kv_heads
    queries = (heads * group + places).flatten()
    values = (heads + places).flatten()
    _put(attention.q_proj.weight, theirs.q_proj.weight * spacing**0.5, queries)
    # else dimensions that no trained head has would add to the scores
    attention.k_proj.weight.zero_()
    _put(attention.k_proj.weight, theirs.k_proj.weight, values)
    _put(attention.v_proj.weight, theirs.v_proj.weight, values)
    out = attention.o_proj.weight
    out[:width, queries] = theirs.o_proj.weight.to(out)
    _put(layer.mlp.gate_proj.weight, trained.mlp.gate_proj.weight, inner)
    _put(layer.mlp.up_proj.weight, trained.mlp.up_proj.weight, inner)
    layer.mlp.down_proj.weight[:width, inner] = trained.mlp.down_proj.weight.to(out)
    ratio = width / shape.hidden
    _put_norm(layer.input_layernorm.weight, trained.input_layernorm.weight, ratio)
    _put_norm(layer.post_attention_layernorm.weight, trained.post_attention_layernorm.weight, ratio)


def _put(weight: Tensor, part: Tensor, rows: Tensor | slice) -> None:
    """Write rows of a large matrix that read nothing but what the small one reads."""
    block = weight.new_zeros(weight[rows].shape)
    block[:, : part.shape[1]] = part.to(weight)
    weight[rows] = block


def _put_norm(weight: Tensor, part: Tensor, ratio: float) -> None:
    scaled = part * ratio**0.5
    weight[: len(part)] = scaled.to(weight)
