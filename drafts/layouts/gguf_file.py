"""A language model or an EAGLE-3 head as one GGUF file, which llama.cpp reads."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.llama_layer import llama_parts
from drafts.layouts import gguf_vocabulary
from drafts.layouts.source import Proof, Source, probe_ids
from drafts.layouts.table import inverted, renamed
from drafts.neighbours import complete, llama_server, program
from draftsmith_core.errors import InputError, RunError, require_package
from draftsmith_core.models import text_config, vocabulary_size

FILE = "model.gguf"
# transformers' model type: (llama.cpp's name, whether its rotary embedding pairs neighbouring dimensions).
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
ROPES = ("default", "linear", "llama3")
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_norm_2.weight": "hidden_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.{part}": "self_attn.q_proj.{part}",
    "attn_k.{part}": "self_attn.k_proj.{part}",
    "attn_v.{part}": "self_attn.v_proj.{part}",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "fc.weight": "fc.weight",
}
# llama.cpp's name -> ours, of a language model and of a head.
NAMES = {f"blk.{{i}}.{theirs}": f"model.layers.{{i}}.{ours}" for theirs, ours in _LAYER.items()} | {
    theirs: ours if theirs == "output.weight" else f"model.{ours}" for theirs, ours in _OUTSIDE.items()
}
HEAD_NAMES = {f"blk.0.{theirs}": f"midlayer.{ours}" for theirs, ours in _LAYER.items()} | _OUTSIDE | {"d2t": "d2t"}
_PROVEN_TOKENS = 24


def write(source: Source, out: Path) -> Proof:
    """`model.gguf` with the tokenizer in it; a language model is proven by llama-server if it is installed."""
    require_package("gguf", "--format gguf")
    file = out / FILE
    if isinstance(source.draft, PreTrainedModel):
        model, config = source.draft, text_config(source.draft)
        tensors = dict(model.state_dict())
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        _write(file, *ARCHITECTURES[config.model_type], config, tensors, NAMES, source, {})
        server = program("llama-server")
        if server is not None:
            return _proof(model, file, server)
    else:
        head: Any = source.draft
        tensors = dict(head.state_dict())
        tensors.pop("t2d", None)
        if "d2t" in tensors:
            # Ours are offsets (token id less row number); llama.cpp wants the token ids themselves.
            tensors["d2t"] = head.target_ids_D
        if head.borrowed.scales_embedding:
            tensors["embed_tokens.weight"] = head.borrowed.embedding_table
        keys = {
            "target_layers": list(head.hidden_layers),
            "target_hidden_size": head.config.target_hidden_size,
            "norm_before_residual": head.config.norm_before_residual,
            "norm_before_fc": False,
        }
        config, _ = llama_parts(head.config.layer, head.config.vocab_size)
        _write(file, "eagle3", True, config, tensors, HEAD_NAMES, source, keys)
    return Proof(None, f"published layout: {len(tensors)} tensors under llama.cpp's names")


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order that pairs dimension 2i with 2i + 1; transformers pairs i with i + n / 2."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rope(config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """llama.cpp's keys of the rotary embedding, and the factors `[head_dim / 2]` that its llama3 form needs."""
    rope = dict(config.rope_parameters)
    keys: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind != "llama3":
        return keys, {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    return keys, {"rope_freqs.weight": plain / scaled}


def _write(
    file: Path,
    arch: str,
    paired: bool,
    config: Any,
    tensors: dict[str, Tensor],
    names: dict[str, str],
    source: Source,
    keys: dict[str, Any],
) -> None:
    import gguf

    assert source.tokenizer is not None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope, factors = _rope(config)
    written = renamed(tensors, inverted(names))
    if unknown := sorted(written.keys() & tensors.keys() - names.keys()):
        raise InputError(f"--format gguf: {source.name}: its tensor '{unknown[0]}' has no place in llama.cpp's layout")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name(Path(source.name).name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type({torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}[source.dtype])
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
    }
    for key, value in (rope | keys).items():
        adders.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    gguf_vocabulary.add(writer, source.tokenizer, config.vocab_size)
    for name, tensor in (written | factors).items():
        if paired and ".attn_q." in name:
            tensor = _paired(tensor, heads)
        if paired and ".attn_k." in name:
            tensor = _paired(tensor, kv_heads)
        _add_tensor(writer, name, tensor, source.dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    import gguf

    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        writer.add_tensor(name, tensor.to(torch.int64).numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
    elif tensor.dim() == 1 or dtype == torch.float32:
        # llama.cpp wants its norms and biases in fp32.
        writer.add_tensor(name, tensor.float().numpy())
    elif dtype == torch.float16:
        writer.add_tensor(name, tensor.half().numpy())
    else:
        raw = tensor.bfloat16().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


@torch.no_grad()
def _proof(model: PreTrainedModel, file: Path, server: Path) -> Proof:
    """llama-server's greedy answer to one prompt, which must be the model's own."""
    limit = getattr(text_config(model), "max_position_embeddings", 2048)
    ids = probe_ids(model, min(8, vocabulary_size(model)))
    count = min(_PROVEN_TOKENS, limit - ids.shape[1] - 1)
    ours = ids
    for _ in range(count):
        ours = torch.cat([ours, model(ours).logits[:, -1:].argmax(-1)], dim=1)
    # Plain fp32 attention and cache, as the comparison is token for token.
    words = ["-m", str(file), "-c", str(limit), "-np", "1", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    with llama_server(server, words) as port:
        theirs = complete(port, ids[0].tolist(), count)["tokens"]
    if theirs != ours[0, ids.shape[1] :].tolist():
        raise RunError(f"{file}: llama-server continues a prompt otherwise than the model does; nothing was written")
    return Proof("llama.cpp (llama-server)", f"loaded it; {count} greedy tokens equal the model's own")
