"""A language model or an EAGLE-3 head as one GGUF file, which llama.cpp reads."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafts.heads.eagle3 import Eagle3Head
from drafts.heads.llama_layer import llama_parts
from drafts.layouts import gguf_vocabulary
from drafts.layouts.eagle_heads import eagle_head
from drafts.layouts.hf_directory import probe_ids
from drafts.layouts.source import Proof, Source, head_tensors
from drafts.neighbours import complete, llama_server, program
from draftsmith_core.errors import InputError, RunError
from draftsmith_core.models import text_config, vocabulary_size
from draftsmith_core.packages import require_package

FILE = "model.gguf"
# transformers' model type: (llama.cpp's name, whether its rotary embedding pairs neighbouring dimensions).
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_OUTSIDE = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"} | {
    "lm_head.weight": "output.weight",
    "fc.weight": "fc.weight",
}
_PROVEN_TOKENS = 24


def write(source: Source, out: Path) -> Proof:
    """`model.gguf` with the tokenizer in it; a language model is proven by llama-server where that is installed."""
    require_package("gguf", "--format gguf")
    if isinstance(source.draft, PreTrainedModel):
        model = source.draft
        config = text_config(model)
        known = ARCHITECTURES.get(config.model_type)
        if known is None:
            raise InputError(
                f"--format gguf: {source.name} is a {config.model_type} model; written here are "
                f"{', '.join(ARCHITECTURES)}. Use --format hf and llama.cpp's own convert_hf_to_gguf.py"
            )
        _check_attention(source.name, config)
        names = {_name(n.removeprefix("model."), source.name): t for n, t in _own_tensors(model).items()}
        _write(out / FILE, *known, config, names, source, {})
        server = program("llama-server")
        if server is None:
            return Proof(None, f"published layout: {len(names)} tensors under llama.cpp's names")
        return _proof(model, out / FILE, server)
    head = eagle_head(source, "gguf")
    if not isinstance(head, Eagle3Head):
        raise InputError("--format gguf: llama.cpp reads EAGLE-3 heads, and this is EAGLE-1; use --format eagle")
    tensors = head_tensors(source)
    tensors.pop("t2d", None)
    # d2t holds offsets (token id less row number); llama.cpp wants the token ids themselves.
    ids = tensors.pop("d2t", None)
    names = {_name(n.replace("midlayer.", "layers.0."), source.name): t for n, t in tensors.items()}
    if head.borrowed.scales_embedding:
        names["token_embd.weight"] = head.borrowed.embedding_table
    if ids is not None:
        names["d2t"] = head.target_ids_D
    assert source.target is not None
    more = {
        "target_layers": list(head.hidden_layers),
        "target_hidden_size": head.config.target_hidden_size,
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": False,
    }
    config, _ = llama_parts(head.config.layer, head.config.vocab_size)
    _write(out / FILE, "eagle3", True, config, names, source, more)
    return Proof(None, f"published layout: {len(names)} tensors under llama.cpp's names")


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict, without an output projection that is the embedding."""
    state = model.state_dict()
    if text_config(model).tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def _check_attention(name: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = config.model_type == "mistral" and getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or window:
        raise InputError(f"--format gguf: {name} has sliding attention; use llama.cpp's own convert_hf_to_gguf.py")
    if getattr(config, "attention_bias", False) and config.model_type != "qwen2":
        raise InputError(f"--format gguf: {name} has biases in its attention; use llama.cpp's convert_hf_to_gguf.py")


def _name(name: str, where: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    first, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if first == "layers" and inner in _LAYER:
        return f"blk.{number}.{_LAYER[inner]}"
    raise InputError(f"--format gguf: {where}: its tensor '{name}' has no place in llama.cpp's layout of this family")


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order that pairs dimension 2i with 2i + 1; transformers pairs i with i + n / 2."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rope(config: Any, name: str) -> tuple[dict[str, Any], Tensor | None]:
    """llama.cpp's keys of the rotary embedding, and the factors `[head_dim / 2]` that its llama3 form needs."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    keys: dict[str, Any] = {"freq_base": float(rope["rope_theta"])}
    if kind == "linear":
        keys |= {"scaling.type": "linear", "scaling.factor": float(rope["factor"])}
    elif kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        size = config.head_dim
        plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        return keys, plain / scaled
    elif kind != "default":
        known = "default, linear, llama3"
        raise InputError(f"--format gguf: {name}: rope of type '{kind}' is not written here ({known} are)")
    return keys, None


def _write(
    file: Path, arch: str, paired: bool, config: Any, tensors: dict[str, Tensor], source: Source, more: dict[str, Any]
) -> None:
    import gguf

    if source.tokenizer is None:
        raise InputError(f"--format gguf: {source.name} has no tokenizer, and a GGUF file holds one; give --target")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope, factors = _rope(config, source.name)
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
    for key, value in ({f"rope.{k}": v for k, v in rope.items()} | more).items():
        _add(writer, f"{arch}.{key}", value)
    gguf_vocabulary.add(writer, source.tokenizer, config.vocab_size)
    if factors is not None:
        tensors = tensors | {"rope_freqs.weight": factors}
    for name, tensor in tensors.items():
        if paired and ".attn_q." in name:
            tensor = _paired(tensor, heads)
        if paired and ".attn_k." in name:
            tensor = _paired(tensor, kv_heads)
        _add_tensor(writer, name, tensor, source.dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


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
